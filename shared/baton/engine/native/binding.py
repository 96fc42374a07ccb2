"""Which compiled kernel library serves this machine, and where it comes from.

Decides the instruction-set levels, the compiler's arguments and the file's name. A library is named
by its level and a digest of sources and arguments, so one that fits is found without asking the
compiler, and sources that changed never meet an old library. It is compiled by ``baton model
prepare`` (a wheel may bring its own in ``prebuilt``), never when a worker starts. Knows no torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCES = (
    *("base.h", "reg_avx512.h", "reg_avx2.h", "reg_portable.h", "vec.h", "buffer.h", "board.h"),
    *("pool.h", "amx.h", "tile.h", "quant.h", "quant_amx.h", "gemm_amx.h", "gemm.h", "passes.h"),
    *("passes_amx.h", "attention.h", "llama.h", "kernels.cpp"),
)
#: ``-ffp-contract=off``: what is fused is written as such, so results do not depend on a compiler.
ARGUMENTS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-maybe-uninitialized"),
    "-Wno-ignored-attributes",
)
_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
#: Flags of what the operating system's kernel must be asked for, and how (x86-64 Linux):
#: ``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)``.
_ASKED_FOR = frozenset({"amx_tile"})
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


class BuildFailed(RuntimeError):
    """The kernels could not be compiled; the text has the compiler's last words."""


@dataclass(frozen=True, slots=True)
class Level:
    """One instruction-set level."""

    name: str
    flags: frozenset[str]
    """What ``/proc/cpuinfo`` must list."""
    arguments: tuple[str, ...]


#: Best first; the last one runs anywhere.
_X86 = (
    Level(
        "amxbf16",
        _V4 | {"avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16"},
        (
            *("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"),
            "-mprefer-vector-width=512",
        ),
    ),
    Level(
        "avx512bf16",
        _V4 | {"avx512_bf16"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
    ),
    Level("avx512", _V4, ("-march=x86-64-v4", "-mprefer-vector-width=512")),
    Level("avx2", _V3, ("-march=x86-64-v3",)),
)
PORTABLE = Level("portable", frozenset(), ())


def levels() -> tuple[Level, ...]:
    """Return the levels of this machine's architecture, best first."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    return (*_X86, PORTABLE) if x86 else (PORTABLE,)


def level_named(name: str) -> Level:
    """Return a level of this architecture.

    Raises:
        ValueError: there is none of that name.
    """
    for level in levels():
        if level.name == name:
            return level
    raise ValueError(f"kernel level {name!r}: there are {', '.join(at.name for at in levels())}")


def levels_of(flags: frozenset[str]) -> tuple[Level, ...]:
    """Return the levels that a CPU with ``flags`` can run, best first."""
    return tuple(level for level in levels() if level.flags <= flags)


@cache
def kernel_grants(level: Level) -> bool:
    """Ask the operating system's kernel for the registers that ``level`` needs beyond the usual.

    Those of AMX are given to each process that asks (Linux since 5.16), if at all.
    """
    if not level.flags & _ASKED_FOR:
        return True
    try:
        refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)
    except (OSError, AttributeError):
        return False
    return refused == 0


@cache
def digest_of(level: Level) -> str:
    """Return 12 hex digits of the sources and arguments of ``level``."""
    whole = hashlib.sha256(" ".join((*ARGUMENTS, *level.arguments)).encode())
    for name in _SOURCES:
        whole.update((_HERE / name).read_bytes())
    return whole.hexdigest()[:12]


def name_of(level: Level) -> str:
    """Return the name of the level's kernels, part of the compatibility digest."""
    return f"{level.name}-{digest_of(level)}"


def find_library(cache_dir: Path, level: Level) -> Path | None:
    """Return the compiled library of ``level``, or ``None`` where it was not built."""
    name = f"{name_of(level)}.so"
    for folder in (_HERE / "prebuilt", cache_dir / "kernels"):
        if (folder / name).is_file():
            return folder / name
    return None


def refusal(cache_dir: Path, level: Level) -> str:
    """Return why ``level`` is left out here though the CPU has it; empty: it is not."""
    if not kernel_grants(level):
        return "the operating system's kernel does not give its registers"
    why, _ = _kept_refusal(cache_dir, level)
    return f"{why} (`baton model prepare --again` tries again)" if why else ""


def keep_refusal(cache_dir: Path, level: Level, why: str) -> None:
    """Remember that ``level`` cannot be compiled here, ``why``, and which compiler could not."""
    file = _refusal_file(cache_dir, level)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.write_text(f"{why}\n{_compiler_mark()}")


def forget_refusal(cache_dir: Path, level: Level) -> None:
    """It could be compiled after all."""
    _refusal_file(cache_dir, level).unlink(missing_ok=True)


def was_another(cache_dir: Path, level: Level) -> bool:
    """Whether ``level`` was refused by another compiler than the one that is here now.

    Only who compiles asks that: a worker serves what is there, whatever compilers it would find.
    """
    why, mark = _kept_refusal(cache_dir, level)
    return bool(why) and _compiler_mark() not in ("", mark)


def _kept_refusal(cache_dir: Path, level: Level) -> tuple[str, str]:
    """Return why ``level`` could not be compiled, and the mark of the compiler; empty: it was not
    tried, or it could."""
    try:
        why, _, mark = _refusal_file(cache_dir, level).read_text().partition("\n")
    except FileNotFoundError:
        return "", ""
    return why, mark


def _compiler_mark() -> str:
    """Return what changes with the compiler, without starting it; empty: there is none."""
    found = find_compiler()
    if found is None:
        return ""
    file = Path(found).resolve()
    facts = file.stat()
    return f"{file} {facts.st_size} {facts.st_mtime_ns}"


def _refusal_file(cache_dir: Path, level: Level) -> Path:
    return cache_dir / "kernels" / f"{name_of(level)}.refused"


def find_compiler() -> str | None:
    """Return the C++ compiler: ``$CXX``, or the first usual name that is there."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def build_library(cache_dir: Path, level: Level, extra: Sequence[str] = ()) -> Path:
    """Compile ``level`` into the cache and return the file; the one found if it is there.

    Args:
        cache_dir: the library goes into its ``kernels`` folder.
        level: what to compile for; it need not run here.
        extra: more arguments (tests: sanitizers); such a library is compiled every time.

    Raises:
        BuildFailed: there is no compiler, or it failed.
    """
    found = None if extra else find_library(cache_dir, level)
    if found is not None:
        return found
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler was found (Debian, Ubuntu: apt-get install g++)")
    folder = cache_dir / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / f"{name_of(level)}.so"
    part = folder / f".{target.name}.{os.getpid()}"
    command = [compiler, *ARGUMENTS, *level.arguments, *extra]
    try:
        done = subprocess.run(
            [*command, str(_HERE / "kernels.cpp"), "-o", str(part)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildFailed(f"{compiler} failed: {done.stderr.strip()[-600:]}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target
