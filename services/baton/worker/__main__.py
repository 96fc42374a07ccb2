"""``python -m baton.worker --role prefill|decode``: a prefill or decode process."""

from __future__ import annotations

from baton.core.ids import Role
from baton.runtime.process import main
from baton.runtime.service import ServiceCode

# Imported below: threads are set before anything heavy is loaded.


def _prefill() -> ServiceCode:
    from baton.prefill import service

    return service


def _decode() -> ServiceCode:
    from baton.decode import service

    return service


if __name__ == "__main__":
    main({Role.PREFILL: _prefill, Role.DECODE: _decode})
