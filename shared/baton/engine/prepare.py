"""Makes a model usable: fetch, convert once, prove, publish.

Decides the layout of a prepared model's folder and when one may be used again. A folder appears
under its final name complete or not at all: it is built beside it and renamed, under a lock, so
that two preparations of one model never meet and a killed one leaves nothing that looks ready.
``source.json`` says from what it was made and how large each file is, so that a truncated or
foreign file is found and named before a worker maps it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from baton.engine.info import INFO_FILE, ModelNotPrepared, ModelRefused
from baton.engine.prepared import SOURCE_FILE, Provenance, check_prepared, remember
from baton.engine.sources import ModelSource, ModelUnavailable, find_source
from baton.ports.engine import ModelInfo

#: Raise when the conversion changes: folders of another version are made again.
_FORMAT = 2

Progress = Callable[[str, float], None]


def prepare(
    source: str, cache_dir: Path, progress: Progress, *, gguf_path: Path | None = None
) -> Path:
    """Return the folder of the prepared model, making it if it is not there.

    Args:
        source: ``smollm2-135m-instruct``, a folder in Hugging Face's format, or a hub name.
        cache_dir: prepared models live in its ``models`` folder.
        progress: told what goes on and how much of it is done, 0 to 1.
        gguf_path: where the default model's GGUF file is, if not in an installed package.

    Raises:
        ModelUnavailable: the source does not exist or cannot be fetched.
        ModelRefused: the model does not pass the proof.
    """
    models = cache_dir / "models"
    models.mkdir(parents=True, exist_ok=True, mode=0o700)
    progress(f"looking for {source}", 0.0)
    found = find_source(source, cache_dir, gguf_path)
    from baton.engine.load import held_lock

    with held_lock(models / f"{found.name}.lock"):
        ready = _prepared(models, found, progress)
        if ready is None:
            ready = _make(models, found, progress)
        folder = Path(source).expanduser()
        if folder.is_dir():
            remember(folder, cache_dir, ready)
    progress(f"{found.name} is ready", 1.0)
    return ready


def _prepared(models: Path, source: ModelSource, progress: Progress) -> Path | None:
    """Return the folder made from this very source, if it is whole; remove it if it is not."""
    for folder in sorted(models.glob(f"{source.name}-*")):
        path = folder / SOURCE_FILE
        try:
            provenance = msgspec.json.decode(path.read_bytes(), type=Provenance)
        except (OSError, msgspec.MsgspecError):
            continue  # not ours, or broken beyond knowing what it was: a new one replaces it
        if provenance.source != source.fingerprint or provenance.format != _FORMAT:
            continue
        try:
            check_prepared(folder)
        except ModelNotPrepared as error:
            progress(f"{error}: preparing it again", 0.0)
            shutil.rmtree(folder)
            continue
        return folder
    return None


def _make(models: Path, source: ModelSource, progress: Progress) -> Path:
    """Convert, prove, publish."""
    for stale in models.glob(f".preparing-{source.name}-*"):
        shutil.rmtree(stale)  # its maker is dead: the lock is ours
    work = models / f".preparing-{source.name}-{os.getpid()}"
    work.mkdir(mode=0o700)
    try:
        progress(f"converting {source.name}", 0.1)
        from baton.engine.convert import convert

        model = convert(source, work)
        info = _describe(source, model, work)
        progress(f"proving {source.name}", 0.6)
        from baton.engine.proof import prove

        proof = prove(work, info, lambda share: progress(f"proving {source.name}", 0.6 + share / 3))
        proved = msgspec.structs.replace(info, proof=proof)
        (work / INFO_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(proved)))
        return _publish(work, models / f"{source.name}-{info.digest[:12]}", source)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _describe(source: ModelSource, model: Any, work: Path) -> ModelInfo:
    """Return what the rest of Baton needs to know, from the converted files."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = config.eos_token_id
    return ModelInfo(
        name=source.name,
        digest=_model_digest(work),
        tokenizer_digest=_digest(work / "tokenizer.json"),
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        context_max=config.max_position_embeddings,
        eos_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,),
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        parameters=sum(value.numel() for value in model.parameters()),
        created=int(time.time()),
    )


def _model_digest(work: Path) -> str:
    """Digest weights and configuration, without what differs between two equal conversions."""
    config = msgspec.json.decode((work / "config.json").read_bytes())
    for note in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(note, None)
    whole = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
    whole.update(bytes.fromhex(_digest(work / "model.safetensors")))
    return whole.hexdigest()


def _digest(*files: Path) -> str:
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


def _publish(work: Path, target: Path, source: ModelSource) -> Path:
    """Seal the folder and give it its name."""
    files = {file.name: file.stat().st_size for file in work.iterdir() if file.is_file()}
    provenance = Provenance(_FORMAT, source.fingerprint, files)
    (work / SOURCE_FILE).write_bytes(msgspec.json.encode(provenance))
    for file in work.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    if target.exists():  # broken, or made by another version: nobody else holds the lock
        shutil.rmtree(target)
    work.rename(target)
    return target


def main(arguments: list[str]) -> int:
    """Prepare as a process of its own: ``python -m baton.engine.prepare SOURCE CACHE_DIR``."""
    source, cache = arguments
    from transformers.utils import logging

    quiet: Callable[[], None] = logging.disable_progress_bar
    quiet()
    last = [""]

    def progress(what: str, share: float) -> None:
        if what != last[0]:
            sys.stdout.write(f"{share:4.0%}  {what}\n")
            sys.stdout.flush()
            last[0] = what

    try:
        prepare(source, Path(cache), progress)
    except (ModelUnavailable, ModelRefused, ModelNotPrepared) as error:
        sys.stderr.write(f"{error}\n")
        return os.EX_CONFIG
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
