"""Metrics: the catalogue, bounded labels, and the joined text of several processes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.ids import Role
from baton.runtime.catalogue import CATALOGUE
from baton.runtime.metrics import Metrics, merge


def sample(text: bytes, name: str, **labels: str) -> float | None:
    """Return the one sample of that name whose labels include ``labels``."""
    found = [
        one.value
        for family in text_string_to_metric_families(text.decode())
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    ]
    assert len(found) <= 1, f"{name} {labels} is there {len(found)} times"
    return found[0] if found else None


def test_counts_with_constant_labels() -> None:
    """What is measured is rendered once, labelled by role, worker and model."""
    metrics = Metrics(Role.DECODE, "decode-0", "tiny")
    metrics.measure("preemptions_total")
    metrics.measure("preemptions_total", 2)
    metrics.measure("inter_token_latency_seconds", 0.0035)
    metrics.gauges({"num_requests_running": 3, "blocks:free": 7, "blocks:resident": 1})
    text = metrics.render()
    labels = {"role": "decode", "worker": "decode-0", "model_name": "tiny"}
    assert sample(text, "baton_preemptions_total", **labels) == 3
    assert sample(text, "baton_blocks", state="free", **labels) == 7
    assert sample(text, "baton_num_requests_running", **labels) == 3
    bucket = "baton_inter_token_latency_seconds_bucket"
    assert sample(text, bucket, le="0.003", **labels) == 0
    assert sample(text, bucket, le="0.004", **labels) == 1
    assert sample(text, "baton_integrity_failures_total", **labels) == 0
    cpu = sample(text, "process_cpu_seconds_total", **labels)
    assert cpu is not None
    assert cpu > 0


def test_labels_are_bounded() -> None:
    """Five thousand label values nobody knows make one series, not five thousand."""
    metrics = Metrics(Role.GATEWAY, "gateway-0", "tiny")
    for n in range(50):
        metrics.measure("requests_refused_total", labels={"reason": f"r{n}"})
    before = len(metrics.render().splitlines())
    for n in range(5000):
        metrics.measure("requests_refused_total", labels={"reason": f"q{n}"})
    text = metrics.render()
    assert len(text.splitlines()) == before
    assert sample(text, "baton_requests_refused_total", reason="other") == 5050


def test_unknown_names_are_bugs() -> None:
    """A metric, or a label, that the catalogue does not have is an assertion."""
    metrics = Metrics(Role.ROUTER, "router-0", "tiny")
    with pytest.raises(AssertionError, match="not in the catalogue"):
        metrics.measure("request_total")
    with pytest.raises(AssertionError, match="has labels"):
        metrics.measure("requests_refused_total")
    with pytest.raises(AssertionError, match="has labels"):
        metrics.measure("preemptions_total", labels={"reason": "x"})


def test_merge_is_one_valid_exposition() -> None:
    """The texts of two processes join to one, with one head a family and every sample."""
    texts = []
    for role, worker in ((Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-0")):
        metrics = Metrics(role, worker, 'a "quoted"\\ name')
        metrics.measure("ledger_calls_total", labels={"op": "RenewLease"})
        metrics.measure("engine_step_seconds", 0.01, {"kind": "decode"})
        texts.append(metrics.render())
    joined = merge(texts)
    for worker in ("prefill-0", "decode-0"):
        assert sample(joined, "baton_ledger_calls_total", worker=worker, op="RenewLease") == 1
        assert sample(joined, "baton_engine_step_seconds_count", worker=worker) == 1
        assert sample(joined, "process_open_fds", worker=worker) is not None
    heads = re.findall(rb"^# TYPE (\S+)", joined, re.M)
    assert len(heads) == len(set(heads))
    total = sum(len([x for x in text.splitlines() if not x.startswith(b"#")]) for text in texts)
    assert len([x for x in joined.splitlines() if not x.startswith(b"#")]) == total
    assert merge([]) == b""


def test_names_follow_prometheus_rules() -> None:
    """Counters end in _total, times in _seconds, and nothing is in milliseconds."""
    for metric in CATALOGUE.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not metric.name.removesuffix("_total").endswith(("_ms", "_us", "_mb"))
        assert metric.help.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def measured_names() -> dict[str, str]:
    """Return every literal name that production code measures, and where."""
    root = Path(__file__).resolve().parents[2]
    found = {}
    for path in [*root.glob("services/baton/**/*.py"), *root.glob("shared/baton/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id="Measure") | ast.Attribute(attr="measure" | "_measure"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    found[name] = f"{path.relative_to(root)}:{node.lineno}"
                case _:
                    pass
    return found


def test_everything_measured_is_in_the_catalogue() -> None:
    """A name measured anywhere is in the catalogue, or its first event would end the process."""
    names = measured_names()
    assert len(names) > 10
    assert not {name: where for name, where in names.items() if name not in CATALOGUE}


def test_everything_in_the_catalogue_is_measured() -> None:
    """No name of the catalogue stays at 0 for ever because nothing measures it."""
    root = Path(__file__).resolve().parents[2]
    named = set()
    for path in [*root.glob("services/baton/**/*.py"), *root.glob("shared/baton/**/*.py")]:
        if path.name == "catalogue.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value.partition(":")[0])
    # On one host nothing copies KV, so nobody counts it.
    unmeasured = set(CATALOGUE) - named
    assert unmeasured == set()
