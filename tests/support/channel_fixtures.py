"""A private directory in real shared memory."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def shared_directory() -> Iterator[Path]:
    """A new directory in /dev/shm, removed with everything in it."""
    directory = Path(tempfile.mkdtemp(prefix="baton-test-", dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
