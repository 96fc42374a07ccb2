"""What the server under load says of itself: its model, and Baton's metrics of the window.

Decides how Baton is recognised (``/version``) and which of its metrics become figures. Another
server has a name and a model; what else it would have to say, the user says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from baton.bench.load.http import Client
from baton.bench.load.results import ServerFigures


class ServerError(RuntimeError):
    """The server does not answer, or not as an OpenAI-compatible one."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Who answers at the address."""

    kind: str
    """``baton`` or ``other``."""
    version: str
    model: str
    context_max: int | None
    metrics: bool
    """Whether the window's metrics can be read as Baton's."""


async def identify(client: Client, url: str, model: str = "") -> ServerInfo:
    """Ask the server who it is.

    Raises:
        ServerError: it does not answer, or does not serve ``model``.
    """
    try:
        status, body = await client.get("/v1/models")
    except OSError as error:
        raise ServerError(f"{url}: {error}") from error
    found = _json(body) if status == 200 else None
    listed = found.get("data") if isinstance(found, dict) else None
    if not listed:
        raise ServerError(f"{url}/v1/models: HTTP {status}, no list of models")
    names = {str(each["id"]): each for each in listed}
    if model and model not in names:
        raise ServerError(f"{url} serves {', '.join(names)}, not {model}")
    chosen = names[model or next(iter(names))]
    version = await _version(client)
    is_baton = version.get("name") == "baton"
    return ServerInfo(
        kind="baton" if is_baton else "other",
        version=str(version.get("version", "not told")),
        model=str(chosen["id"]),
        context_max=chosen.get("max_model_len"),
        metrics=is_baton,
    )


async def _version(client: Client) -> dict[str, Any]:
    try:
        status, body = await client.get("/version")
    except OSError:
        return {}
    found = _json(body) if status == 200 else None
    return found if isinstance(found, dict) else {}


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


class Metrics:
    """One scrape of Baton's metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def began(self) -> dict[str, float]:
        """Return who answered the scrape, and since when (Unix time) that process runs."""
        return self.by("process_start_time_seconds", "worker")

    def roles(self) -> dict[str, str]:
        """Return what each of them does, which its name does not say: roles change."""
        return {
            sample.labels["worker"]: sample.labels["role"]
            for sample in self._samples
            if sample.name == "process_start_time_seconds"
        }

    def of(self, workers: set[str]) -> Metrics:
        """Return the samples of these workers, and those of no worker."""
        kept = Metrics("")
        kept._samples = [s for s in self._samples if s.labels.get("worker", "") in {"", *workers}]
        return kept

    def total(self, name: str) -> float:
        """Return a sample's sum over all its labels."""
        return sum(sample.value for sample in self._samples if sample.name == name)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return a sample's sums by one label."""
        found: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == name and (value := sample.labels.get(label)):
                found[value] = found.get(value, 0.0) + sample.value
        return found


def workers_in(text: str) -> int:
    """Return how many workers answered a scrape, without parsing it."""
    return text.count("\nprocess_cpu_seconds_total{")


def server_figures(before: Metrics, after: Metrics, seconds: float) -> ServerFigures:
    """Return what happened between two scrapes that lie ``seconds`` apart.

    A worker that did not answer one of them, or started in between, is left out: one that died or
    changed its role counts from nothing again under the same name.
    """
    earlier = before.began()
    common = {worker for worker, began in after.began().items() if earlier.get(worker) == began}
    before, after = before.of(common), after.of(common)

    def grown(name: str) -> float:
        return after.total(name) - before.total(name)

    def mean_ms(name: str) -> float:
        return round(grown(f"{name}_sum") / max(1.0, grown(f"{name}_count")) * 1e3, 3)

    ttft = grown("baton_time_to_first_token_seconds_sum")
    queries = grown("baton_prefix_cache_queries_total")
    refusals = _grown_by(before, after, "baton_requests_refused_total", "reason")
    cpu = _grown_by(before, after, "process_cpu_seconds_total", "worker")
    return ServerFigures(
        handovers=int(grown("baton_handovers_total")),
        handover_bytes=int(grown("baton_handover_bytes_total")),
        handover_ms=mean_ms("baton_handover_seconds"),
        handover_share_of_ttft=round(grown("baton_handover_seconds_sum") / ttft, 5)
        if ttft > 0
        else 0.0,
        prefix_hit_share=round(grown("baton_prefix_cache_hits_total") / queries, 4)
        if queries > 0
        else 0.0,
        queue_ms=mean_ms("baton_request_queue_seconds"),
        queue_p99_ms=_quantile_ms(before, after, "baton_request_queue_seconds_bucket", 0.99),
        refusals={reason: int(value) for reason, value in refusals.items() if value > 0},
        preemptions=int(grown("baton_preemptions_total")),
        cpu_cores={worker: round(value / max(seconds, 1e-9), 4) for worker, value in cpu.items()},
        forecast_errors={
            f"{edge:g}": int(count)
            for edge, count in _buckets(before, after, "baton_ttft_forecast_error_ratio_bucket")
            if count
        },
    )


def kinds(before: Metrics, after: Metrics, began_at: float, ended_at: float) -> dict[str, float]:
    """Return how many workers of each role there were, on average, between two scrapes.

    Times are Unix times. Who has another role at the end has it since its process began; until
    then, while it left its role and came back, it is counted as what it was. Of a worker that
    answered one scrape only the other role is not known: it counts as the one that is. Nor is a
    role known that began and ended in between.
    """
    first, last, since = before.roles(), after.roles(), after.began()
    found: dict[str, float] = {}
    for worker in first | last:
        was = first.get(worker) or last[worker]
        now = last.get(worker) or was
        share = 0.0
        if was != now:
            share = (ended_at - since[worker]) / max(ended_at - began_at, 1e-9)
            share = min(max(share, 0.0), 1.0)
        for role, part in ((was, 1.0 - share), (now, share)):
            found[role] = found.get(role, 0.0) + part
    return found


def _grown_by(before: Metrics, after: Metrics, name: str, label: str) -> dict[str, float]:
    earlier = before.by(name, label)
    return {key: value - earlier.get(key, 0.0) for key, value in after.by(name, label).items()}


def _buckets(before: Metrics, after: Metrics, name: str) -> list[tuple[float, float]]:
    """Return upper edges, and how many lie between them and the edges before."""
    whole = _grown_by(before, after, name, "le")
    cumulative = sorted((float(edge), value) for edge, value in whole.items())
    below = [0.0, *(value for _, value in cumulative)]
    return [(edge, value - under) for (edge, value), under in zip(cumulative, below, strict=False)]


def _quantile_ms(before: Metrics, after: Metrics, name: str, share: float) -> float:
    """Return the upper edge of the bucket that holds the quantile; -1: beyond the last edge."""
    buckets = _buckets(before, after, name)
    whole, below = sum(count for _, count in buckets), 0.0
    for edge, count in buckets:
        below += count
        if whole > 0 and below >= share * whole:
            return -1.0 if edge == float("inf") else round(edge * 1e3, 3)
    return 0.0
