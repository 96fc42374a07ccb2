"""Reads the settings: defaults, one TOML file, the environment; in that order.

Decides where a value comes from and what is refused. This is the one place that reads the
environment and the configuration file. Every error names the file or variable, the key, the value
and what is allowed.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit, urlunsplit

import msgspec

from baton.core.ids import Role
from baton.runtime.settings import (
    SECRET,
    SECTIONS,
    ArenaConfig,
    ClusterConfig,
    Config,
    CoresConfig,
    EngineConfig,
    FakeConfig,
    GatewayConfig,
    LedgerConfig,
    ModelConfig,
    RouterConfig,
)

__all__ = [
    "DEFAULT_FILE",
    "ArenaConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "CoresConfig",
    "EngineConfig",
    "FakeConfig",
    "GatewayConfig",
    "LedgerConfig",
    "ModelConfig",
    "RouterConfig",
    "SettingRow",
    "config_path",
    "load",
    "rows",
    "worker_ids",
]

#: Read if it is in the current directory and nothing else is named.
DEFAULT_FILE = "baton.toml"
#: Variables that start with ``BATON_`` and are not settings.
OTHER_VARIABLES = frozenset({"BATON_CONFIG", "BATON_CHECK", "BATON_ORPHAN"})
#: Limits for which nothing at all is a sensible bound.
_ZERO_LIMITS = frozenset({"growth_tokens", "logprobs_max", "stops_max"})

Origin = tuple[Any, str]


class ConfigError(ValueError):
    """A setting is wrong: a permanent error (exit code 78), with a text for people."""


def config_path(explicit: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: the given one, ``$BATON_CONFIG``, ``./baton.toml``, or none."""
    if explicit is not None:
        return explicit
    if environ.get("BATON_CONFIG"):
        return Path(environ["BATON_CONFIG"])
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Return the settings from ``path`` (if any), overridden by ``BATON_<SECTION>_<KEY>``.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value is not allowed, or values
            contradict each other.
    """
    given: dict[str, dict[str, Origin]] = {section: {} for section in SECTIONS}
    if path is not None:
        path = path.absolute()
        _take_file(path, given)
    _take_environment(environ, given)
    sources: dict[str, str] = {}
    sections: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        sections[section] = _build(section, cls, given[section], sources)
    config = Config(**sections, path=path, sources=sources)
    _cross_check(config)
    return config


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One line of ``baton config show``."""

    key: str
    value: str
    source: str


def rows(config: Config) -> list[SettingRow]:
    """Return every setting with its value (secrets masked) and where it came from."""
    found = []
    for section, cls in SECTIONS.items():
        for name in cls.__struct_fields__:
            key = f"{section}.{name}"
            value = getattr(getattr(config, section), name)
            shown = _masked(value) if key in SECRET else msgspec.json.encode(value).decode()
            found.append(SettingRow(key, shown, config.sources[key]))
    return found


def worker_ids(config: Config) -> list[tuple[Role, str]]:
    """Return role and name of every process of the cluster, in the order they should start."""
    cluster = config.cluster
    prefill = 0 if cluster.mode == "colocated" else cluster.prefill
    counts = (
        (Role.ROUTER, cluster.routers),
        (Role.DECODE, cluster.decode),
        (Role.PREFILL, prefill),
        (Role.GATEWAY, cluster.gateways),
    )
    return [(role, f"{role.value}-{n}") for role, count in counts for n in range(count)]


# --- reading ------------------------------------------------------------------------------------


