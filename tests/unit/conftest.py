"""What several files of unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.runtime_rig import Rig, started_rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Real processes of the runtime, with one ledger a test."""
    with started_rig() as made:
        yield made
