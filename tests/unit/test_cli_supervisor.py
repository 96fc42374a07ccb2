"""The configuration supervisor gets says what the settings say, in any path."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from baton.cli import settings_file, supervisor
from baton.runtime.config import load
from baton.runtime.dirs import arenas_name

HARD_PATH = "a dir ; with # hard %(x)s 'names'"


def _parsed(
    folder: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> ServerOptions:
    config = load(None, environ)
    (folder / supervisor.CONFIG_NAME).write_text(supervisor.render(config))
    (folder / "logs").mkdir()
    for name, value in supervisor.environment(config, folder, {"PATH": os.environ["PATH"]}).items():
        monkeypatch.setenv(name, value)
    options = ServerOptions()
    options.realize(["-c", str(folder / supervisor.CONFIG_NAME)])
    return options


def test_supervisor_reads_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledger first, gateways last, one program a worker, none of them restarted by supervisor."""
    options = _parsed(tmp_path, {"BATON_CLUSTER_DECODE": "2"}, monkeypatch)
    groups = sorted(options.process_group_configs, key=lambda group: group.priority)
    names = [group.name for group in groups]
    assert names == [
        "ledger",
        "router-0",
        "decode-0",
        "decode-1",
        "prefill-0",
        "gateway",
        "restarter",
    ]
    for group in groups[:-1]:
        process = group.process_configs[0]
        assert process.stopsignal == 15
        assert process.startsecs == 0
    assert options.umask == 0o077


def test_a_device_has_a_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts before the workers and ends after them; on the host's memory there is none."""
    options = _parsed(tmp_path, {"BATON_ENGINE_DEVICE": "cuda"}, monkeypatch)
    groups = sorted(options.process_group_configs, key=lambda group: group.priority)
    names = [group.name for group in groups]
    assert names[:3] == ["ledger", "keeper", "router-0"]
    command = shlex.split(groups[1].process_configs[0].command)
    assert command[-4:] == ["-m", "baton.keeper", "--config", str(tmp_path / "settings.toml")]


def test_a_cluster_with_a_redis_of_its_own_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With [ledger] url no server is started."""
    options = _parsed(tmp_path, {"BATON_LEDGER_URL": "redis://127.0.0.1:1"}, monkeypatch)
    assert "ledger" not in [group.name for group in options.process_group_configs]


def test_paths_survive_supervisors_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spaces, comment signs, percent signs and quotes in a path reach the program unharmed."""
    folder = tmp_path / HARD_PATH
    folder.mkdir()
    config = load(None, {"BATON_LEDGER_URL": "redis://127.0.0.1:1"})
    environ = supervisor.environment(config, folder, {})
    settings = str(folder / supervisor.SETTINGS_NAME)
    assert shlex.split(environ["SV_SETTINGS"]) == [settings]
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / supervisor.CONFIG_NAME).write_text(supervisor.render(config))
    (plain / "logs").mkdir()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    options = ServerOptions()
    options.realize(["-c", str(plain / supervisor.CONFIG_NAME)])
    (decode,) = [g for g in options.process_group_configs if g.name == "decode-0"]
    assert shlex.split(decode.process_configs[0].command)[-1] == settings


def test_settings_of_the_callers_environment_are_in_the_file_and_nowhere_else(
    tmp_path: Path,
) -> None:
    """A worker restarted tomorrow reads what its siblings read today."""
    given = {"BATON_GATEWAY_PORT": "8123", "BATON_CLUSTER_DECODE": "3", "HOME": "/nowhere"}
    config = load(None, given)
    written = settings_file.write(
        settings_file.resolve(config, tmp_path), tmp_path / supervisor.SETTINGS_NAME
    )
    assert (written.gateway.port, written.cluster.decode) == (8123, 3)
    environ = supervisor.environment(written, tmp_path, given)
    assert not [name for name in environ if name.startswith("BATON_GATEWAY")]
    assert environ["HOME"] == "/nowhere"


