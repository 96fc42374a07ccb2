"""A model's packed weights: one file, mapped by every worker, read without torch.

Decides the file's format: 16 bytes (magic, version, length of the header), a JSON header that
describes the model and where each tensor lies, then the tensors in the order a step reads them,
each at a multiple of ``ALIGN``. How weights are packed is ``baton.engine.pack``'s business.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.core.pages import Pages
from baton.engine.info import ModelNotPrepared
from baton.engine.mapped import map_file, pages_of
from baton.ports.engine import ModelInfo

#: Raise when packing changes: files of another version are made anew.
VERSION = 1
ALIGN = 4096
#: The setting that leaves the kind of weights to the model (see ``baton.engine.pack``).
AUTO = "auto"
_HEAD = struct.Struct("<8sII")
_MAGIC = b"batonpk\0"


#: Architectures that the compiled step computes as the modules do (see ``baton.engine.pack``), and
#: who says how far a layer sees: nobody, the configuration, or the layer's own attention.
STEP_ARCHITECTURES = {
    "LlamaForCausalLM": "",
    "MistralForCausalLM": "config",
    "Qwen2ForCausalLM": "layer",
    "Qwen3ForCausalLM": "layer",
    "SmolLM3ForCausalLM": "layer",
}


class LayerSpec(msgspec.Struct, frozen=True):
    """What differs between layers beside weights."""

    window: int = 0
    """Positions a query sees; 0: all."""
    rotate: bool = True
    """Whether queries and keys get rotary positions."""


class PackedSpec(msgspec.Struct, frozen=True):
    """The header: what the compiled step must know of the model."""

    model: str
    """The model's digest."""
    dtype: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rotary: int
    norm_eps: float
    scale: float
    layers: tuple[LayerSpec, ...]
    weights: str = "full"
    """Kind of the layers' matrices: ``full`` (of the dtype), ``int8`` or ``int4``."""
    head: str = "full"
    """Kind of the head's matrix."""
    refused: str = ""
    """Why the compiled step is not for this model; then there are no tensors."""
    refused_by: str = ""
    """Name of the kernels that found so."""
    tensors: dict[str, tuple[int, int]] = {}
    """Offset in the file and bytes of each tensor."""


def packed_path(model_dir: Path, dtype: str, weights: str = "full") -> Path:
    """Return where a model's packed weights lie; those of ``auto`` link to one of the others."""
    kind = "" if weights == "full" else f".{weights}"
    return model_dir / f"packed-{VERSION}.{dtype}{kind}.bin"


def find_packed(
    model_dir: Path, dtype: str, info: ModelInfo, weights: str = "full"
) -> PackedSpec | None:
    """Return the header of this very model's packed weights, if they are there in full."""
    try:
        spec = read_spec(packed_path(model_dir, dtype, weights))
    except (OSError, ModelNotPrepared):
        return None
    return spec if spec.model == info.digest else None


def settle_auto(model_dir: Path, dtype: str, weights: str) -> None:
    """Make ``auto`` mean ``weights`` for this model from now on; whole or not at all."""
    path = packed_path(model_dir, dtype, AUTO)
    fresh = path.with_suffix(f".{os.getpid()}.part")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(packed_path(model_dir, dtype, weights).name)
    fresh.replace(path)


def write_packed(path: Path, spec: PackedSpec, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write ``path`` in place; who wants it whole or not at all renames it afterwards."""
    places: dict[str, tuple[int, int]] = {}
    # The header's own length depends on the offsets, so it gets room for any of them.
    room = _HEAD.size + len(msgspec.json.encode(spec)) + sum(len(name) + 64 for name in tensors)
    at = _aligned(room)
    for name, tensor in tensors.items():
        places[name] = (at, tensor.nbytes)
        at = _aligned(at + tensor.nbytes)
    header = msgspec.json.encode(msgspec.structs.replace(spec, tensors=places))
    with path.open("wb") as file:
        file.write(_HEAD.pack(_MAGIC, VERSION, len(header)) + header)
        for name, tensor in tensors.items():
            file.seek(places[name][0])
            file.write(tensor.data)
        file.truncate(at)
        file.flush()
        os.fsync(file.fileno())


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def read_spec(path: Path) -> PackedSpec:
    """Return the header of a file that is whole.

    Raises:
        FileNotFoundError: there is no such file.
        ModelNotPrepared: it is truncated, or not a file of this version.
    """
    with path.open("rb") as file:
        magic, version, length = _HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size, b"\0"))
        try:
            if (magic, version) != (_MAGIC, VERSION):
                raise ModelNotPrepared(f"{path} is not a file of packed weights")
            spec = msgspec.json.decode(file.read(length), type=PackedSpec)
        except msgspec.MsgspecError as error:
            raise ModelNotPrepared(f"{path} is broken ({error}): remove it") from None
        size = os.fstat(file.fileno()).st_size
    end = max((offset + length for offset, length in spec.tensors.values()), default=0)
    if size < end:
        raise ModelNotPrepared(f"{path} has {size} of {end} bytes: remove it")
    return spec


class PackedWeights:
    """The mapped file."""

    def __init__(self, path: Path) -> None:
        """Map ``path``; its pages are shared by all who do.

        Raises:
            ModelNotPrepared: see :func:`read_spec`.
        """
        self.spec = read_spec(path)
        self._map = map_file(path)
        self._base: int = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]

    def place(self, name: str) -> int:
        """Return the address of a tensor."""
        return self._base + self.spec.tensors[name][0]

    def pages(self) -> Pages:
        """Return how the file lies in memory."""
        return pages_of(self._map)

    def has(self, name: str) -> bool:
        """Whether the model has this tensor."""
        return name in self.spec.tensors
