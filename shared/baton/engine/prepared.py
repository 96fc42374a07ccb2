"""Prepared models in the cache: which one a name stands for, and whether its folder is whole.

Decides when a folder may be used, for every process, without torch. How one comes about is
``baton.engine.prepare``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from baton.engine.info import INFO_FILE, ModelNotPrepared, read_info
from baton.engine.sources import stamp
from baton.ports.engine import ModelInfo

#: What a folder was made from; its presence and content decide whether it may be used.
SOURCE_FILE = "source.json"


class Provenance(msgspec.Struct, frozen=True):
    """Content of ``source.json``."""

    format: int
    source: str
    """Fingerprint of the source's files."""
    files: dict[str, int]
    """Size of each file of the folder."""


def check_prepared(folder: Path) -> ModelInfo:
    """Return the model's info if every file is there in full.

    Raises:
        ModelNotPrepared: names the folder or the file that is missing or truncated.
    """
    info = read_info(folder)
    path = folder / SOURCE_FILE
    try:
        provenance = msgspec.json.decode(path.read_bytes(), type=Provenance)
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise ModelNotPrepared(f"{path} is missing or broken ({error})") from None
    for name, size in provenance.files.items():
        file = folder / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            raise ModelNotPrepared(f"{file} has {found} bytes, {size} were written")
    return info


def find_prepared(source: str, cache_dir: Path) -> Path | None:
    """Return the folder of a model that is ready, without reading its weights.

    A prepared folder may be named itself. A folder in Hugging Face's format stands for what was
    made of it, as long as none of its files has changed.
    """
    path = Path(source).expanduser()
    if (path / INFO_FILE).is_file():
        return path.absolute()
    if path.is_dir():
        return _made_of(path, cache_dir)
    slug = source.rsplit("/", 1)[-1].lower()
    newest_first = sorted((cache_dir / "models").glob(f"{slug}-*"), key=_age)
    return next((folder for folder in newest_first if _is_whole(folder)), None)


def remember(source: Path, cache_dir: Path, prepared: Path) -> None:
    """Keep what was made of a folder in Hugging Face's format; under the lock of its name."""
    record = _origin_file(source, cache_dir)
    record.parent.mkdir(mode=0o700, exist_ok=True)
    fresh = record.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(_Origin(stamp(source), prepared.name)))
    fresh.replace(record)


class _Origin(msgspec.Struct, frozen=True):
    stamp: str
    prepared: str
    """The folder's name in the cache."""


def _made_of(source: Path, cache_dir: Path) -> Path | None:
    try:
        record = _origin_file(source, cache_dir).read_bytes()
        origin = msgspec.json.decode(record, type=_Origin)
        if origin.stamp != stamp(source):
            return None
    except (OSError, msgspec.MsgspecError):
        return None
    folder = cache_dir / "models" / origin.prepared
    return folder if _is_whole(folder) else None


def _origin_file(source: Path, cache_dir: Path) -> Path:
    name = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()
    return cache_dir / "models" / ".origins" / f"{name[:32]}.json"


def _age(folder: Path) -> float:
    return -folder.stat().st_mtime


def _is_whole(folder: Path) -> bool:
    try:
        check_prepared(folder)
    except (OSError, ModelNotPrepared):
        return False
    return True
