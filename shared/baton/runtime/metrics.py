"""Counts, and renders what was counted as Prometheus text.

Decides that a name outside the catalogue is a bug and that a label's value outside its set is
``other``. One :class:`Metrics` a process; the gateway joins the texts of all processes with
:func:`merge`, so that one scrape covers the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from baton.core.ids import Role
from baton.runtime.catalogue import CATALOGUE, OTHER, Metric

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics of one process."""

    def __init__(self, role: Role, worker_id: str, model_name: str) -> None:
        self._constant = {"role": role.value, "worker": worker_id, "model_name": model_name}
        self._registry = CollectorRegistry()
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Callable[[float], object]] = {}
        for metric in CATALOGUE.values():
            self._families[metric.name] = self._family(metric)
            if not metric.labels:
                # Present from the start: a series that appears with its first event hides it.
                self._child(metric, ())
        self._registry.register(_ProcessFacts(self._constant))

    def measure(
        self, name: str, value: float = 1.0, labels: Mapping[str, str] | None = None
    ) -> None:
        """Add to the counter, observe into the histogram, or set the gauge called ``name``."""
        metric = CATALOGUE.get(name)
        assert metric is not None, f"metric {name!r} is not in the catalogue"
        given = labels or {}
        assert given.keys() == metric.labels.keys(), (
            f"metric {name!r} has labels {sorted(metric.labels)}, not {sorted(given)}"
        )
        values = tuple(
            given[label] if given[label] in known else OTHER
            for label, known in metric.labels.items()
        )
        apply = self._children.get((name, values)) or self._child(metric, values)
        apply(value)

    def gauges(self, values: Mapping[str, float]) -> None:
        """Set gauges; ``name:value`` is that of a gauge with one label, such as ``blocks:free``."""
        for key, number in values.items():
            name, _, value = key.partition(":")
            labels = dict.fromkeys(CATALOGUE[name].labels, value) if value else None
            self.measure(name, number, labels)

    def render(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self._registry)

    def _family(self, metric: Metric) -> Counter | Gauge | Histogram:
        labels = (*self._constant, *metric.labels)
        name = f"baton_{metric.name}"
        if metric.kind == "counter":
            return Counter(name, metric.help, labels, registry=self._registry)
        if metric.kind == "gauge":
            return Gauge(name, metric.help, labels, registry=self._registry)
        return Histogram(name, metric.help, labels, registry=self._registry, buckets=metric.buckets)

    def _child(self, metric: Metric, values: tuple[str, ...]) -> Callable[[float], object]:
        child = self._families[metric.name].labels(*self._constant.values(), *values)
        apply: Callable[[float], object]
        if isinstance(child, Counter):
            apply = child.inc
        elif isinstance(child, Gauge):
            apply = child.set
        else:
            apply = child.observe
        self._children[metric.name, values] = apply
        return apply


class _ProcessFacts(Collector):
    """The standard ``process_*`` metrics, told apart by worker."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._source = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Family]:
        for family in self._source.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in family.samples
            ]
            yield family


def merge(texts: Sequence[bytes]) -> bytes:
    """Return one valid exposition of several processes' texts: HELP and TYPE once a family."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                _, word, family, *_ = line.split(" ", 3)
                lines = heads.setdefault(family, [])
                if word in ("HELP", "TYPE") and not any(
                    known.startswith(f"# {word} ") for known in lines
                ):
                    lines.append(line)
            elif line:
                samples.setdefault(family, []).append(line)
    parts = [line for family, head in heads.items() for line in head + samples.get(family, [])]
    return ("\n".join(parts) + "\n").encode() if parts else b""
