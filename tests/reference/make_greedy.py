"""Makes ``greedy.json``: what transformers' own ``generate()`` answers, greedy, in float32.

Run ``python tests/reference/make_greedy.py MODEL_DIR`` with a prepared default model. Prompts are
cut from ``sonnets.txt`` (Shakespeare, public domain) at lengths around the borders of a block (16)
and of an attention tile (256). A prompt whose smallest gap between the two best logits is below
``MARGIN_MIN`` is replaced by the next one: there, rounding alone may decide.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 1000, 2000)
PROMPTS_A_LENGTH = 7
NEW_TOKENS = 32
MARGIN_MIN = 1e-3
#: Source tokens between the beginnings of two prompts of one length.
STRIDE = 997


def answer(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Return the greedy output ids and the smallest gap between the two best logits."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([step[0].topk(2).values for step in result.logits])
    margin = float((best[:, 0] - best[:, 1]).min())
    return result.sequences[0, len(prompt) :].tolist(), margin


def collect(model: Any, source: list[int]) -> list[dict[str, Any]]:
    """Return all prompts with their answers."""
    kept: list[dict[str, Any]] = []
    for length in LENGTHS:
        begin, found = 0, 0
        while found < PROMPTS_A_LENGTH:
            prompt = [source[(begin + i) % len(source)] for i in range(length)]
            output, margin = answer(model, prompt)
            if margin >= MARGIN_MIN:
                kept.append({"begin": begin, "prompt": prompt, "output": output, "margin": margin})
                found += 1
            begin += STRIDE
    return kept


def main(model_dir: Path) -> None:
    """Write ``greedy.json`` beside this file."""
    info = json.loads((model_dir / "baton.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    source = tokenizer((HERE / "sonnets.txt").read_text(), add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    document = {
        "model": info["digest"],
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "attention": "eager",
        "new_tokens": NEW_TOKENS,
        "eos_ids": info["eos_ids"],
    }
    head = json.dumps(document, indent=1)[:-2]
    lines = ",\n".join(json.dumps(line, separators=(",", ":")) for line in collect(model, source))
    (HERE / "greedy.json").write_text(f'{head},\n "prompts": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