def _take_file(path: Path, given: dict[str, dict[str, Origin]]) -> None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for section, table in document.items():
        if section not in SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]{_known(section, SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {section} = {_shown(table)} is not allowed: [{section}] is a section"
            )
        fields = SECTIONS[section].__struct_fields__
        for key, value in table.items():
            if key not in fields:
                raise ConfigError(f"{path}: unknown key [{section}] {key}{_known(key, fields)}")
            given[section][key] = (value, f"file:{path}")


def _take_environment(environ: Mapping[str, str], given: dict[str, dict[str, Origin]]) -> None:
    known = {
        f"BATON_{section}_{key}".upper(): (section, key)
        for section, cls in SECTIONS.items()
        for key in cls.__struct_fields__
    }
    prefixes = tuple(f"BATON_{section}_".upper() for section in SECTIONS)
    for variable in sorted(environ):
        if not variable.startswith("BATON_") or variable in OTHER_VARIABLES:
            continue
        if variable in known:
            section, key = known[variable]
            given[section][key] = (environ[variable], f"env:{variable}")
        elif variable.startswith(prefixes) or difflib.get_close_matches(variable, known, 1, 0.85):
            # Names that resemble none of ours may belong to somebody else's tool.
            raise ConfigError(
                f"environment variable {variable}: no such setting{_known(variable, known)}"
                f"{_service_link(variable, environ[variable])}"
            )
        elif (meant := _without_section(variable, known)) and not _service_link(
            variable, environ[variable]
        ):
            raise ConfigError(
                f"environment variable {variable}: no such setting; did you mean "
                f"{' or '.join(meant)}?"
            )


def _without_section(variable: str, known: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the settings meant by ``BATON_PORT`` (a key) or ``BATON_MODEL`` (a section)."""
    word = variable.removeprefix("BATON_").lower()
    keys = [name for name, (_, key) in known.items() if key == word]
    return keys or [name for name, (section, _) in known.items() if section == word]


def _service_link(variable: str, value: str) -> str:
    """Kubernetes sets BATON_GATEWAY_PORT=tcp://... for a service called baton-gateway."""
    if "_SERVICE_" in variable or "_PORT_" in variable or value.startswith(("tcp://", "udp://")):
        return " (set by Kubernetes for a service of that name? use enableServiceLinks: false)"
    return ""


def _build(
    section: str, cls: type[msgspec.Struct], given: Mapping[str, Origin], sources: dict[str, str]
) -> msgspec.Struct:
    hints = get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    for name in cls.__struct_fields__:
        value, source = given.get(name, (None, "default"))
        sources[f"{section}.{name}"] = source
        if source == "default":
            continue
        values[name] = _convert(section, name, value, source, hints[name])
    return cls(**values)


def _convert(section: str, name: str, value: Any, source: str, hint: Any) -> Any:
    from_env = source.startswith("env:")
    try:
        parsed = _parse(value, hint) if from_env else value
        converted = msgspec.convert(parsed, hint)
        if section == "limits" and converted < (0 if name in _ZERO_LIMITS else 1):
            raise msgspec.ValidationError("too small")
    except (msgspec.ValidationError, ValueError):
        raise ConfigError(_refusal(section, name, value, source, hint)) from None
    return converted


def _parse(text: str, hint: Any) -> Any:
    """Return what ``text`` of an environment variable means for a setting of type ``hint``."""
    kind = msgspec.inspect.type_info(hint)
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return [_scalar(part.strip(), kind.item_type) for part in text.split(",") if part.strip()]
    return _scalar(text, kind)


def _scalar(text: str, kind: msgspec.inspect.Type) -> Any:
    if isinstance(kind, msgspec.inspect.IntType):
        return int(text)
    if isinstance(kind, msgspec.inspect.FloatType):
        return float(text)
    if isinstance(kind, msgspec.inspect.LiteralType) and isinstance(kind.values[0], int):
        return int(text)
    return text


# --- errors for people --------------------------------------------------------------------------


def _refusal(section: str, name: str, value: Any, source: str, hint: Any) -> str:
    where, _, place = source.partition(":")
    shown = "***" if f"{section}.{name}" in SECRET else _shown(value)
    head = (
        f"environment variable {place} = {shown}"
        if where == "env"
        else f"{place}: [{section}] {name} = {shown}"
    )
    least = None
    if section == "limits":
        least = 0 if name in _ZERO_LIMITS else 1
    text = f"{head} is not allowed: {allowed(hint, least)} is expected"
    return text + (_service_link(place, value) if where == "env" else "")


def allowed(hint: Any, least: int | None = None) -> str:
    """Return in words what a setting of type ``hint`` may be."""
    return _words(msgspec.inspect.type_info(hint), least)


def _words(kind: msgspec.inspect.Type, least: int | None = None) -> str:
    if isinstance(kind, msgspec.inspect.LiteralType):
        return "one of " + ", ".join(_shown(value) for value in kind.values)
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return f"a list, each item {_words(kind.item_type)}"
    if isinstance(kind, msgspec.inspect.StrType):
        if kind.pattern:
            return f"a text that matches {kind.pattern}"
        return "a text that is not empty" if kind.min_length else "a text"
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        low = kind.ge if kind.ge is not None else least
        noun = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
        if low is not None and kind.le is not None:
            return f"{noun} from {low:g} to {kind.le:g}" if kind.le < 1e6 else f"{noun} >= {low:g}"
        return f"{noun} >= {low:g}" if low is not None else noun
    raise AssertionError(f"no words for settings of type {kind}")


def _known(name: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    close = difflib.get_close_matches(name, ordered, 1, 0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(ordered)}" if len(ordered) <= 60 else ""


def _shown(value: Any) -> str:
    if isinstance(value, str | int | float | bool | list):
        return msgspec.json.encode(value).decode()
    return repr(value)


def _masked(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({len(value)} set)" if value else "[]"
    return f'"{mask_url(value)}"'


def mask_url(url: str) -> str:
    """Return ``url`` with its password replaced, for logs and error texts."""
    try:
        parts = urlsplit(url)
        if parts.password is None:
            return url
    except ValueError:
        return "***"
    return urlunsplit(parts._replace(netloc=re.sub(r":[^:@]*@", ":***@", parts.netloc)))


# --- settings that have to fit together ---------------------------------------------------------


def _cross_check(config: Config) -> None:
    cluster, limits = config.cluster, config.limits
    if cluster.mode == "split" and cluster.prefill == 0:
        _contradiction(config, "cluster.prefill", "split mode needs at least 1; or use colocated")
    if cluster.mode == "colocated" and config.roles.auto == "on":
        _contradiction(config, "roles.auto", "colocated mode has one role only")
    if 2 * limits.lease_renew_ms >= limits.lease_ttl_ms:
        half = f"less than half of lease_ttl_ms ({limits.lease_ttl_ms})"
        _contradiction(config, "limits.lease_renew_ms", half)
    url = config.ledger.url
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        _contradiction(config, "ledger.url", "a redis://, rediss:// or unix:// URL is expected")
    if config.cluster.run_dir and not Path(config.cluster.run_dir).is_absolute():
        _contradiction(config, "cluster.run_dir", "an absolute path is expected")
    if config.gateway.uds and not Path(config.gateway.uds).is_absolute():
        _contradiction(config, "gateway.uds", "an absolute path is expected")
    _check_device(config)
    if cluster.gateways > 1 and config.gateway.port == 0 and not config.gateway.uds:
        _contradiction(config, "gateway.port", "several gateways need a port that is not 0")


def _check_device(config: Config) -> None:
    """On a device there is one engine, and no compiled kernels."""
    engine = config.engine
    if engine.device == "cpu":
        return
    for key, value, allowed in (
        ("kind", engine.kind, ("torch",)),
        ("kernels", engine.kernels, ("auto",)),
        ("weights", engine.weights, ("auto", "full")),
    ):
        if value not in allowed:
            names = " or ".join(f'"{name}"' for name in allowed)
            text = f'engine.device = "{engine.device}" allows {names} only'
            _contradiction(config, f"engine.{key}", text)


def _contradiction(config: Config, key: str, text: str) -> None:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    shown = _masked(value) if key in SECRET else _shown(value)
    source = config.sources[key]
    raise ConfigError(f"[{section}] {name} = {shown} (from {source}) is not allowed: {text}")
