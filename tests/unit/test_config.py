"""Settings: where each comes from, and what is refused in which words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.core.ids import Role
from baton.runtime import config as configuration
from baton.runtime.config import ConfigError, load, rows, worker_ids
from baton.runtime.dirs import cache_dir, endpoint, ledger_url, run_dir, run_dir_path


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "baton.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_without_file_or_environment() -> None:
    """Without a file and variables every setting has its default and says so."""
    config = load(None, {})
    assert (config.cluster.mode, config.gateway.port, config.limits.lease_ttl_ms) == (
        "adaptive",
        8000,
        2000,
    )
    assert set(config.sources.values()) == {"default"}
    assert config.path is None


def test_file_then_environment(tmp_path: Path) -> None:
    """A variable overrides the file, the file overrides the default, and each is named."""
    path = written(tmp_path, '[gateway]\nport = 9000\nhost = "::1"\n[limits]\ndrain_ms = 5\n')
    config = load(path, {"BATON_GATEWAY_PORT": "9001", "BATON_CORES_DECODE": "1, 2"})
    assert (config.gateway.port, config.gateway.host) == (9001, "::1")
    assert (config.limits.drain_ms, config.cores.decode) == (5, (1, 2))
    assert config.sources["gateway.port"] == "env:BATON_GATEWAY_PORT"
    assert config.sources["gateway.host"] == f"file:{path}"
    assert config.sources["gateway.uds"] == "default"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gatewy]\nport = 1\n", ["[gatewy]", "did you mean gateway?"]),
        ("[gateway]\nprot = 1\n", ["[gateway] prot", "did you mean port?"]),
        ("[gateway]\nport = 70000\n", ["port = 70000", "a whole number from 0 to 65535"]),
        ('[gateway]\nport = "8000"\n', ['port = "8000"', "a whole number"]),
        ("[gateway]\nport = true\n", ["port = true", "a whole number"]),
        ('[cluster]\nmode = "both"\n', ['mode = "both"', '"adaptive", "colocated", "split"']),
        ('[cluster]\nmode = "split"\nprefill = 0\n', ["prefill = 0", "split mode"]),
        ("[cluster]\nprefill = -1\n", ["prefill = -1", "from 0 to 256"]),
        ("[arena]\nblock_size = 17\n", ["block_size = 17", "one of 8, 16, 32, 64"]),
        ("[limits]\nlease_ttl_ms = 0\n", ["lease_ttl_ms = 0", "a whole number >= 1"]),
        ("[limits]\nlease_renew_ms = 1500\n", ["lease_renew_ms = 1500", "half of lease_ttl_ms"]),
        ('[ledger]\nurl = "http://u:geheim@x"\n', ["url", "redis://"]),
        ("gateway = 3\n", ["gateway = 3", "section"]),
        ("[gateway\n", ["not valid TOML"]),
        ('[gateway]\napi_keys = ["geheim", 1]\n', ["api_keys = ***", "a list"]),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    """A wrong key or value is an error that names file, key, value and what is allowed."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    for word in [str(path), *words]:
        assert word in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("BATON_GATEWAY_PROT", "1", ["no such setting", "BATON_GATEWAY_PORT"]),
        ("BATON_GATWAY_PORT", "1", ["no such setting", "BATON_GATEWAY_PORT"]),
        ("BATON_PORT", "8001", ["no such setting", "BATON_GATEWAY_PORT"]),
        ("BATON_MODEL", "x", ["no such setting", "BATON_MODEL_PATH"]),
        ("BATON_GATEWAY_PORT", "eight", ['= "eight"', "a whole number from 0 to 65535"]),
        ("BATON_GATEWAY_PORT", "tcp://10.0.0.1:80", ["enableServiceLinks"]),
        ("BATON_MODEL_DTYPE", "int4", ["one of", "bfloat16"]),
        ("BATON_FAKE_STEP_MS", "nan", ["a number from 0 to 600000"]),
    ],
)
def test_wrong_variable_is_named(variable: str, value: str, words: list[str]) -> None:
    """A wrong environment variable is an error that names it and says what is allowed."""
    with pytest.raises(ConfigError) as caught:
        load(None, {variable: value})
    for word in [variable, *words]:
        assert word in str(caught.value)


def test_foreign_variables_are_left_alone() -> None:
    """Variables that resemble no setting are somebody else's."""
    assert load(None, {"BATON_CHECK": "1", "BATON_ORCHESTRA": "x"}) == load(None, {})
    # Kubernetes sets these for a service called baton.
    links = {"BATON_PORT": "tcp://10.0.0.1:80", "BATON_SERVICE_HOST": "10.0.0.1"}
    assert load(None, links) == load(None, {})


def test_missing_file(tmp_path: Path) -> None:
    """A file that was named and is not there is an error, never a silent default."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        load(tmp_path / "nowhere.toml", {})


def test_config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the given one, else $BATON_CONFIG, else ./baton.toml, else none."""
    monkeypatch.chdir(tmp_path)
    assert configuration.config_path(None, {}) is None
    written(tmp_path, "")
    assert configuration.config_path(None, {}) == Path("baton.toml")
    assert configuration.config_path(None, {"BATON_CONFIG": "/x"}) == Path("/x")
    assert configuration.config_path(Path("/y"), {"BATON_CONFIG": "/x"}) == Path("/y")


