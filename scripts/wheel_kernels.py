"""Build hook: compiled kernels of every level inside the wheel, for machines without a compiler.

    BATON_WHEEL_KERNELS=1 python -m build --wheel

Decides that it is asked for: the wheel is then of this architecture (``linux_x86_64``; whoever
publishes one builds it in a manylinux image). Without the variable the wheel is pure Python, and
`baton model prepare` compiles. A library is found by the digest of its sources, so one of other
sources is never used.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ASKED = "BATON_WHEEL_KERNELS"
#: Beside glibc the library needs nothing of the machine that it runs on.
STATIC = ("-static-libstdc++", "-static-libgcc")
_TARGET = "baton/engine/native/prebuilt"


class WheelKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles each level into a folder of its own and adds what came out."""

    def dependencies(self) -> list[str]:
        """Return what the build environment must have beside hatchling."""
        return ["msgspec>=0.19", "numpy>=2.0"] if os.environ.get(ASKED) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries, if they were asked for."""
        if not os.environ.get(ASKED) or version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "shared"))
        from baton.engine.native import binding

        self._folder = tempfile.TemporaryDirectory(prefix="baton-wheel-")
        for level in binding.levels():
            self.app.display_info(f"compiling kernels for {level.name}")
            try:
                file = binding.build_library(Path(self._folder.name), level, STATIC)
            except binding.BuildFailed as error:
                # A level more than the compiler knows: those CPUs take the next one, or compile.
                if level is binding.levels()[-1]:
                    raise
                self.app.display_warning(f"no kernels for {level.name}: {error}")
                continue
            build_data["force_include"][str(file)] = f"{_TARGET}/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel now."""
        if folder := getattr(self, "_folder", None):
            folder.cleanup()
