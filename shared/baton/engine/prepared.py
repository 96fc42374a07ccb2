"""Prepared models in the cache: which one a name stands for, and whether its folder is whole.

Decides when a folder may be used, for every process, without torch. How one comes about is
``baton.engine.prepare``.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.engine.info import INFO_FILE, ModelNotPrepared, read_info
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

    A prepared folder may be named itself. A folder in Hugging Face's format is never found here:
    only preparing tells whether its files are still those that were proven.
    """
    path = Path(source).expanduser()
    if (path / INFO_FILE).is_file():
        return path.absolute()
    if path.is_dir():
        return None
    slug = source.rsplit("/", 1)[-1].lower()
    newest_first = sorted((cache_dir / "models").glob(f"{slug}-*"), key=_age)
    return next((folder for folder in newest_first if _is_whole(folder)), None)


def _age(folder: Path) -> float:
    return -folder.stat().st_mtime


def _is_whole(folder: Path) -> bool:
    try:
        check_prepared(folder)
    except (OSError, ModelNotPrepared):
        return False
    return True
