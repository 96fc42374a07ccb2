"""Which kernels serve a model on this machine; known to every process, without torch.

Decides between three sets, best first: the compiled step (Llama-like models whose weights are
packed), the compiled attention under transformers' modules, and plain torch. Nothing is compiled
or packed here: what is not there is not used, and ``KernelChoice.note`` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from baton.engine.info import (
    DEVICE_KERNELS,
    DEVICE_ROWS,
    KERNELS,
    ModelNotPrepared,
    cpu_flags,
)
from baton.engine.native import binding
from baton.engine.packed import AUTO, STEP_ARCHITECTURES, find_packed, packed_path
from baton.ports.engine import ModelInfo

_LANES = 16


#: What helps where something was not made yet.
ADVICE = ": run `baton model prepare`"


class KernelsMissing(ModelNotPrepared):
    """Compiled kernels were asked for and cannot be had; the text says why."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel set."""

    name: str
    """Part of the compatibility digest."""
    order: str
    """Of K and V within a block, see :class:`~baton.ports.engine.KVLayout`."""
    native: Path | None = None
    """The compiled library; ``None``: plain torch."""
    packed: Path | None = None
    """Packed weights: the whole step is compiled."""
    weights: str = "full"
    """Their kind: ``full``, ``int8`` or ``int4``."""
    note: str = ""
    """Why nothing faster is used; empty: there is nothing."""
    missing: bool = False
    """Whether ``baton model prepare`` may change that."""
    device: str = ""
    """As torch names it, where steps and blocks are on a device; the rest is then empty."""
    rows: int = 0
    """Of every forward there; 0: as many as there are, which see each other."""

    @property
    def place(self) -> str:
        """Of the blocks, see :class:`~baton.ports.engine.KVLayout`."""
        return "device" if self.device else "host"


TORCH = KernelChoice(KERNELS["torch"], "tokens")
FAKE = KernelChoice(KERNELS["fake"], "tokens")


def device_kernels(device: str, *, invariance: str) -> KernelChoice:
    """Return the kernels of a device (ADR 27).

    Args:
        device: ``cuda``, or ``memfd`` for the host in a device's place.
        invariance: ``on`` or ``off``.
    """
    rows = DEVICE_ROWS if invariance == "on" else 0
    try:
        version = metadata.version("torch")  # whose kernels compute
    except metadata.PackageNotFoundError:
        version = "none"
    cut = f"rows-{rows}" if rows else "free"
    name = f"{DEVICE_KERNELS}-{device}-{cut}-torch-{version}"
    return KernelChoice(name, "tokens", device="cuda" if device == "cuda" else "cpu", rows=rows)


def choose_kernels(
    setting: str,
    model_dir: Path,
    info: ModelInfo,
    *,
    dtype: str,
    block_size: int,
    cache_dir: Path,
    weights: str = "full",
) -> KernelChoice:
    """Return the kernels for a prepared model.

    Args:
        setting: ``auto``, ``compiled`` (nothing else), ``torch``, or a level's name: ``compiled``
            for just that instruction-set level.
        model_dir: the prepared folder.
        info: what it says of itself.
        dtype: ``float32`` or ``bfloat16``.
        block_size: tokens a block.
        cache_dir: where compiled libraries are kept.
        weights: ``full``; ``int8`` or ``int4``, which only the compiled step knows; ``auto``: what
            was found to lose nothing of this model when it was packed.

    Raises:
        KernelsMissing: the setting wants compiled kernels, or the weights the compiled step, and
            there are none.
    """
    choice = _choose(
        setting,
        model_dir,
        info,
        dtype=dtype,
        block_size=block_size,
        cache_dir=cache_dir,
        weights=weights,
    )
    if weights not in ("full", AUTO) and choice.packed is None:
        raise KernelsMissing(f"engine.weights = {weights!r} needs the compiled step: {choice.note}")
    return choice


def _choose(
    setting: str,
    model_dir: Path,
    info: ModelInfo,
    *,
    dtype: str,
    block_size: int,
    cache_dir: Path,
    weights: str,
) -> KernelChoice:
    if setting == "torch":
        return KernelChoice(TORCH.name, TORCH.order, note="engine.kernels is torch")
    choice = _library(setting, info, block_size, cache_dir)
    if choice.native is None:
        if setting != "auto":
            raise KernelsMissing(f"engine.kernels = {setting!r}: {choice.note}")
        return choice
    return _with_step(choice, model_dir, info, dtype, weights)


def levels_for(setting: str) -> tuple[binding.Level, ...]:
    """Return the instruction-set levels that a setting allows here, best first."""
    if setting in ("auto", "compiled"):
        return binding.levels_of(cpu_flags())
    return (binding.level_named(setting),)


def to_try_again(setting: str, cache_dir: Path, *, asked: bool) -> list[str]:
    """Return the levels better than the one that serves which may not be refused any more, and why.

    What the level's sources and arguments are is in its name, and CPU and kernel are looked at each
    time: what is left to change is the compiler. Somebody who ``asked`` may know of more.
    """
    found = []
    for level in levels_for(setting):
        if not binding.refusal(cache_dir, level):
            break
        if not binding.kernel_grants(level):
            continue
        if binding.was_another(cache_dir, level):
            found.append(f"{level.name} (another compiler is here now)")
        elif asked:
            found.append(f"{level.name} (as asked)")
    return found


def _library(setting: str, info: ModelInfo, block_size: int, cache_dir: Path) -> KernelChoice:
    """Return the compiled attention, or why there is none."""
    if block_size % _LANES or info.head_dim % _LANES:
        return _plain(f"a block of {block_size}, a head of {info.head_dim}: multiples of 16 needed")
    left_out = []
    for level in levels_for(setting):
        if not level.flags <= cpu_flags():
            return _plain(f"this CPU has no {level.name}")
        if refusal := binding.refusal(cache_dir, level):
            left_out.append(f"no {level.name}: {refusal}")
            continue
        file = binding.find_library(cache_dir, level)
        if file is None:
            why = f"kernels for {level.name} are not compiled{ADVICE}"
            return _plain(why, missing=True)
        return KernelChoice(binding.name_of(level), "lanes", file, note="; ".join(left_out))
    return _plain("; ".join(left_out))


def _with_step(
    choice: KernelChoice, model_dir: Path, info: ModelInfo, dtype: str, weights: str
) -> KernelChoice:
    """Return the compiled step, if the model's weights are packed for it."""
    packed = find_packed(model_dir, dtype, info, weights)
    if packed is not None and not packed.refused:
        path = packed_path(model_dir, dtype, packed.weights)
        kind = "" if packed.weights == "full" else f"-{packed.weights}"
        name = f"step-{choice.name}{kind}"
        return replace(choice, name=name, packed=path, weights=packed.weights)
    missing = packed is None and info.architecture in STEP_ARCHITECTURES
    if packed is not None:
        # Other kernels, of which this one's sources are a part of the name, may agree.
        missing = packed.refused_by != choice.name
        why = f"{packed.refused}{f' (with other kernels){ADVICE}' * missing}"
    elif missing:
        why = f"its weights are not packed{ADVICE}"
    else:
        why = "the compiled step is for others"
    note = f"{info.architecture}: compiled attention under transformers' modules; {why}"
    notes = "; ".join(filter(None, (note, choice.note)))
    return replace(choice, name=f"attention-{choice.name}", note=notes, missing=missing)


def _plain(why: str, *, missing: bool = False) -> KernelChoice:
    return KernelChoice(TORCH.name, TORCH.order, note=f"plain torch: {why}", missing=missing)
