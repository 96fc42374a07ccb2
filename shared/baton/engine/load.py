"""Weights from a prepared model's folder into transformers modules, shared by all processes.

Decides that weights are never copied: ``model.safetensors`` is mapped and its pages back the
parameters, so every worker of a host holds the same physical memory. A dtype other than the
stored one is written out once, beside it, and mapped like it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from baton.engine import experts
from baton.engine.attention import NAME
from baton.engine.info import ModelNotPrepared, ModelRefused
from baton.engine.products import use_products

#: What a model's code may raise when it is made to do what it was not written for.
FOREIGN_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

WEIGHTS_FILE = "model.safetensors"


@contextmanager
def held_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, so that two processes never write the same thing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def load_model(model_dir: Path, dtype: str, *, keep: bool = True, attention: str = NAME) -> Any:
    """Return the model in eval mode, its parameters backed by the mapped file.

    Args:
        model_dir: the prepared folder.
        dtype: ``float32`` or ``bfloat16``.
        keep: write weights of another dtype than the stored one beside it and map them, or
            (preparation's proof) convert them in this process's memory alone.
        attention: the registered one that the modules call. Another than the reference's has its
            own way to keep rows apart: the modules' products then stay as they are.

    Raises:
        ModelNotPrepared: weights are missing, truncated, or not those of the configuration.
    """
    config = AutoConfig.from_pretrained(model_dir)
    weights = _mapped(model_dir, dtype, keep)
    model = empty_model(config, dtype, attention)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    still_empty = [name for name, value in model.named_parameters() if value.is_meta]
    if unexpected or still_empty:
        raise ModelNotPrepared(
            f"{model_dir / WEIGHTS_FILE} does not fit its configuration: "
            f"unexpected {unexpected[:3]}, absent {still_empty[:3] or missing[:3]}"
        )
    return model.eval().requires_grad_(False)


def stored_dtype(model_dir: Path) -> str:
    """Return the dtype of the weights file, in which loading copies nothing.

    Raises:
        ModelNotPrepared: weights are missing or broken.
    """
    stored = _read(model_dir / WEIGHTS_FILE)
    dtypes = {value.dtype for value in stored.values() if value.is_floating_point()}
    return str(max(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")


def empty_model(config: PretrainedConfig, dtype: str, attention: str = NAME) -> Any:
    """Return the modules with parameters on the meta device and buffers computed.

    Raises:
        ModelRefused: the architecture takes no registered attention.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with init_empty_weights(include_buffers=False):
        make: Any = AutoModelForCausalLM.from_config
        try:
            model = make(config, dtype=getattr(torch, dtype), attn_implementation=attention)
        except FOREIGN_ERRORS as error:
            raise ModelRefused(
                f"{config.model_type} takes no registered attention ({error!r})"
            ) from error
    return row_invariant(model) if attention == NAME else model


def row_invariant(model: Any) -> Any:
    """Give the model products, and experts if it has any, whose rows do not see each other."""
    use_products(model)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(experts.NAME)
    return model


def _mapped(model_dir: Path, dtype: str, keep: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of the weights file in ``dtype``, converted once if need be."""
    stored = _read(model_dir / WEIGHTS_FILE)
    wanted = getattr(torch, dtype)
    if all(value.dtype == wanted for value in stored.values() if value.is_floating_point()):
        return stored
    if not keep:
        return _cast(stored, wanted)
    converted = model_dir / f"model.{dtype}.safetensors"
    with held_lock(model_dir / ".convert.lock"):
        if not converted.exists():
            partial = converted.with_suffix(f".{os.getpid()}.part")
            save_file(_cast(stored, wanted), partial, metadata={"format": "pt"})
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(converted)
    return _read(converted)


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in tensors.items()
    }


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError

    try:
        return load_file(path)
    except FileNotFoundError:
        raise ModelNotPrepared(f"{path} is missing: run `baton model prepare`") from None
    except SafetensorError as error:
        raise ModelNotPrepared(
            f"{path} is broken ({error}): remove the folder and prepare it again"
        ) from None
