"""Which prepared model this cluster serves, for every kind of process; without torch.

Decides where the folder is and what all processes must agree on. Loading is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.core.ids import Compat
from baton.engine.fake_model import write_fake_model
from baton.engine.info import ModelNotPrepared, compat_of, layout_of, read_info, resolve_dtype
from baton.engine.kernels import FAKE, KernelChoice, choose_kernels, device_kernels
from baton.engine.prepared import find_prepared
from baton.ports.engine import KVLayout, ModelInfo
from baton.runtime.dirs import cache_dir
from baton.runtime.settings import Config

#: In the run directory: the fake engine's model.
FAKE_FOLDER = "fake-model"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a cluster."""

    folder: Path
    info: ModelInfo
    layout: KVLayout
    compat: Compat
    kernels: KernelChoice
    name: str
    """As clients call it."""


def served_model(config: Config, run_dir: Path) -> ServedModel:
    """Return the model that ``config`` names.

    Raises:
        ModelNotPrepared: there is no such prepared model, it is broken, or there are none of the
            kernels that the settings ask for.
    """
    folder = model_folder(config, run_dir)
    info = read_info(folder)
    kernels = kernel_choice(config, folder, info, cache_dir(config))
    dtype = resolve_dtype(config.model.dtype, device=config.engine.device)
    size = config.arena.block_size
    layout = layout_of(info, dtype, size, kernels.order, place=kernels.place)
    return ServedModel(
        folder=folder,
        info=info,
        layout=layout,
        compat=compat_of(info, layout, kernels.name),
        kernels=kernels,
        name=config.model.name or info.name,
    )


def kernel_choice(config: Config, folder: Path, info: ModelInfo, cache: Path) -> KernelChoice:
    """Return the kernels that serve the model on this machine.

    Raises:
        KernelsMissing: compiled ones are asked for, and there are none.
    """
    if config.engine.kind == "fake":
        return FAKE
    if config.engine.device != "cpu":
        return device_kernels(config.engine.device, invariance=config.engine.invariance)
    return choose_kernels(
        config.engine.kernels,
        folder,
        info,
        dtype=resolve_dtype(config.model.dtype),
        block_size=config.arena.block_size,
        cache_dir=cache,
        weights=config.engine.weights,
    )


def model_folder(config: Config, run_dir: Path) -> Path:
    """Return the prepared model's folder: or the fake one's.

    Raises:
        ModelNotPrepared: there is none.
    """
    if config.engine.kind == "fake":
        folder = run_dir / FAKE_FOLDER
        write_fake_model(folder)
        return folder
    source, cache = config.model.path, cache_dir(config)
    found = find_prepared(source, cache)
    if found is None:
        raise ModelNotPrepared(
            f"model {source!r} is not prepared (looked into {cache}): run `baton model prepare`"
        )
    return found
