"""``python -m baton.decode``: the decode process."""

from __future__ import annotations

from baton.core.ids import Role
from baton.runtime.process import main
from baton.runtime.service import Context, Service


def _build(context: Context) -> Service:
    # Imported here: cores and threads are set before anything heavy is loaded.
    from baton.decode.service import build

    return build(context)


if __name__ == "__main__":
    main(Role.DECODE, _build)
