"""Folders of tiny prepared models, and the kernels chosen for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from baton.engine.info import INFO_FILE
from baton.engine.kernels import KernelChoice, choose_kernels
from baton.engine.load import WEIGHTS_FILE
from baton.engine.native import binding
from baton.engine.quantize import head_kind, quantize
from baton.ports.engine import ModelInfo
from support.engine_compiled import LEVELS, library_of
from support.engine_models import tiny_info, tiny_model

BEST = LEVELS[0]


def folder_of(path: Path, family: str = "llama", **changes: Any) -> ModelInfo:
    """Write a tiny model as a prepared folder; ``changes`` are of its configuration."""
    model: Any = tiny_model(family, attention="eager")
    for name, value in changes.items():
        setattr(model.config, name, value)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms: new ones are all 0 or 1, which hides much
            parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    model.save_pretrained(path)
    info = msgspec.structs.replace(tiny_info(model), digest=family.ljust(64, "0"))
    (path / INFO_FILE).write_bytes(msgspec.json.encode(info))
    return info


def chosen(path: Path, info: ModelInfo, setting: str = "auto", **changes: Any) -> KernelChoice:
    given: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_dir": path}
    return choose_kernels(setting, path, info, **{**given, **changes})


def of_codes(path: Path, kind: str, dtype: str = "float32") -> ModelInfo:
    """Write a tiny model whose layers' weights are what codes of ``kind`` stand for."""
    info = folder_of(path, tie_word_embeddings=False)
    tensors = load_file(path / WEIGHTS_FILE)
    for name, value in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = quantize(value, kind).weight()
        elif name.startswith(("lm_head", "model.embed")):
            tensors[name] = quantize(value, head_kind(kind)).weight()
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt"})
    return info


def link_library(path: Path) -> Path:
    """Make ``path`` a cache in which the best level's library lies already."""
    (path / "kernels").mkdir()
    (path / "kernels" / f"{binding.name_of(BEST)}.so").symlink_to(library_of(BEST).path)
    return path
