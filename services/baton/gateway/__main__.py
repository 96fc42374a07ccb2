"""``python -m baton.gateway``: the gateway process."""

from __future__ import annotations

from baton.core.ids import Role
from baton.runtime.process import main
from baton.runtime.service import Context, Service


def _build(context: Context) -> Service:
    # Imported here: cores and threads are set before anything heavy is loaded.
    from baton.gateway.service import build

    return build(context)


if __name__ == "__main__":
    main(Role.GATEWAY, _build)
