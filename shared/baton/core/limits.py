"""Every bound of the system: its default and what happens at the limit.

Decides numbers only. A limit may be changed in the ``[limits]`` table of the configuration file;
``docs/limits.md`` is rendered from this class.
"""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All limits. Units are in the names; a docstring line says what happens at the limit."""

    # leases and life
    lease_ttl_ms: int = 2_000
    """A process that does not renew for this long is declared lost."""
    lease_renew_ms: int = 500
    """How often a lease is renewed and a heartbeat sent."""
    status_pause_ms: int = 50
    """Shortest time between two status messages of a worker to a router, and between two that tell
    which blocks have come and gone."""
    step_hung_ms: int = 30_000
    """An engine step older than this counts as hung: the worker exits with an error."""
    start_ms: int = 600_000
    """A process that is not ready so long after its start is killed and started again."""
    frozen_margin_ms: int = 250
    """A process whose event loop has stood still for ``lease_ttl_ms`` and this is killed."""
    drain_ms: int = 30_000
    """After SIGTERM running requests may go on this long; then they fail as ``draining``."""
    restart_ms: int = 300_000
    """After SIGUSR2 a gateway's running requests may go on this long; then clients that can resume
    are told to, at another gateway, and the others' requests fail as ``draining``."""
    peer_silent_ms: int = 2_000
    """A peer whose link shows no frame for this long is reported lost."""

    # requests
    queue_requests_max: int = 256
    """More waiting requests at a router are refused as ``overloaded``."""
    queue_tokens_max: int = 1_000_000
    """More waiting prompt tokens at a router are refused as ``overloaded``."""
    request_deadline_ms: int = 600_000
    """A request older than this ends as ``expired``."""
    queue_deadline_ms: int = 60_000
    """A request that no decode worker has taken in by then is refused as ``overloaded``, however
    often it was placed; once one had blocks for it, only its deadline counts."""
    bypass_max: int = 16
    """Requests that may be placed before one that waits for memory; then it is next."""
    prefix_index_blocks_max: int = 262_144
    """Blocks in decode workers' prefix caches that one router knows of, about 100 bytes each; what
    is beyond counts as not cached."""
    prefix_lookup_blocks_max: int = 4_096
    """Leading blocks of a request that a router looks up; what is beyond counts as not cached."""
    block_names_max: int = 4_096
    """Names of blocks in one message. When more have changed at once, routers ask the decode worker
    for all that it has, a page of so many blocks at a time."""
    block_page_ms: int = 1_000
    """A page of names that a decode worker does not send in this time is asked for again."""
    ledger_wait_ms: int = 3_000
    """An admission that the ledger does not confirm in this time is refused."""
    recovery_ms: int = 9_500
    """A request whose worker died and that could not be placed again in this time fails."""
    attempts_max: int = 3
    """After that many attempts a request fails as ``attempts_exhausted``."""
    moves_max: int = 4
    """Requests that one router moves off draining decode workers at a time; the others go on where
    they are, so each client sees its own move only."""
    body_bytes_max: int = 8 * 2**20
    """A larger HTTP body is answered with 413, a larger WebSocket message with close 1009."""
    choices_max: int = 16
    """A larger ``n`` is answered with 400."""
    stops_max: int = 16
    """More stop strings are answered with 400."""
    stop_chars_max: int = 1_024
    """A longer stop string is answered with 400."""
    logprobs_max: int = 20
    """A larger ``top_logprobs`` is answered with 400."""
    sessions_max: int = 1_024
    """More requests in one gateway are refused as ``overloaded``."""
    connections_max: int = 2_048
    """More client connections are answered with 503 and closed."""
    session_buffer_bytes_max: int = 4 * 2**20
    """A reader that leaves more than this unread is cut off as ``slow_reader``."""
    write_stall_ms: int = 30_000
    """A client that takes nothing for this long is cut off as ``slow_reader``."""
    keepalive_ms: int = 10_000
    """A stream silent for this long gets a comment line (SSE) or a ping (WebSocket)."""

    # resuming
    resume_default_ms: int = 60_000
    """How long a request with an idempotency key waits for its client, unless it says otherwise."""
    resume_max_ms: int = 300_000
    """A longer resume window is answered with 400."""
    resumables_max: int = 512
    """More resumable requests of one gateway, running or within their window, are refused; those
    that come from other gateways to be resumed only beyond twice as many."""
    resume_tokens_max: int = 2_048
    """Output tokens computed while nobody reads; then the request pauses without memory."""
    resume_bytes_max: int = 16 * 2**20
    """A resumable request whose answer could be larger, as a gateway holds it, is refused: 400."""
    resume_record_bytes_max: int = 2 * 2**20
    """A request whose record would be larger is not resumable (400); a larger answer is not kept in
    the ledger but made again when it is resumed."""

    # links between processes
    frame_bytes_max: int = 16 * 2**20
    """A larger frame is counted and dropped by ZeroMQ before it is read."""
    link_unacked_max: int = 4_096
    """A peer that leaves more messages unacknowledged is reported lost."""
    link_hwm: int = 1_000
    """ZeroMQ's own high-water mark per socket; the link resends what did not fit."""
    link_ack_ms: int = 100
    """Longest wait before received messages are acknowledged."""
    link_resend_ms: int = 250
    """First wait before an unacknowledged message is sent again; doubles up to 2 s."""
    handshake_ms: int = 5_000
    """A peer that does not answer the first frame in this time is lost, and dialled anew."""

    # prefill
    prefill_queue_max: int = 64
    """More assignments at one prefill worker are refused as ``queue_full``."""
    prefill_chunk_tokens: int = 256
    """Most prompt tokens in one step; shrunk so that a step stays below a quarter of the lease."""
    prefill_ahead_max: int = 4
    """Prompts given to one prefill worker at a time; the others wait at the router, where a
    cancelled one costs nothing and no blocks are held for them."""
    ticket_wait_ms: int = 5_000
    """An assignment whose ticket does not come in this time is given back as failed."""

    # decode
    batch_sequences_max: int = 32
    """Most sequences in one decode step; others wait at the router until there is a place."""
    reservations_max: int = 64
    """More sequences held by one decode worker are refused as ``queue_full``."""
    growth_tokens: int = 64
    """Tokens beyond the prompt for which blocks must be free when a request is taken in."""
    local_prefill_chunk_tokens: int = 128
    """Most prompt tokens a decode worker computes between two decode steps; in adaptive mode
    ``prefill_chunk_tokens`` if that is more, since there the SLO keeps them short."""
    hit_rest_tokens: int = 32
    """A prompt of which decode has all but so few tokens cached is finished by decode itself: that
    is less than a hand-over."""
    local_rest_tokens: int = 128
    """More than this of what a lost worker had is not computed again on decode: prefill does."""
    takeover_verify_mb: int = 8_192
    """A restarted decode worker verifies this much of its old memory, what was in use first; the
    rest is computed again."""
    takeover_tries_max: int = 2
    """After that many take-overs that were begun and not completed, an arena is made anew."""
    arena_kept_ms: int = 60_000
    """A dead decode worker's memory stays mapped by prefill this long for its successor."""
    reader_probe_ms: int = 50
    """How often the lock of a silent writer is looked at while its blocks are in quarantine."""

    # ledger
    ledger_timeout_ms: int = 1_000
    """A ledger call without an answer in this time has failed."""
    ledger_inflight_max: int = 4_096
    """More unanswered ledger calls fail at once."""
    terminal_ttl_ms: int = 60_000
    """A request's record is kept this long after its end."""
