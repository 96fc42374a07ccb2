"""`baton config show` and `baton version`: what is set, and what this is."""

from __future__ import annotations

import json
import platform

from baton.cli.cluster import baton_version
from baton.cli.terminal import ExitCode, say, table
from baton.runtime.config import rows
from baton.runtime.settings import Config


def config_show(config: Config, *, changed: bool, as_json: bool) -> int:
    """Show every setting, its value and where it came from; secrets are masked."""
    found = [row for row in rows(config) if not changed or row.source != "default"]
    if as_json:
        say(json.dumps([{"key": r.key, "value": r.value, "source": r.source} for r in found]))
        return ExitCode.OK
    if not found:
        say("every setting has its default; see `baton config show`")
        return ExitCode.OK
    table(
        f"settings from {config.path}" if config.path else "settings, without a file",
        ("setting", "value", "from"),
        [(row.key, row.value, row.source) for row in found],
    )
    return ExitCode.OK


def version() -> int:
    """Print Baton's version and what it runs on."""
    say(f"baton {baton_version()}, Python {platform.python_version()}, {platform.machine()}")
    return ExitCode.OK
