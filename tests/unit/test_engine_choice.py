"""Which kernels are used, what is made for them, and what is said where they are not."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine import pack as packing
from baton.engine.build import build_engine
from baton.engine.info import ModelNotPrepared
from baton.engine.kernels import (
    TORCH,
    KernelsMissing,
    device_kernels,
    to_try_again,
)
from baton.engine.native import binding
from baton.engine.pack import pack
from baton.engine.packed import PackedSpec, find_packed, packed_path, read_spec, write_packed
from baton.engine.prepare_kernels import prepare_kernels
from support.engine_compiled import LEVELS, library_of, step_engine
from support.engine_folders import BEST, chosen, folder_of, link_library
from support.engine_models import VOCAB
from support.engine_steps import Arena, Sequel, assert_nan_costs_no_other_row, child_env, ids_of


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A cache in which the best level's library lies already."""
    return link_library(tmp_path)


def test_from_plain_torch_to_the_compiled_step(tmp_path: Path, compiled: Path) -> None:
    """Without a library plain torch, with one the attention, with packed weights the whole step."""
    info = folder_of(tmp_path)
    bare = tmp_path / "bare"
    plain = chosen(tmp_path, info, cache_dir=bare)
    assert (plain.name, plain.order, plain.native) == (TORCH.name, "tokens", None)
    assert plain.missing
    assert "not compiled: run `baton model prepare`" in plain.note
    attention = chosen(tmp_path, info)
    assert attention.name == f"attention-{binding.name_of(BEST)}"
    assert attention.missing
    assert "its weights are not packed" in attention.note
    said: list[str] = []
    prepare_kernels(tmp_path, "float32", compiled, "auto", said.append)
    assert said[-1] == "packing the weights of tiny in float32"
    step = chosen(tmp_path, info)
    assert (step.name, step.order) == (f"step-{binding.name_of(BEST)}", "lanes")
    assert (step.note, step.missing) == ("", False)
    assert chosen(tmp_path, info, dtype="bfloat16").missing


def test_three_kinds_of_kernels_answer_alike(tmp_path: Path, compiled: Path) -> None:
    """The engines that the choices stand for give the same greedy tokens in float32."""
    info = folder_of(tmp_path)
    choices = [chosen(tmp_path, info, "torch"), chosen(tmp_path, info)]
    prepare_kernels(tmp_path, "float32", compiled, "auto", lambda _: None)
    choices.append(chosen(tmp_path, info))
    outputs = []
    for choice in choices:
        engine = build_engine(tmp_path, dtype="float32", threads=1, kernels=choice)
        assert engine.kernels == choice.name
        assert engine.layout.order == choice.order
        engine.warm_up()
        Arena(engine, 24)
        sequel = Sequel(engine, ids_of(range(3, 203)), ids_of(range(20)))
        sequel.prefill([90])
        sequel.decode(40)
        outputs.append(sequel.output)
    assert outputs[0] == outputs[1] == outputs[2]


def test_what_kernels_cannot_do_is_left_to_torch_and_said(tmp_path: Path, compiled: Path) -> None:
    """Small blocks, narrow heads and other CPUs; whoever insists gets an error instead."""
    info = folder_of(tmp_path)
    for given, words in (
        ({"block_size": 8}, "a block of 8"),
        ({"info": msgspec.structs.replace(info, head_dim=24)}, "a head of 24"),
    ):
        choice = chosen(tmp_path, **{"info": info, **given})
        assert choice.name == TORCH.name
        assert words in choice.note
        assert not choice.missing
        with pytest.raises(KernelsMissing, match=words):
            chosen(tmp_path, **{"info": info, **given}, setting="compiled")
    with pytest.raises(ValueError, match=r"kernel level 'quantum': there are .*portable"):
        chosen(tmp_path, info, "quantum")


def test_the_level_follows_the_cpu() -> None:
    """Every level asks for all that the ones below it ask for; the last one asks for nothing."""
    assert binding.levels_of(frozenset()) == (binding.PORTABLE,)
    for level in binding.levels():
        assert binding.levels_of(level.flags)[0] == level


