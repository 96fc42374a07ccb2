"""Builds tests/native/selftest.cpp and runs it: every kernel against plain arithmetic in double.

    python scripts/check_kernels.py                          every level that this CPU runs
    python scripts/check_kernels.py --sanitize --cases 400   the same under ASan and UBSan
    python scripts/check_kernels.py --races --cases 40      the same under TSan
    python scripts/check_kernels.py --arm64 --cases 5        cross-compiled, under qemu's user mode

arm64 needs a cross compiler and an emulator (Debian, Ubuntu: apt-get install g++-aarch64-linux-gnu
qemu-user). Exit status: 0 all agree, 1 one does not, 69 a tool is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "shared"))

from baton.engine.info import cpu_flags  # noqa: E402
from baton.engine.native import binding  # noqa: E402

SOURCE = ROOT / "tests" / "native" / "selftest.cpp"
HEADERS = Path(binding.__file__).parent
SANITIZERS = (
    *("-O1", "-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
RACES = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=thread")
ARM64_COMPILER, ARM64_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


class ToolMissing(RuntimeError):
    """A compiler or the emulator is not there."""


def main() -> int:
    """Build and run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--level", action="append", help="only this level; may be repeated")
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan")
    parser.add_argument("--races", action="store_true", help="with TSan")
    parser.add_argument("--arm64", action="store_true", help="the portable level on arm64")
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--cases", type=int, default=100)
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="baton-kernels-") as folder:
            for name, program in _programs(options, Path(folder)):
                print(f"{name}: ", end="", flush=True)
                words = [*program, str(options.seed), str(options.cases)]
                done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
                if done.returncode != 0:
                    print(f"failed\n{done.stderr[-4000:]}")
                    return 1
    except ToolMissing as error:
        print(error, file=sys.stderr)
        return os.EX_UNAVAILABLE
    return 0


_Raw = argparse.RawDescriptionHelpFormatter


def _programs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what to run, one built after the other."""
    if options.arm64:
        emulator = [] if platform.machine() == "aarch64" else [_tool(ARM64_EMULATOR)]
        compiler = _tool(ARM64_COMPILER if emulator else "c++")
        yield "arm64", [*emulator, _built(compiler, folder / "arm64", ["-static"])]
        return
    compiler = binding.find_compiler()
    if compiler is None:
        raise ToolMissing("no C++ compiler was found")
    extra = SANITIZERS if options.sanitize else RACES if options.races else ()
    for level in binding.levels_of(cpu_flags()):
        if binding.kernel_grants(level) and level.name in (options.level or [level.name]):
            yield level.name, [_built(compiler, folder / level.name, [*level.arguments, *extra])]


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ToolMissing(f"{name} was not found")
    return found


def _built(compiler: str, target: Path, extra: list[str]) -> str:
    arguments = [word for word in binding.ARGUMENTS if word != "-shared"]
    # What the compiler says of its own headers' undefined vectors is no finding.
    command = [compiler, *arguments, "-w", *extra]
    command += ["-I", str(HEADERS), str(SOURCE), "-o", str(target)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(1)
    return str(target)


if __name__ == "__main__":
    sys.exit(main())
