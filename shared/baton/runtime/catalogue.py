"""Every metric: its name, meaning, labels and buckets.

Decides names and the values a label may take; anything else is counted as ``other``, so that the
number of series has a bound (no request id, path or model name from a client ever is a label).
``docs/metrics.md`` is rendered from here. Names are written without the prefix ``baton_``; all
metrics have the labels ``role``, ``worker`` and ``model_name``. Base units: seconds, bytes, tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from baton.core.ids import WorkerRole
from baton.core.lifecycles import BlockState, LeaseState
from baton.core.outcomes import Ending, Reason
from baton.ports import ledger

OTHER = "other"

#: 1 to 10 ms in single milliseconds, then up to ten seconds: gaps between tokens.
GAPS = (
    *(n / 1000 for n in range(1, 11)),
    *(0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
    10.0,
)
#: Waiting and computing on the way to the first token.
PHASES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
#: What should stay below a millisecond.
SHORT = (
    *(0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01),
    *(0.02, 0.05, 0.1, 0.25, 1.0),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    labels: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Label -> values it may take; others become ``other``."""
    buckets: tuple[float, ...] = ()


def _values(values: Iterable[str]) -> frozenset[str]:
    return frozenset(values)


REASONS = _values(reason.value for reason in Reason)
ENDINGS = _values(ending.value for ending in Ending)
BLOCK_STATES = _values(state.name.lower() for state in BlockState)
LEASE_STATES = _values(state.value for state in LeaseState)
OPS = _values(cls.__name__ for cls in get_args(ledger.AnyOp))
STEP_KINDS = _values(("prefill", "decode", "mixed", "warm_up"))
LOST = _values(("died", "silent", "unacked", "goodbye", "replaced", "over", "no_answer"))
#: The transport's own words (``on_count``), by their first part.
DROPPED = _values(
    (
        *("frame_early", "frame_identity", "frame_kind", "frame_magic", "frame_no_link"),
        *("frame_oversized", "frame_parts", "frame_stale", "frame_truncated", "frame_version"),
        *("hello_crossed", "hello_incompatible", "hello_malformed", "hello_over"),
        *("message_duplicate", "message_malformed", "refusal_malformed"),
    )
)
LINK_EVENTS = _values(
    (
        *("dial_bad_endpoint", "dial_forgotten", "dial_no_endpoint", "dial_over"),
        *("dial_unanswered", "send_no_link", "send_refused", "watch_impossible"),
        *("endpoint_bound_again", "watchdog_rescued"),
    )
)
STALE = _values(("epoch", "incarnation", "index", "turn", "unknown"))
#: Copied from another decode worker's arena, found in the own one after a restart, its prompt
#: computed again by prefill, or by decode itself.
WAYS = _values(("import", "take_over", "prefill", "local"))
SIDES = _values(("prefill", "decode"))
WORKER_ROLES = _values(role.value for role in WorkerRole)
#: A prefill worker computes the prompt, decode does, or decode goes on from what is there.
PLACED = _values(("remote", "local", "reuse"))
#: What a worker has mapped: the weights, and of decode its own arena.
MAPPED = _values(("weights", "arena"))
RESYNCS = _values(("gap", "too_many"))
ERRORS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 2.0, 5.0)
PATHS = _values(
    (
        *("chat_completions", "completions", "responses", "models", "health", "live", "metrics"),
        *("playground", "tokenize", "detokenize", "version", "websocket", "requests"),
    )
)
RESUMES = _values(
    (
        *("opened", "here", "moved", "kept", "again"),
        *("unknown", "foreign", "over", "abandoned"),
    )
)
STATUSES = _values(("1xx", "2xx", "3xx", "4xx", "5xx"))


def _counter(name: str, text: str, **labels: frozenset[str]) -> Metric:
    return Metric(name, "counter", text, labels)


