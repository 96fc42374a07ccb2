"""What is known of the engine without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.fake_model import fake_info, write_fake_model
from baton.engine.info import (
    ModelNotPrepared,
    compat_of,
    cpu_flags,
    layout_of,
    read_info,
    resolve_dtype,
)
from support.engine_steps import child_env


def test_auto_is_bfloat16_only_where_the_cpu_computes_it() -> None:
    """The first core's flags decide; a name of its own is taken as it is."""
    assert resolve_dtype("auto", frozenset({"avx2", "avx512f"})) == "float32"
    assert resolve_dtype("auto", frozenset({"avx512_bf16"})) == "bfloat16"
    assert resolve_dtype("auto", frozenset({"bf16"})) == "bfloat16"
    assert resolve_dtype("bfloat16", frozenset()) == "bfloat16"
    assert resolve_dtype("auto", frozenset(), device="cuda") == "bfloat16"
    assert resolve_dtype("float32", frozenset(), device="cuda") == "float32"
    with pytest.raises(ValueError, match=r"'float16'.*auto, float32, bfloat16"):
        resolve_dtype("float16")


def test_cpu_flags_are_read_from_x86_and_arm(tmp_path: Path) -> None:
    """The kernel calls them flags there and Features here."""
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx2\n")
    assert cpu_flags(path) == {"fpu", "avx2"}
    path.write_text("Features\t: fp bf16\n")
    assert cpu_flags(path) == {"fp", "bf16"}
    path.write_text("")
    assert cpu_flags(path) == frozenset()


def test_a_folder_that_is_not_prepared_is_named(tmp_path: Path) -> None:
    """Absent, empty and broken folders each get their own sentence and the remedy."""
    with pytest.raises(ModelNotPrepared, match=r"does not exist: run `baton model prepare`"):
        read_info(tmp_path / "absent")
    with pytest.raises(ModelNotPrepared, match=r"has no baton\.json"):
        read_info(tmp_path)
    write_fake_model(tmp_path)
    (tmp_path / "baton.json").write_text('{"name": "x"')
    with pytest.raises(ModelNotPrepared, match="broken"):
        read_info(tmp_path)


def test_compatibility_tells_models_and_kinds_apart() -> None:
    """Another digest, dtype, block size or kernel set makes a difference by name."""
    info = fake_info()
    mine = compat_of(info, layout_of(info, "float32", 16), "fake")
    assert mine == compat_of(info, layout_of(info, "float32", 16), "fake")
    other = compat_of(fake_info(layers=3), layout_of(info, "bfloat16", 32), "torch")
    fields = [line.split(":")[0] for line in mine.differences(other)]
    assert fields == ["model", "dtype", "block_size", "layout", "kernels"]


def test_the_light_modules_load_no_torch() -> None:
    """Gateway, router and command line import these; they must start in a fraction of a second."""
    program = (
        "import sys, baton.engine.info, baton.engine.fake_model, baton.engine.build, "
        "baton.engine.sources, baton.engine.sampler, baton.engine.stop_points\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, env=child_env()).returncode
        == 0
    )
