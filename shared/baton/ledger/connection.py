"""One connection to the ledger's server: where it is, whether it will do, replies in order.

Decides how a URL is read, what makes a server unfit, and that each command's reply goes to the
caller of that command: replies are matched by order, so a connection with a reply that nobody will
read is closed, never used again. Timeouts and reconnecting are decided by ``redis_ledger``.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import parse_qs, unquote, urlsplit

from baton.ledger.resp import ProtocolBroken, RespError, RespReader, RespReply, pack

VERSION_MIN = (6, 2)
PORT = 6379

_TLS_KEYS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"}

#: These come from a server that may be fine in a moment, or from one that is no longer the primary:
#: the next connection may lead to another.
RECONNECT_CODES = frozenset(
    {
        "ASK",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MOVED",
        "NOAUTH",
        "NOPERM",
        "READONLY",
        "UNBLOCKED",
        "WRONGPASS",
    }
)
#: These are refusals of one command by a server that goes on. WRONGTYPE: somebody else has written
#: to a key of ours; all processes ending over it would not mend it.
REFUSAL_CODES = frozenset(["OOM", "BUSY", "MISCONF", "NOREPLICAS", "TRYAGAIN", "WRONGTYPE"])

_CODE = re.compile(r"\b(" + "|".join(sorted(RECONNECT_CODES | REFUSAL_CODES)) + r")\b")


class LedgerUnfit(Exception):
    """The server (or the URL) can never do, whatever is tried again; the text says why."""


class LedgerUnreachable(ConnectionError):
    """No server answers there, or not as a primary that is ready; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed ``[ledger] url``."""

    path: str = ""
    """Of the Unix socket; empty for TCP."""
    host: str = ""
    port: int = PORT
    username: str = ""
    password: str = ""
    database: int = 0
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        """Where it is, without the credentials."""
        return f"unix://{self.path}" if self.path else f"{self.host}:{self.port}"


def parse_url(url: str) -> Target:
    """Read ``unix:///path``, ``redis://`` or ``rediss://[user:password@]host[:port][/db]``.

    Query: ``db`` (unix), ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``,
    ``ssl_cert_reqs=none`` (rediss).

    Raises:
        LedgerUnfit: another scheme, or an unknown or wrong part, which the text names.
    """
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unix = parts.scheme == "unix"
    known = {"unix": {"db"}, "redis": set[str](), "rediss": _TLS_KEYS}
    if parts.scheme not in known:
        raise LedgerUnfit(
            f"[ledger] url has the scheme {parts.scheme!r}: known are unix, redis and rediss "
            "(Sentinel and Cluster: name the address of the primary of the pool's slot)"
        )
    unknown = sorted(query.keys() - known[parts.scheme])
    if unknown:
        raise LedgerUnfit(f"[ledger] url has an unknown option {unknown[0]!r}")
    try:
        database = int((query.get("db", "") if unix else parts.path.strip("/")) or 0)
        port = parts.port or PORT
    except ValueError as error:
        raise LedgerUnfit(f"[ledger] url: {error}") from None
    return Target(
        path=unquote(parts.path) if unix else "",
        host="" if unix else parts.hostname or "127.0.0.1",
        port=port,
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=database,
        tls=_tls(query) if parts.scheme == "rediss" else None,
    )


def _tls(query: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca_certs"))
        if "ssl_certfile" in query:
            context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile"))
    except OSError as error:
        raise LedgerUnfit(f"[ledger] url: TLS files: {error}") from None
    if query.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def error_code(error: RespError) -> str:
    """Return the known code in ``error``, or "". Old servers wrap a script's error in a text."""
    found = _CODE.search(error.text)
    return found.group(1) if found else ""