@pytest.mark.skipif(len(LEVELS) < 2, reason="this CPU has one level only")
def test_a_level_that_the_kernel_refuses_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one serves; whoever insists on the refused one gets an error."""
    info = folder_of(tmp_path)
    below = LEVELS[1]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / f"{binding.name_of(below)}.so").symlink_to(library_of(below).path)
    granted = binding.kernel_grants
    monkeypatch.setattr(binding, "kernel_grants", lambda level: level != BEST and granted(level))
    said: list[str] = []
    prepare_kernels(tmp_path, "float32", tmp_path, "auto", said.append)
    assert said[0] == f"compiling kernels for {below.name}"
    choice = chosen(tmp_path, info)
    assert choice.name == f"step-{binding.name_of(below)}"
    assert choice.note.startswith(f"no {BEST.name}: the operating system's kernel")
    assert not choice.missing
    with pytest.raises(KernelsMissing, match=f"no {BEST.name}: the operating system's kernel"):
        chosen(tmp_path, info, BEST.name)
    with pytest.raises(binding.BuildFailed, match=f"no {BEST.name}"):
        prepare_kernels(tmp_path, "float32", tmp_path, BEST.name, said.append)


@pytest.mark.skipif(len(LEVELS) < 2, reason="this CPU has one level only")
def test_a_level_that_the_compiler_does_not_know_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler older than the CPU: the next level is made, and the reason stays."""
    info = folder_of(tmp_path)
    below = LEVELS[1]

    def build(cache_dir: Path, level: binding.Level) -> Path:
        if level == BEST:
            raise binding.BuildFailed("c++ failed: unknown option")
        (cache_dir / "kernels").mkdir()
        file = cache_dir / "kernels" / f"{binding.name_of(level)}.so"
        file.symlink_to(library_of(level).path)
        return file

    monkeypatch.setattr(binding, "build_library", build)
    said: list[str] = []
    prepare_kernels(tmp_path, "float32", tmp_path, "auto", said.append)
    assert f"no kernels for {BEST.name}: c++ failed: unknown option" in said
    choice = chosen(tmp_path, info)
    assert choice.name == f"step-{binding.name_of(below)}"
    assert choice.note.startswith(f"no {BEST.name}: c++ failed: unknown option (`baton model prep")
    assert not choice.missing
    with pytest.raises(binding.BuildFailed, match="unknown option"):
        prepare_kernels(tmp_path, "float32", tmp_path, BEST.name, said.append)


