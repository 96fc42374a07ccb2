"""The embedded server's command line and configuration."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from baton.ledger.embedded import SocketPathTooLong, server_command, server_url, socket_path


def test_the_command_names_a_binary_and_its_configuration(tmp_path: Path) -> None:
    """The configuration is private, has no port, keeps an append-only file and never evicts."""
    run_dir = tmp_path / "run"
    binary, config = server_command(run_dir, tmp_path / "data")
    assert Path(binary).is_file()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(config).stat().st_mode) == 0o600
    lines = Path(config).read_text().splitlines()
    for line in (
        "port 0",
        "unixsocketperm 700",
        "appendonly yes",
        "appendfsync everysec",
        "maxmemory-policy noeviction",
        "daemonize no",
        'save ""',
        f'dir "{tmp_path / "data"}"',
    ):
        assert line in lines


def test_the_socket_is_in_the_run_dir() -> None:
    """Who knows the run directory knows the URL."""
    assert server_url(Path("/run/b")) == "unix:///run/b/ledger.sock"


def test_a_path_too_long_for_a_socket_is_refused_with_its_length() -> None:
    """The kernel would cut or refuse it with a less helpful text."""
    with pytest.raises(SocketPathTooLong, match="run_dir"):
        socket_path(Path("/run") / ("x" * 100))
