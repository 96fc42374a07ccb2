"""The runs of a long measurement, each kept in a file of its own as soon as it is whole.

Decides what may be put together: runs of one and the same plan. So a measurement can be interrupted
and gone on with, in parts; what was being measured then is measured anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson

from baton.bench.load.results import ResultError
from baton.bench.load.running import Done

_PLAN = "plan.json"
_UNUSUAL = re.compile(r"[^a-z0-9.]+")


class Slices:
    """All that were measured so far, by their names."""

    def __init__(self, folder: Path | None, plan: Mapping[str, Any], salt: int) -> None:
        """``folder``: where they stay; ``None``: they are wanted once.

        Raises:
            ResultError: the folder has slices of another plan.
        """
        self._folder = folder
        self._found: dict[str, Done] = {}
        self.salt = salt
        """Of the contents: that of the first part, so that every way is asked the same."""
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        mine: dict[str, Any] = orjson.loads(orjson.dumps(plan))
        path = folder / _PLAN
        if path.exists():
            kept = orjson.loads(path.read_bytes())
            self.salt = kept.pop("salt")
            if kept != mine:
                differs = sorted(k for k in kept | mine if kept.get(k) != mine.get(k))
                raise ResultError(
                    f"{folder} has slices of another plan ({', '.join(differs)} differ): "
                    "remove it, or name another folder"
                )
        else:
            path.write_bytes(orjson.dumps(mine | {"salt": salt}))
        for each in sorted(folder.glob("*.slice.json")):
            self._found[each.name.removesuffix(".slice.json")] = _read(each)

    def get(self, name: str) -> Done | None:
        """Return the run of that name if it was measured."""
        return self._found.get(_file(name))

    def put(self, name: str, done: Done) -> None:
        """Keep a whole run."""
        self._found[_file(name)] = done
        if self._folder is not None:
            path = self._folder / f"{_file(name)}.slice.json"
            fresh = path.with_name(path.name + ".new")
            fresh.write_bytes(msgspec.json.encode(done))
            fresh.replace(path)

    def all(self) -> list[Done]:
        """Return every run, the oldest first."""
        return sorted(self._found.values(), key=lambda done: done.conditions.time)


def _file(name: str) -> str:
    return _UNUSUAL.sub("-", name.lower()).strip("-")


def _read(path: Path) -> Done:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Done)
    except msgspec.MsgspecError as error:
        raise ResultError(f"{path} is no slice of this version: {error}") from error
