"""``python -m baton.router``: the router process."""

from __future__ import annotations

from baton.core.ids import Role
from baton.runtime.process import main
from baton.runtime.service import ServiceCode


def _code() -> ServiceCode:
    # Imported here: threads are set before anything heavy is loaded.
    from baton.router import service

    return service


if __name__ == "__main__":
    main({Role.ROUTER: _code})
