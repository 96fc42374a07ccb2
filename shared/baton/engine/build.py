"""Makes the engine a worker's configuration names.

Decides which class serves a kind and a kernel set, and nothing else. Importing this module imports
neither torch nor transformers; :func:`build_engine` does, unless the whole step is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from baton.engine.fake import FakeEngine, FakeKnobs
from baton.engine.info import KERNELS, layout_of, read_info
from baton.engine.kernels import TORCH, KernelChoice
from baton.engine.llama_engine import LlamaEngine
from baton.engine.native.abi import Library
from baton.engine.stop_points import StopPoints
from baton.ports.device import Device
from baton.ports.engine import Engine

#: What the host in a device's place is said to have.
_HOST_BYTES = 2**29


def build_device(device: str) -> Device:
    """Return the device that ``engine.device`` names, for the memory of arenas.

    Raises:
        DeviceMissing: it is not there.
    """
    if device == "cuda":
        from baton.engine.cuda_device import CudaDevice

        return CudaDevice()
    from baton.engine.host_device import HostDevice

    return HostDevice(_HOST_BYTES)


def build_engine(
    model_dir: Path,
    *,
    dtype: str = "auto",
    block_size: int = 16,
    threads: int = 0,
    kind: str = "torch",
    kernels: KernelChoice = TORCH,
    knobs: FakeKnobs | None = None,
    stops: StopPoints | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Engine:
    """Return the engine for a prepared model.

    Args:
        model_dir: what :func:`baton.engine.prepare.prepare` returned, or a fake model's folder.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        block_size: tokens a block.
        threads: of the torch engine; 0 takes the cores this process may run on.
        kind: ``torch`` (whatever computes the model) or ``fake``.
        kernels: what ``baton.engine.kernels`` chose; plain torch by default.
        knobs: of the fake engine.
        stops: of the fake engine, see ``stop_points``.
        sleep: how the fake engine spends time; the simulator passes its own.

    Raises:
        ModelNotPrepared: the folder is not a prepared model.
        ValueError: unknown ``kind`` or ``dtype``.
    """
    if kind not in KERNELS:
        raise ValueError(f"engine kind {kind!r}: allowed are {', '.join(sorted(KERNELS))}")
    info = read_info(model_dir)
    layout = layout_of(info, dtype, block_size, kernels.order, place=kernels.place)
    if kind == "fake":
        return FakeEngine(info, layout, knobs, stops=stops, sleep=sleep)
    if kernels.device:
        from baton.engine.device_engine import DeviceEngine
        from baton.engine.device_plan import Cutting

        cutting = Cutting(kernels.rows)
        return DeviceEngine(
            model_dir, info, layout, device=kernels.device, kernels=kernels.name, cutting=cutting
        )
    if kernels.native is None:
        from baton.engine.torch_engine import TorchEngine

        return TorchEngine(model_dir, info, layout, threads=threads)
    library = Library(kernels.native)
    if kernels.packed is not None:
        return LlamaEngine(
            library, kernels.packed, info, layout, kernels=kernels.name, threads=threads
        )
    from baton.engine.compiled_attention import CompiledAttention
    from baton.engine.torch_engine import TorchEngine

    attention = CompiledAttention(library, layout, kernels=kernels.name, threads=threads)
    return TorchEngine(model_dir, info, layout, threads=threads, attention=attention)