@pytest.mark.skipif(len(LEVELS) < 2, reason="this CPU has one level only")
def test_a_refused_level_is_tried_again_when_the_compiler_is_another_or_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nobody compiles in vain; what serves changes only when there is something better,
    and then without the refusal."""
    info = folder_of(tmp_path)
    compiler = tmp_path / "compiler"
    monkeypatch.setenv("CXX", str(compiler))

    def becomes(refuses: str) -> None:
        """Which compiler is installed: its output is what the real one made of that level."""
        best, below = (library_of(level).path for level in LEVELS[:2])
        compiler.write_text(
            '#!/bin/sh\nfor out; do :; done\ncase "$*" in\n'
            f'*"{" ".join(BEST.arguments)}"*) {refuses} cp "{best}" "$out";;\n'
            f'*) cp "{below}" "$out";;\nesac\n'
        )
        compiler.chmod(0o755)

    def again(*, asked: bool = False) -> list[str]:
        return to_try_again("auto", tmp_path, asked=asked)

    said: list[str] = []
    becomes("echo unknown option >&2; exit 1;")
    assert again(asked=True) == []
    prepare_kernels(tmp_path, "float32", tmp_path, "auto", said.append)
    refused = chosen(tmp_path, info)
    assert refused.name == f"step-{binding.name_of(LEVELS[1])}" and "unknown option" in refused.note
    assert again() == [] and again(asked=True) == [f"{BEST.name} (as asked)"]
    becomes("")
    assert again() == [f"{BEST.name} (another compiler is here now)"]
    assert chosen(tmp_path, info) == refused
    prepare_kernels(tmp_path, "float32", tmp_path, "auto", said.append)
    assert chosen(tmp_path, info).name == f"step-{binding.name_of(BEST)}"
    assert chosen(tmp_path, info).note == "" and again(asked=True) == []


def test_a_step_that_other_kernels_refused_is_looked_at_again(
    tmp_path: Path, compiled: Path
) -> None:
    """A defect of kernels that have been repaired does not keep the step out for ever."""
    info = folder_of(tmp_path)
    path = packed_path(tmp_path, "float32")
    words = "the compiled step differs from the modules by 9"
    for by in ("avx2-000000000000", ""):
        refused = PackedSpec("", "", 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, ())
        refused = msgspec.structs.replace(refused, model=info.digest, refused=words, refused_by=by)
        write_packed(path, refused, {})
        choice = chosen(tmp_path, info)
        assert choice.missing and "by 9 (with other kernels): run `baton model" in choice.note
        prepare_kernels(tmp_path, "float32", compiled, "auto", lambda _: None)
        assert chosen(tmp_path, info).name == f"step-{binding.name_of(BEST)}"


def test_a_model_that_the_step_does_not_know_keeps_the_reason(
    tmp_path: Path, compiled: Path
) -> None:
    """Preparing it again with these kernels does not load it again; the attention is compiled."""
    info = folder_of(tmp_path, hidden_act="gelu")
    spec = pack(tmp_path, info, "float32", library_of(BEST).path)
    assert spec.refused == "the compiled step does not know activation gelu"
    choice = chosen(tmp_path, info)
    assert choice.name.startswith("attention-")
    assert choice.note.endswith("activation gelu")
    assert not choice.missing
    other = folder_of(tmp_path, "gemma3")
    assert chosen(tmp_path, other).note.endswith("the compiled step is for others")


def test_a_step_that_differs_from_the_modules_is_refused(
    tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is packed is compared with the modules before it can be used."""
    info = folder_of(tmp_path)
    right = packing.packed

    def wrong(weight: torch.Tensor, step: int) -> Any:
        return right(weight * 1.01, step)

    monkeypatch.setattr(packing, "packed", wrong)
    spec = pack(tmp_path, info, "float32", library_of(BEST).path)
    assert "differs from the modules by" in spec.refused
    assert not spec.tensors


def test_weights_of_fewer_bits_are_the_step_or_nothing(tmp_path: Path, compiled: Path) -> None:
    """They have a file and a name of their own; without the compiled step the start is refused."""
    info = folder_of(tmp_path)
    for setting, words in (("auto", "not packed: run"), ("torch", "engine.kernels is torch")):
        with pytest.raises(KernelsMissing, match=f"engine.weights = 'int4' needs.*{words}"):
            chosen(tmp_path, info, setting, weights="int4")
    said: list[str] = []
    prepare_kernels(tmp_path, "float32", compiled, "auto", said.append, weights="int4")
    assert said[-1] == "packing the weights of tiny in int4, float32"
    choice = chosen(tmp_path, info, weights="int4")
    assert choice.name == f"step-{binding.name_of(BEST)}-int4"
    assert choice.packed == packed_path(tmp_path, "float32", "int4")
    assert chosen(tmp_path, info).name.startswith("attention-")
    with pytest.raises(KernelsMissing, match="not packed"):
        chosen(tmp_path, info, weights="int8")
    engine = build_engine(tmp_path, dtype="float32", threads=1, kernels=choice)
    engine.warm_up()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_weights_agree_with_modules_of_the_same(
    tmp_path: Path, family: str, dtype: str, weights: str
) -> None:
    """The modules get what the codes stand for, and the logits are theirs."""
    info = folder_of(tmp_path, family)
    spec = pack(tmp_path, info, dtype, library_of(BEST).path, weights)
    assert spec.refused == ""
    assert (spec.weights, spec.head) == (weights, "int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3", "mistral-window"])