class Connection(asyncio.Protocol):
    """A stream of commands and their replies, in order. Loop thread only."""

    def __init__(self, on_reply: Callable[[RespReply], None]) -> None:
        self._on_reply = on_reply
        self._reader = RespReader()
        self._transport: asyncio.WriteTransport | None = None
        self._asked: deque[asyncio.Future[RespReply]] = deque()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the connection is over."""
        self.writable = asyncio.Event()
        """Clear while the server takes nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._reader.feed(data)
        except ProtocolBroken as error:
            self.abort(f"protocol error: {error}")
            return
        for reply in replies:
            if self.lost.done():
                return
            if self._asked:
                future = self._asked.popleft()
                if not future.done():
                    future.set_result(reply)
            else:
                self._on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(f"connection lost: {exc or 'closed by the server'}")

    def abort(self, reason: str) -> None:
        """Close at once; what was asked and not answered never will be."""
        if self._transport is not None:
            self._transport.abort()
        self._over(reason)

    def _over(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        self.writable.set()
        for future in self._asked:
            if not future.done():
                future.set_exception(LedgerUnreachable(reason))
        self._asked.clear()

    def write(self, data: bytes) -> None:
        """Send commands; each reply goes to ``on_reply``."""
        assert self._transport is not None
        self._transport.write(data)

    async def ask(self, *words: bytes | str | int) -> RespReply:
        """Send one command of the connection's own and return its reply.

        Only while no reply for ``on_reply`` is awaited. Cancelled, the connection must be aborted.

        Raises:
            LedgerUnreachable: the connection is over.
        """
        if self.lost.done():
            raise LedgerUnreachable(self.lost.result())
        future: asyncio.Future[RespReply] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self.write(pack(*words))
        return await future


async def connect(
    target: Target, on_reply: Callable[[RespReply], None], sources: Sequence[bytes]
) -> Connection:
    """Open a connection to a fit server and load the scripts.

    The caller bounds the time (``asyncio.timeout``): a half-open connection is aborted.

    Raises:
        LedgerUnfit: too old, or it may evict records.
        LedgerUnreachable: nobody answers, or not as a primary that is ready.
    """
    loop = asyncio.get_running_loop()
    try:
        if target.path:
            _, connection = await loop.create_unix_connection(
                lambda: Connection(on_reply), target.path
            )
        else:
            _, connection = await loop.create_connection(
                lambda: Connection(on_reply), target.host, target.port, ssl=target.tls
            )
    except OSError as error:
        raise LedgerUnreachable(f"{target}: {error}") from None
    try:
        await _introduce(connection, target)
        await load(connection, sources)
    except BaseException:
        connection.abort("not used")
        raise
    return connection


async def _introduce(connection: Connection, target: Target) -> None:
    if target.password:
        user = (target.username,) if target.username else ()
        _require(await connection.ask("AUTH", *user, target.password), "AUTH")
    if target.database:
        _require(await connection.ask("SELECT", target.database), "SELECT")
    info: dict[str, str] = {}
    for section in ("server", "memory", "replication"):
        reply = _require(await connection.ask("INFO", section), f"INFO {section}")
        lines = reply.decode(errors="replace").splitlines()
        info |= dict(line.split(":", 1) for line in lines if ":" in line)
    check_fit(info)


async def load(connection: Connection, sources: Sequence[bytes]) -> None:
    """Load the scripts. Only while no other reply is awaited."""
    for source in sources:
        _require(await connection.ask("SCRIPT", "LOAD", source), "SCRIPT LOAD")


def _require(reply: RespReply, what: str) -> bytes:
    if isinstance(reply, RespError):
        raise LedgerUnreachable(f"{what}: {reply.text}")
    if not isinstance(reply, bytes):
        raise LedgerUnreachable(f"{what}: unexpected answer")
    return reply


def check_fit(info: dict[str, str]) -> None:
    """Refuse a server that must not hold the ledger, from the fields of INFO.

    Raises:
        LedgerUnfit: older than :data:`VERSION_MIN`, or with an evicting memory policy.
        LedgerUnreachable: a replica, for now.
    """
    version = info.get("redis_version", "0")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < VERSION_MIN:
        raise LedgerUnfit(f"the ledger needs Redis 6.2 or newer (or Valkey), this is {version}")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise LedgerUnfit(
            f"the ledger's server has maxmemory-policy {policy}: it would drop records of running "
            "requests; set it to noeviction"
        )
    if info.get("role", "master") != "master":
        raise LedgerUnreachable("READONLY: this server is a replica")
