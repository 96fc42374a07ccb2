"""Makes what the compiled kernels need: the library for this CPU, and a model's packed weights.

Decides when: ``baton model prepare`` runs it as a process of its own, because it loads torch; no
worker ever does. What was made before is found again by its name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton.engine.info import read_info
from baton.engine.kernels import levels_for
from baton.engine.native import binding
from baton.engine.native.binding import BuildFailed, Level
from baton.engine.packed import AUTO, STEP_ARCHITECTURES


def prepare_kernels(
    model_dir: Path,
    dtype: str,
    cache_dir: Path,
    setting: str,
    say: Callable[[str], None],
    *,
    weights: str = "full",
) -> None:
    """Compile and pack whatever is missing.

    Args:
        model_dir: a prepared model's folder.
        dtype: ``float32`` or ``bfloat16``.
        cache_dir: where compiled libraries are kept.
        setting: of ``engine.kernels``; the best of its levels that the compiler knows is made.
        say: told what goes on.
        weights: of ``engine.weights``; of ``auto`` it is found here what it means for the model.

    Raises:
        BuildFailed: there is no compiler, or it failed.
    """
    info = read_info(model_dir)
    with ThreadPoolExecutor(1) as beside:
        building = beside.submit(_build_best, cache_dir, levels_for(setting), say)
        if info.architecture not in STEP_ARCHITECTURES:
            building.result()
            return
        # Loading torch takes as long as the compiler.
        from baton.engine.pack import pack, pack_fewest

        library = building.result()
    kind = dtype if weights in ("full", AUTO) else f"{weights}, {dtype}"
    say(f"packing the weights of {info.name} in {kind}")
    if weights == AUTO:
        packed = pack_fewest(model_dir, info, dtype, library, say)
    else:
        packed = pack(model_dir, info, dtype, library, weights)
    if packed.refused:
        say(f"the compiled step is not for {info.name}: {packed.refused}")


def _build_best(cache_dir: Path, levels: tuple[Level, ...], say: Callable[[str], None]) -> Path:
    """Return the library of the first of ``levels`` that can be had here.

    A compiler may be older than the CPU: what it could not build is left out from then on.
    """
    failed: dict[Level, str] = {}
    for level in levels:
        if not binding.kernel_grants(level):
            continue
        say(f"compiling kernels for {level.name}")
        try:
            library = binding.build_library(cache_dir, level)
        except BuildFailed as error:
            failed[level] = str(error)
            continue
        binding.forget_refusal(cache_dir, level)
        for other, why in failed.items():
            say(f"no kernels for {other.name}: {why}")
            binding.keep_refusal(cache_dir, other, why.splitlines()[0])
        return library
    why = f"no {levels[0].name}: the operating system's kernel does not give its registers"
    raise BuildFailed(next(iter(failed.values()), why))


def main(arguments: list[str]) -> int:
    """``python -m baton.engine.prepare_kernels MODEL_DIR DTYPE CACHE_DIR SETTING WEIGHTS``."""
    folder, dtype, cache, setting, weights = arguments

    def say(what: str) -> None:
        sys.stdout.write(f"{what}\n")
        sys.stdout.flush()

    try:
        prepare_kernels(Path(folder), dtype, Path(cache), setting, say, weights=weights)
    except BuildFailed as error:
        sys.stderr.write(f"{error}\n")
        return os.EX_UNAVAILABLE
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