def test_every_known_family_agrees_with_its_modules(
    tmp_path: Path, family: str, dtype: str
) -> None:
    """Biases, norms of heads, layers without positions, windows: the modules' own logits."""
    info = folder_of(tmp_path, family)
    spec = pack(tmp_path, info, dtype, library_of(BEST).path)
    assert spec.refused == ""
    assert spec.tensors


def test_a_broken_file_is_not_used(tmp_path: Path, compiled: Path) -> None:
    """Truncated, foreign, or another model's: as if it were not there; a worker names it."""
    info = folder_of(tmp_path)
    pack(tmp_path, info, "float32", library_of(BEST).path)
    assert find_packed(tmp_path, "float32", info) is not None
    assert find_packed(tmp_path, "float32", msgspec.structs.replace(info, digest="1" * 64)) is None
    path = packed_path(tmp_path, "float32")
    whole = path.read_bytes()
    for broken, words in (
        (whole[: len(whole) // 2], "bytes: remove it"),
        (b"GIF89a", "not a file of packed weights"),
        (whole[:16] + b"{" * 50, "broken"),
    ):
        path.write_bytes(broken)
        assert find_packed(tmp_path, "float32", info) is None
        with pytest.raises(ModelNotPrepared, match=words):
            read_spec(path)


def test_without_a_compiler_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler, and one that fails: both end in one clear error, and leave no file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(binding.BuildFailed, match="no C\\+\\+ compiler was found"):
        binding.build_library(tmp_path, BEST)
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho nonsense >&2\nexit 1\n")
    failing.chmod(0o700)
    with pytest.raises(binding.BuildFailed, match="nonsense"):
        binding.build_library(tmp_path, BEST)
    assert list((tmp_path / "kernels").iterdir()) == []


def test_the_compiled_step_loads_no_torch(tmp_path: Path) -> None:
    """A worker with packed weights starts in a fraction of the time that torch takes to load."""
    program = (
        "import sys, baton.engine.build, baton.engine.llama_engine, baton.engine.kernels\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, env=child_env())
    assert done.returncode == 0


# --- the compiled step beyond the contract --------------------------------------------------------


def test_a_row_with_nan_logits_is_named_and_costs_no_other_row() -> None:
    """The broken row is not retryable; the other one, stepped again, has its token."""
    prompt = np.random.default_rng(4).integers(0, VOCAB, 20).astype(np.int32)
    assert_nan_costs_no_other_row(step_engine("llama", "bfloat16"), prompt)


def test_rows_that_would_leave_their_memory_are_refused() -> None:
    """Ids, positions and block numbers out of range change no byte."""
    engine = step_engine("llama", "float32")
    arena = Arena(engine, 70, fill=0xA5)
    before = bytes(arena.memory)
    far = ids_of(range(70))
    for prompt, blocks, start, words in (
        (ids_of([0, VOCAB]), ids_of([0]), 0, "outside the vocabulary"),
        (ids_of([-1]), ids_of([0]), 0, "outside the vocabulary"),
        (ids_of([0]), ids_of([70]), 0, "outside its arena"),
        (ids_of([0]), ids_of([-1]), 0, "outside its arena"),
        (ids_of([0] * 1025), far, 1024, "beyond the model's context"),
        (ids_of([0] * 17), ids_of([0]), 0, "a block is missing"),
    ):
        row = Sequel(engine, prompt, blocks).prompt_row(start, len(prompt))
        with pytest.raises(AssertionError, match=words):
            engine.step([row])
    assert bytes(arena.memory) == before


def test_a_devices_kernels_are_named_by_all_that_their_bits_depend_on() -> None:
    """The device's kind, how steps are cut, torch's version: two that differ share no block."""
    on, off = (device_kernels("cuda", invariance=each) for each in ("on", "off"))
    version = metadata.version("torch")
    assert on.name == f"device-1-cuda-rows-128-torch-{version}"
    assert off.name == f"device-1-cuda-free-torch-{version}"
    assert device_kernels("memfd", invariance="on").name != on.name
    assert (on.device, on.place, on.order, on.rows, off.rows) == (
        "cuda",
        "device",
        "tokens",
        128,
        0,
    )
    assert TORCH.place == "host"