def test_rows_cover_everything_and_no_secret() -> None:
    """`config show` has one row a setting, and neither keys nor passwords."""
    config = load(
        None,
        {"BATON_GATEWAY_API_KEYS": "geheim", "BATON_LEDGER_URL": "redis://me:geheim@h:1/0"},
    )
    shown = rows(config)
    assert [row.key for row in shown] == list(config.sources)
    assert "geheim" not in repr(shown)
    by_key = {row.key: row.value for row in shown}
    assert by_key["ledger.url"] == '"redis://me:***@h:1/0"'
    assert by_key["gateway.api_keys"] == "(1 set)"


def test_worker_ids() -> None:
    """Colocated mode has no prefill process, split mode has as many as were asked for."""
    split = load(None, {"BATON_CLUSTER_PREFILL": "2"})
    assert worker_ids(split) == [
        (Role.ROUTER, "router-0"),
        (Role.DECODE, "decode-0"),
        (Role.PREFILL, "prefill-0"),
        (Role.PREFILL, "prefill-1"),
        (Role.GATEWAY, "gateway-0"),
    ]
    together = load(None, {"BATON_CLUSTER_MODE": "colocated", "BATON_CLUSTER_PREFILL": "2"})
    assert Role.PREFILL not in {role for role, _ in worker_ids(together)}


def test_run_dir_is_private_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each configuration file has a run directory of its own, with mode 0700."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    first = load(written(tmp_path, ""), {})
    (tmp_path / "other").mkdir()
    second = load(written(tmp_path / "other", ""), {})
    made = run_dir(first, environ)
    assert made.parent == tmp_path
    assert made.stat().st_mode & 0o777 == 0o700
    assert run_dir(first, environ) == made
    assert run_dir_path(second, environ) != made
    monkeypatch.chdir(tmp_path)
    # A baton.toml that is written later names the place where the cluster runs already.
    assert run_dir_path(load(None, {}), environ) == made
    assert endpoint(made, "decode-0") == f"ipc://{made}/decode-0.sock"
    assert ledger_url(first, made) == f"unix://{made}/ledger.sock"


def test_run_dir_falls_back_from_a_long_path(tmp_path: Path) -> None:
    """A long $XDG_RUNTIME_DIR is passed over: socket names end at 107 bytes."""
    long = tmp_path / ("x" * 120)
    long.mkdir(mode=0o700)
    path = run_dir_path(load(None, {}), {"XDG_RUNTIME_DIR": str(long)})
    assert str(path).startswith(f"/tmp/baton-{os.geteuid()}-")


def test_run_dir_refusals(tmp_path: Path) -> None:
    """A run directory that is a link, open to others, or too long a name is refused."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "file").write_text("")
    for name, words in (
        ("link", "symbolic link"),
        ("file", "cannot be made|not a directory"),
        ("open", "mode 0755 lets others in"),
        ("none/below", "cannot be made"),
        ("x" * 100, "99 is the most"),
    ):
        config = load(None, {"BATON_CLUSTER_RUN_DIR": str(tmp_path / name)})
        with pytest.raises(ConfigError, match=words):
            run_dir(config)


def test_cache_dir(tmp_path: Path) -> None:
    """Models are cached where the setting says, else by XDG's rule."""
    config = load(None, {})
    assert cache_dir(config, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "baton"
    assert cache_dir(config, {"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/baton"
    assert cache_dir(load(None, {"BATON_MODEL_CACHE_DIR": "/m"}), {}) == Path("/m")


@pytest.mark.parametrize(
    ("key", "value"), [("KIND", "fake"), ("KERNELS", "avx2"), ("WEIGHTS", "int8")]
)
def test_a_device_has_one_engine(key: str, value: str) -> None:
    """What only a CPU has is refused beside a device, by name."""
    environ = {"BATON_ENGINE_DEVICE": "cuda"}
    assert load(None, environ).engine.invariance == "on"
    words = f'{key.lower()} = "{value}".*engine.device = "cuda" allows'
    with pytest.raises(ConfigError, match=words):
        load(None, {**environ, f"BATON_ENGINE_{key}": value})


def test_adaptive_mode_has_prefill_processes_and_an_slo() -> None:
    """It may be told to have none; the other modes decide by no SLO."""
    environ = {"BATON_CLUSTER_MODE": "adaptive", "BATON_SLO_ITL_MS": "40"}
    adaptive = load(None, {**environ, "BATON_SLO_OVERLOAD": "refuse"})
    assert "prefill-0" in [name for _, name in worker_ids(adaptive)]
    slo = adaptive.adaptive_slo()
    assert slo is not None and (slo.ttft_s, slo.itl_s, slo.refuse) == (2.0, 0.04, True)
    alone = load(None, {**environ, "BATON_CLUSTER_PREFILL": "0"})
    assert "prefill-0" not in [name for _, name in worker_ids(alone)]
    for mode in ("split", "colocated"):
        assert load(None, {"BATON_CLUSTER_MODE": mode}).adaptive_slo() is None
