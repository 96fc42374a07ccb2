"""What every process may know of the engine without importing torch.

Decides the name of the dtype ``auto`` stands for, the KV layout of a model, and the compatibility
values two processes compare. Does not load weights.
"""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec

from baton.core.ids import Compat
from baton.ports.engine import KVLayout, ModelInfo

#: File name of :class:`ModelInfo` in a prepared model's folder.
INFO_FILE = "baton.json"

#: The kernel sets that are not compiled. A change of any kernel's arithmetic gets a new name:
#: values of two sets may differ in the last bit, and then recovery would not be exact.
KERNELS = {"torch": "torch-tiles-2", "fake": "fake-1"}

#: The kernel set for a device (ADR 27). Its name goes on with the device's kind, how steps are cut
#: and torch's version.
DEVICE_KERNELS = "device-1"
#: Rows of every forward on a device, where rows must not see each other: what a current GPU
#: multiplies in about the time in which it reads the weights.
DEVICE_ROWS = 128

DTYPES = ("float32", "bfloat16")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class ModelNotPrepared(ValueError):
    """The folder is not a prepared model, or a broken one; the text says which and what to do."""


class ModelRefused(ValueError):
    """The model does something this engine would answer wrongly; the text says what."""


def read_info(model_dir: Path) -> ModelInfo:
    """Return the :class:`ModelInfo` of a prepared model.

    Raises:
        ModelNotPrepared: no folder, no ``baton.json``, or one that does not parse.
    """
    path = model_dir / INFO_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelInfo)
    except FileNotFoundError:
        what = "has no " + INFO_FILE if model_dir.is_dir() else "does not exist"
        raise ModelNotPrepared(
            f"model folder {model_dir} {what}: run `baton model prepare`"
        ) from None
    except msgspec.MsgspecError as error:
        raise ModelNotPrepared(
            f"{path} is broken ({error}): remove the folder, prepare again"
        ) from None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction-set flags of the first core."""
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()


def resolve_dtype(dtype: str, flags: frozenset[str] | None = None, *, device: str = "cpu") -> str:
    """Return ``dtype``, or for ``auto`` bfloat16 where it is computed as such (``cuda``, and CPUs
    that can) and float32 elsewhere.

    Without bf16 instructions torch converts back and forth: measured on AVX2, 8-10 GFLOP/s in
    bfloat16 against 60-87 in float32.
    """
    if dtype == "auto" and device == "cuda":
        return "bfloat16"
    if dtype == "auto":
        known = cpu_flags() if flags is None else flags
        return "bfloat16" if known & _BF16_FLAGS else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are auto, {', '.join(DTYPES)}")
    return dtype


def layout_of(
    info: ModelInfo, dtype: str, block_size: int, order: str = "tokens", *, place: str = "host"
) -> KVLayout:
    """Return the shape of ``info``'s KV cache."""
    return KVLayout(
        layers=info.layers,
        heads=info.kv_heads,
        head_dim=info.head_dim,
        block_size=block_size,
        dtype=resolve_dtype(dtype),
        order=order,
        place=place,
    )


def compat_of(info: ModelInfo, layout: KVLayout, kernels: str) -> Compat:
    """Return what another process must have equal; ``kernels`` is the kernel set's name."""
    return Compat(
        model=info.digest,
        tokenizer=info.tokenizer_digest,
        dtype=layout.dtype,
        block_size=layout.block_size,
        layout=layout.describe(),
        kernels=f"{kernels} {platform.machine()}",
    )