def test_every_setting_survives_the_file(tmp_path: Path) -> None:
    """What is written is what is read, also texts with quotes and control characters."""
    given = {
        "BATON_GATEWAY_API_KEYS": 'a"b\\c,d',
        "BATON_GATEWAY_CORS_ORIGINS": "*",
        "BATON_FAKE_STEP_MS": "1.5",
        "BATON_CLUSTER_NAME": "mine",
        "BATON_CORES_DECODE": "0",
    }
    config = settings_file.resolve(load(None, given), tmp_path)
    path = tmp_path / "settings.toml"
    written = settings_file.write(config, path)
    for section in ("cluster", "model", "gateway", "fake", "cores", "limits", "ledger"):
        assert getattr(written, section) == getattr(config, section)
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_places_get_two_names_and_a_port_is_chosen(tmp_path: Path) -> None:
    """Two checkouts are told apart; port 0 becomes a number all processes know."""
    config = load(None, {"BATON_GATEWAY_PORT": "0"})
    one = settings_file.resolve(config, Path("/tmp/baton-0-aaaaaaaa"))
    two = settings_file.resolve(config, Path("/tmp/baton-0-bbbbbbbb"))
    assert one.cluster.name != two.cluster.name
    assert one.gateway.port > 0
    named = load(None, {"BATON_CLUSTER_NAME": "mine"})
    assert settings_file.resolve(named, tmp_path).cluster.name == "mine"


def test_clusters_of_one_name_have_arenas_of_their_own(tmp_path: Path) -> None:
    """Wherever they are: one would take the other's memory over as its own. A link to a place is
    that place, and no name is the beginning of another."""
    places = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b-run"]
    names = [arenas_name(cluster, place) for place in places for cluster in ("x", "x-decode-0")]
    assert len(set(names)) == 6
    assert not any(one != other and other.startswith(f"{one}-") for one in names for other in names)
    (tmp_path / "a").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "a")
    assert arenas_name("x", tmp_path / "c" / "run") == names[0]


def test_only_what_is_said_now_and_differs_is_a_difference(tmp_path: Path) -> None:
    """Defaults, a port that the kernel chose, and a name of the place are none; keys are masked."""
    environ = {
        "BATON_ENGINE_KIND": "fake",
        "BATON_GATEWAY_PORT": "0",
        "BATON_FAKE_STEP_MS": "3",
        "BATON_GATEWAY_API_KEYS": "old",
    }
    run_dir = tmp_path / "r-0123456789abcdef"
    run_dir.mkdir()
    started = settings_file.write(
        settings_file.resolve(load(None, environ), run_dir), run_dir / "settings.toml"
    )
    assert settings_file.differences(load(None, environ), started) == []
    without = {"BATON_ENGINE_KIND": "fake"}
    assert settings_file.differences(load(None, without), started) == []
    environ |= {"BATON_ENGINE_WEIGHTS": "int4", "BATON_GATEWAY_API_KEYS": "new"}
    assert settings_file.differences(load(None, environ), started) == [
        'engine.weights = "int4" (env:BATON_ENGINE_WEIGHTS; it runs with "auto")',
        "gateway.api_keys = (1 set) (env:BATON_GATEWAY_API_KEYS; it runs with (1 set))",
    ]


def test_several_gateways_get_one_socket_from_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways are one fcgi program whose processes inherit the listening socket."""
    environ = {"BATON_CLUSTER_GATEWAYS": "2", "BATON_GATEWAY_PORT": "8123"}
    options = _parsed(tmp_path, environ, monkeypatch)
    (group,) = [g for g in options.process_group_configs if g.name == "gateway"]
    assert [process.name for process in group.process_configs] == ["gateway-0", "gateway-1"]
    assert "--worker-id gateway-1 " in group.process_configs[1].command
    assert group.socket_config.url == "tcp://127.0.0.1:8123"
    assert all(process.autostart for process in group.process_configs)


@pytest.mark.parametrize(("host", "spare"), [("127.0.0.1", "gateway-1"), ("::1", "")])
def test_a_single_gateway_has_a_spare_that_does_not_start_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, spare: str
) -> None:
    """It shares the single one's socket; supervisor knows no sockets of IPv6."""
    environ = {"BATON_GATEWAY_HOST": host}
    assert supervisor.spare(load(None, environ)) == spare
    options = _parsed(tmp_path, environ, monkeypatch)
    (group,) = [g for g in options.process_group_configs if g.name.startswith("gateway")]
    started = [process.name for process in group.process_configs if process.autostart]
    started += [name.rpartition(":")[2] for name in os.environ["SV_START"].split()]
    assert started == ["gateway-0"]
    names = [process.name for process in group.process_configs]
    assert names == (["gateway-0", spare] if spare else ["gateway-0"])