def _gauge(name: str, text: str, **labels: frozenset[str]) -> Metric:
    return Metric(name, "gauge", text, labels)


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], **labels: frozenset[str]
) -> Metric:
    return Metric(name, "histogram", text, labels, buckets)


_ALL = (
    # requests
    _counter(
        "requests_total",
        "Requests that ended, by outcome and reason (empty for completed ones).",
        outcome=ENDINGS,
        reason=REASONS | {""},
    ),
    _counter("requests_refused_total", "Requests refused before any work.", reason=REASONS),
    _counter("requests_admitted_total", "Requests taken in by a router."),
    _counter("requests_adopted_total", "Requests taken over from another router."),
    _counter("orphans_ended_total", "Requests ended because nobody saw to them any more."),
    _counter("unknown_ended_total", "Records ended because their gateway did not know them."),
    _counter("attempts_total", "Placements, the first of each request included."),
    _counter("ways_total", "Placements by who computes the prompt.", way=PLACED),
    _histogram(
        "ttft_forecast_error_ratio",
        "How far the first token's time was from its forecast, as a share of it (adaptive mode).",
        ERRORS,
        way=PLACED,
    ),
    _histogram(
        "ttft_regret_seconds",
        "How much later the first token came than it was expected on another way.",
        PHASES,
        way=PLACED,
    ),
    _counter(
        "role_changes_asked_total",
        "Workers that a router asked to change their role (`[roles] auto`).",
        wanted=WORKER_ROLES,
    ),
    _gauge(
        "strain",
        "How far a side is from what it can do: 1 breaks the SLO (`[roles] auto`).",
        side=SIDES,
    ),
    _counter("attempts_failed_total", "Placements that gave no result.", reason=REASONS),
    _counter("preemptions_total", "Sequences put back to free blocks for others."),
    _counter("prompt_tokens_total", "Prompt tokens of requests taken in."),
    _counter("generation_tokens_total", "Output tokens computed, each counted by decode."),
    _gauge("num_requests_running", "Requests somebody computes for now."),
    _gauge("num_requests_waiting", "Requests waiting for a place."),
    _gauge("queue_tokens", "Prompt tokens waiting for a place."),
    # phases of a request
    _histogram("request_queue_seconds", "From admission to the first placement.", PHASES),
    _histogram("request_prefill_seconds", "From assignment to the commit.", PHASES),
    _histogram("request_decode_seconds", "From decode's admission to its last token.", PHASES),
    _histogram("request_seconds", "From submission to the terminal outcome.", PHASES),
    _histogram("first_decode_seconds", "From decode's admission to its first token.", GAPS),
    _histogram(
        "time_to_first_token_seconds", "From the request's arrival to its first token.", PHASES
    ),
    _histogram("inter_token_latency_seconds", "Gap between consecutive tokens.", GAPS),
    _histogram(
        "time_per_output_token_seconds", "Mean time per output token after the first.", GAPS
    ),
    # hand-over
    _histogram("handover_seconds", "From prefill's last step to decode's admission.", SHORT),
    _histogram(
        "handover_verified_seconds",
        "From prefill's last store until it is verified.",
        SHORT,
    ),
    _counter("handover_bytes_total", "KV bytes that prefill wrote into decode's arena."),
    _counter("handovers_total", "Hand-overs that decode admitted."),
    _histogram("checksum_seconds", "Making the checksums of one prompt chunk.", SHORT),
    _histogram("verify_seconds", "Checking the checksums of one announcement.", SHORT),
    _counter(
        "integrity_failures_total",
        "Blocks refused: handed over, or found in the own arena after a restart, their bytes did "
        "not match their checksum, or what prefill said of them did not fit their ticket.",
    ),
    _counter("stale_messages_total", "Messages refused by epoch, owner or index.", kind=STALE),
    # requests that went on after decode was lost or left
    _counter("recoveries_total", "Requests that decode took on after another attempt.", way=WAYS),
    _counter("recovered_tokens_total", "Tokens of theirs whose KV was found.", way=WAYS),
    _counter("recomputed_tokens_total", "Tokens of theirs that were computed again.", way=WAYS),
    _histogram("import_seconds", "Copying and verifying one request's blocks.", PHASES),
    _counter("imported_bytes_total", "KV bytes copied from other decode workers' arenas."),
    _counter("moves_total", "Requests that a router took off draining decode workers."),
    # blocks
    _gauge("blocks", "Blocks of the arena by state.", state=BLOCK_STATES),
    _gauge("kv_cache_usage_perc", "Blocks a reservation could not get, of all: 0 to 1."),
    _gauge("arena_bytes", "Size of all blocks of the arena."),
    _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    _gauge("prefix_index_blocks", "Blocks in prefix caches that a router knows of."),
    _counter(
        "prefix_resyncs_total",
        "Times a router asked a decode worker for all its blocks: changes missed, or too many.",
        reason=RESYNCS,
    ),
    _counter("prefix_expected_tokens_total", "Tokens a router expected to be cached."),
    _counter("prefix_found_tokens_total", "Tokens decode then found cached."),
    _counter("prefix_misjudged_tokens_total", "Differences between the two, either way."),
    # engine
    _histogram("engine_step_seconds", "One engine step.", GAPS, kind=STEP_KINDS),
    _counter(
        "engine_borrowed_seconds_total",
        "Time of engine steps with the cores of other workers, which these did not need.",
        kind=STEP_KINDS,
    ),
    _histogram("engine_step_tokens", "Tokens computed in one step.", TOKENS, kind=STEP_KINDS),
    _histogram("engine_step_rows", "Sequences in one step.", TOKENS[:9], kind=STEP_KINDS),
    _gauge("engine_threads", "Compute threads of this process."),
    _gauge("cores", "Cores this process may run on."),
    _gauge(
        "huge_pages_ratio",
        "Share of a worker's weights or arena that lay in huge pages at its start: 0 to 1.",
        memory=MAPPED,
    ),
    # ledger and links
    _counter("ledger_calls_total", "Ledger transitions asked for.", op=OPS),
    _histogram("ledger_call_seconds", "From asking for a transition to its answer.", SHORT),
    _counter("ledger_unavailable_total", "Transitions the ledger did not answer.", op=OPS),
    _counter("ledger_conflicts_total", "Transitions refused by epoch or state.", op=OPS),
    _gauge("lease_state", "1 for the state this process's lease is in.", state=LEASE_STATES),
    _counter("leases_lost_total", "Leases of this process that ended unasked."),
    _counter("frames_dropped_total", "Frames that were not handled.", reason=DROPPED),
    _counter("link_events_total", "Dials and sends that did not go through.", kind=LINK_EVENTS),
    _counter("link_sent_bytes_total", "Bytes put on links; KV never travels there."),
    _counter("peers_lost_total", "Links that ended.", reason=LOST),
    _counter("peers_refused_total", "Processes refused because the pair does not fit."),
    _gauge("peers", "Open links."),
    # gateway
    _counter("http_requests_total", "HTTP requests answered.", path=PATHS, status=STATUSES),
    _gauge("client_connections", "Open client connections."),
    _gauge("client_streams", "Streams being sent to clients."),
    _gauge("session_buffer_bytes", "Bytes that slow clients have not taken yet."),
    _gauge("resumables", "Resumable requests, running or within their window."),
    _counter(
        "resumes_total",
        "Resumable requests by what became of them: opened; claimed here, moved from another "
        "gateway, kept by the ledger or made again; unknown, foreign or over; abandoned.",
        outcome=RESUMES,
    ),
    _counter("tokens_sent_total", "Output tokens sent to clients."),
    _counter("token_gaps_total", "Times a gap in a token stream was asked for again."),
)

CATALOGUE: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}
assert len(CATALOGUE) == len(_ALL), "two metrics with one name"
