"""Where the ledger is, and whether its server will do."""

from __future__ import annotations

import pytest

from baton.ledger.connection import (
    RECONNECT_CODES,
    REFUSAL_CODES,
    LedgerUnfit,
    LedgerUnreachable,
    Target,
    check_fit,
    error_code,
    parse_url,
)
from baton.ledger.resp import RespError

FIT = {"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "role": "master"}


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("unix:///run/baton/ledger.sock", Target(path="/run/baton/ledger.sock")),
        ("unix:///run/a%20b.sock?db=2", Target(path="/run/a b.sock", database=2)),
        ("redis://", Target(host="127.0.0.1")),
        ("redis://cache:7000/3", Target(host="cache", port=7000, database=3)),
        ("redis://:s%40cret@cache", Target(host="cache", password="s@cret")),
        ("redis://ann:pw@[::1]:1", Target(host="::1", port=1, username="ann", password="pw")),
    ],
)
def test_urls_are_read(url: str, target: Target) -> None:
    """Each supported form names host or path, credentials and database."""
    assert parse_url(url) == target


def test_rediss_checks_the_servers_certificate() -> None:
    """TLS verifies by default, and not only when asked to."""
    tls = parse_url("rediss://cache").tls
    assert tls is not None and tls.check_hostname
    loose = parse_url("rediss://cache?ssl_cert_reqs=none").tls
    assert loose is not None and not loose.check_hostname


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("redis+sentinel://a/b", "Sentinel"),
        ("http://a", "http"),
        ("redis://a/b", "'b'"),
        ("redis://a:99999", "ort"),
        ("redis://a?ssl_ca_certs=x", "ssl_ca_certs"),
        ("rediss://a?ssl_ca_certs=/nowhere/ca.pem", "TLS"),
    ],
)
def test_a_wrong_url_is_refused_by_name(url: str, part: str) -> None:
    """The error says which part is wrong."""
    with pytest.raises(LedgerUnfit, match=part):
        parse_url(url)


def test_a_password_is_never_shown() -> None:
    """The text of a target, used in errors and logs, has no credentials."""
    assert "hunter2" not in str(parse_url("redis://ann:hunter2@cache:7000"))


def test_a_fit_server_passes() -> None:
    """The oldest supported version passes, and so does a newer one."""
    check_fit(FIT)
    check_fit({**FIT, "redis_version": "6.2.0"})


@pytest.mark.parametrize("version", ["6.0.16", "5.0", "2.8.1"])
def test_an_old_server_is_unfit(version: str) -> None:
    """Below 6.2: refused for good, with the version in the text."""
    with pytest.raises(LedgerUnfit, match=version):
        check_fit({**FIT, "redis_version": version})


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lru"])
def test_an_evicting_server_is_unfit(policy: str) -> None:
    """A server that may drop records is refused, also if it only drops those with a TTL."""
    with pytest.raises(LedgerUnfit, match=policy):
        check_fit({**FIT, "maxmemory_policy": policy})


def test_a_replica_may_become_a_primary() -> None:
    """A replica is unreachable for now, not unfit for good."""
    with pytest.raises(LedgerUnreachable, match="replica"):
        check_fit({**FIT, "role": "slave"})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("READONLY You can't write against a read only replica.", "READONLY"),
        ("ERR Error running script (call to f_1): @user_script:3: -OOM command not", "OOM"),
        ("MOVED 3999 127.0.0.1:6381", "MOVED"),
        ("ERR Error running script: attempt to index a nil value", ""),
    ],
)
def test_codes_are_found_in_old_and_new_errors(text: str, code: str) -> None:
    """The code counts wherever an old server puts it; none means a bug."""
    assert error_code(RespError(text)) == code
    assert not RECONNECT_CODES & REFUSAL_CODES
