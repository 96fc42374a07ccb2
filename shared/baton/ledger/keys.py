"""Every key of the ledger, and what it holds.

All keys of a pool carry one hash tag, so that a script may touch them together in a Redis Cluster;
load is spread by using more pools. ``<peer>`` is ``worker_id/incarnation``. All times are
milliseconds of the server's own clock.

===================== ====== =======================================================================
key                   type   holds
===================== ====== =======================================================================
``…:meta``            hash   ``id`` random, made by whoever finds none; ``rebuild_until`` and
                             ``swept_at``: times
``…:leases``          zset   ``<peer>`` scored by the lease's deadline (never a key TTL)
``…:gone``            zset   ``<peer>`` scored by when its lease ended, if there were requests then.
                             Forgotten after an hour
``…:members``         hash   ``<peer>`` -> the Member as it announced itself (msgpack)
``…:seat:<worker>``   string newest incarnation, then the ones it replaced, newest first. Lives an
                             hour longer than the last lease of that name
``…:leaving``         hash   ``peer`` that left its role last, and when, ``at``. Expires after an
                             hour
``…:request:<id>``    hash   one request, see below. Expires ``terminal_ttl_ms`` after its end, or
                             that long after its deadline if nobody ended it
``…:resumable:<id>``  hash   one resumable request of a client, see below. Expires with its life, or
                             after its window once closed
``…:repeat:<digest>`` hash   an idempotency key: ``id`` of its resumable, ``body`` the digest of
                             what was asked for. Expires with it
``…:owners``          zset   ``<peer> <id>`` for router, gateway, decode and prefill of each live
                             request, scored by the time when the record itself would expire
===================== ====== =======================================================================

Fields of a request: ``state``, ``epoch``, ``attempts``, ``failures``; the peers ``router`` (with
its ``turn``), ``gateway``, ``decode``, ``prefill`` ("" where nobody); ``spec`` (RequestSpec,
msgpack) and its ``resume_ms``; ``expires_at``;
``op:<op id>`` -> state and attempts that op was answered with, of the current epoch only (a retry
drops the old ones and keeps its own); ``outcome`` (msgpack) and ``ended_by`` once terminal.

Fields of a resumable: ``gateway`` and its ``turn``; ``former``, the turn before; ``opened``, when
that was (milliseconds of the server's clock); ``token``, ``owner``, ``repeat`` and ``body``, what
was asked for with that: digests, never the secrets; ``requests`` (msgpack) and ``recipe``: what its
gateway needs; ``window`` and ``life`` in milliseconds; ``claim`` the last one; ``again`` the turn
in which its requests were made again; ``closed`` ("", or how) and ``answer``.
"""

from __future__ import annotations

from baton.core.ids import Peer


class Keys:
    """The keys of one pool."""

    def __init__(self, pool: str) -> None:
        if not pool or any(char in pool for char in "{}"):
            raise ValueError(f"a pool's name must not be empty nor hold braces: {pool!r}")
        self._prefix = f"{{baton:{pool}}}"
        self.meta = f"{self._prefix}:meta"
        self.leases = f"{self._prefix}:leases"
        self.members = f"{self._prefix}:members"
        self.owners = f"{self._prefix}:owners"
        self.gone = f"{self._prefix}:gone"
        self.leaving = f"{self._prefix}:leaving"
        self.requests = f"{self._prefix}:request:"

    def seat(self, worker_id: str) -> str:
        return f"{self._prefix}:seat:{worker_id}"

    def request(self, request_id: str) -> str:
        return f"{self.requests}{request_id}"

    def resumable(self, resumable_id: str) -> str:
        return f"{self._prefix}:resumable:{resumable_id}"

    def repeat(self, digest: str) -> str:
        return f"{self._prefix}:repeat:{digest}"


def owner_entry(peer: Peer, request_id: str) -> str:
    """Return the member of ``owners`` that says: ``peer`` works on ``request_id``.

    A dead peer's requests are the members that start with ``<peer>`` and a space: found with ZSCAN
    and MATCH, a page at a time. A request has at most four entries.
    """
    return f"{peer} {request_id}"
