"""From a source's files to the prepared folder's: weights, configuration, tokenizer.

Decides the names under which weights are stored: exactly the modules' own, shared tensors once, so
that loading is mapping and nothing is renamed or copied then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from baton.engine.info import ModelRefused
from baton.engine.load import WEIGHTS_FILE
from baton.engine.sources import ModelSource


def convert(source: ModelSource, work: Path) -> Any:
    """Write the model into ``work`` and return it as transformers loaded it.

    Raises:
        ModelRefused: transformers cannot load it as a decoder-only model.
    """
    try:
        model = _load(source)
        tokenizer = _load_tokenizer(source)
    except (ValueError, KeyError, ImportError, OSError, RuntimeError) as error:
        raise ModelRefused(f"transformers cannot load {source.name}: {error}") from error
    if model.config.is_encoder_decoder:
        raise ModelRefused(f"{source.name} is an encoder-decoder model")
    model.config.save_pretrained(work)
    model.generation_config.save_pretrained(work)
    tokenizer.save_pretrained(work)
    if not (work / "tokenizer.json").exists():
        raise ModelRefused(f"{source.name} has no fast tokenizer (tokenizer.json)")
    if source.gguf is not None:
        _split_digits(source, work / "tokenizer.json")
    _embed_template(work)
    _save_weights(model, work / WEIGHTS_FILE)
    return model


def _load(source: ModelSource) -> Any:
    if source.gguf is not None:
        return AutoModelForCausalLM.from_pretrained(
            source.folder,
            gguf_file=source.gguf,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    return AutoModelForCausalLM.from_pretrained(
        source.folder, dtype="auto", trust_remote_code=False, local_files_only=True
    )


def _load_tokenizer(source: ModelSource) -> Any:
    if source.gguf is not None:
        return AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf)
    return AutoTokenizer.from_pretrained(
        source.folder, trust_remote_code=False, local_files_only=True
    )


def _split_digits(source: ModelSource, path: Path) -> None:
    """Give the tokenizer the digit rule that its GGUF header names and transformers drops.

    The pre-tokenizer ``smollm`` splits numbers into single digits; without it "2000" would be
    encoded in a way the model was never trained on.
    """
    from gguf import GGUFReader

    assert source.gguf is not None
    header = GGUFReader(source.folder / source.gguf).fields.get("tokenizer.ggml.pre")
    if header is None or bytes(header.parts[-1]) != b"smollm":
        return
    tokenizer = Tokenizer.from_file(str(path))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    tokenizer.save(str(path))


def _embed_template(work: Path) -> None:
    """Write the chat template into ``tokenizer_config.json`` too: one place for every model."""
    path = work / "tokenizer_config.json"
    template = work / "chat_template.jinja"
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    if template.exists():
        config["chat_template"] = template.read_text()
    elif isinstance(config.get("chat_template"), str):
        template.write_text(config["chat_template"])
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def _save_weights(model: Any, path: Path) -> None:
    """Write parameters and persistent buffers; of tensors that share memory the first name."""
    seen: set[tuple[int, int]] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        place = (value.data_ptr(), value.numel())
        if value.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = value.contiguous()
    save_file(kept, path, metadata={"format": "pt"})
