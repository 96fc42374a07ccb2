"""Which architectures are served: tiny random models of many families through the proof."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.info import ModelRefused, layout_of
from baton.engine.load import empty_model
from baton.engine.proof import long_length, prove_model
from baton.engine.torch_engine import TorchEngine
from support.engine_models import PROVEN, REFUSED, VOCAB, tiny_config, tiny_info, tiny_model
from support.engine_steps import Arena, Sequel, ids_of


@pytest.mark.parametrize("family", PROVEN)
def test_a_family_passes_and_answers_as_generate_does(family: str) -> None:
    """The proof passes, and packed greedy decoding has the ids of transformers' generate()."""
    model = tiny_model(family)
    info = tiny_info(model)
    proof = prove_model(model, info)
    assert proof["worst_logit_difference"] < 1e-3
    assert proof["layers"] == 3
    engine = TorchEngine.around(model, info, layout_of(info, "float32", 16), threads=1)
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, VOCAB, length).astype(np.int32) for length in (5, 61, 290)]
    Arena(engine, 80)
    sequels = [
        Sequel(engine, prompt, ids_of(range(i * 24, i * 24 + 24)), request_id=str(i))
        for i, prompt in enumerate(prompts)
    ]
    for sequel in sequels:
        sequel.prefill([33, 33])
    for _ in range(11):
        results = engine.step([sequel.decode_row() for sequel in sequels])
        for sequel, result in zip(sequels, results, strict=True):
            sequel.take(result)
    wanted = [generated(family, prompt, 12) for prompt in prompts]
    assert [sequel.output for sequel in sequels] == wanted
    assert len({tuple(output) for output in wanted}) == 3, "the model tells prompts apart"


def generated(family: str, prompt: Any, count: int) -> list[int]:
    """Return transformers' own greedy answer, with its own attention and cache."""
    model = tiny_model(family, attention="eager")
    inputs = torch.from_numpy(prompt.astype(np.int64))[None]
    result = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    ids: list[int] = result[0, len(prompt) :].tolist()
    return ids


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_answer_wrongly_is_refused(family: str) -> None:
    """The reason says what the architecture does not do."""
    with pytest.raises(ModelRefused, match=REFUSED[family][2]):
        prove_config(family)


def prove_config(family: str) -> None:
    """Build the modules as loading does, then prove them."""
    empty_model(tiny_config(family), "float32")
    model = tiny_model(family)
    prove_model(model, tiny_info(model))


def test_wrong_logits_are_refused_with_their_size() -> None:
    """A model whose eager forward differs is refused: here one that ignores our positions."""
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def skewed(hidden: Any, position_ids: Any) -> Any:
        skew = 1 if model.config._attn_implementation == "eager" else 1.05
        return forward(hidden, position_ids * skew)

    rotary.forward = skewed
    with pytest.raises(ModelRefused, match="standard deviations"):
        prove_model(model, tiny_info(model))


def test_a_model_whose_rows_depend_on_the_batch_is_refused() -> None:
    """Recovery has to be exact, so a last bit that depends on neighbours is a reason."""
    model = tiny_model("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(ModelRefused, match="not row invariant"):
        prove_model(model, tiny_info(model))


def test_a_layer_that_is_skipped_is_found() -> None:
    """Every layer has to call the attention exactly once a step."""
    model = tiny_model("llama")
    info = tiny_info(model)
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelRefused, match="layer 0 called the paged attention 2 times"):
        prove_model(model, info)


def test_the_long_sequence_goes_past_window_tile_and_original_rope() -> None:
    """The proof must see what only happens beyond these borders."""
    assert long_length(tiny_config("llama"), 8_192) == 301
    assert long_length(tiny_config("gemma2"), 8_192) == 345
    assert long_length(tiny_config("gemma2"), 320) == 320
    scaled = tiny_config("llama")
    scaled.rope_parameters = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 400,
    }
    assert long_length(scaled, 8_192) == 445
    scaled.rope_parameters["original_max_position_embeddings"] = 50_000
    with pytest.raises(ModelRefused, match="too long to be proven"):
        long_length(scaled, 200_000)
