"""`baton explain REQUEST`: one request's time line, from the processes' logs and the ledger.

Decides which log lines belong to a request and how each is told. Logs hold no prompt and no answer,
so neither does this. An event without words of its own is told with its fields, never left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from baton.cli.cluster import Cluster
from baton.cli.leftovers import LOGS
from baton.cli.records import Record, read_record
from baton.cli.reports import LedgerSilent
from baton.cli.terminal import CommandError, ExitCode, counted, say, warn
from baton.runtime.dirs import ledger_url
from baton.runtime.settings import Config

#: Event -> how it is told; ``{field}`` is the line's own, and ``?`` where it has none.
_WORDS: Mapping[str, str] = {
    "request_submitted": "submitted: {prompt_tokens} prompt tokens, at most {max_tokens} out",
    "request_placed": "hears that {decode} (prefill {prefill}) has it",
    "request_fenced": "refuses every epoch below {epoch}; its client may have {ids_held} tokens",
    "placement_refused": "placement refused by {by}: {reason}, {message}",
    "request_ended": "ended: {outcome}, {finish}, reason {reason}, {tokens} tokens",
    "tokens_contradict": "{peer} contradicts at token {index} what was delivered",
    "end_differs": "wanted the end {ours}, the ledger has {ledger}",
    "end_given_up": "could not tell the ledger the end",
    "admitted": "admitted: {prompt_tokens} prompt tokens, waits for a place",
    "chosen": "takes {decode}: {why}",
    "forecast_held_against": "first token after {actual_ms} ms ({way}), {expected_ms} ms were "
    "expected; regret {regret_ms} ms",
    "placed": "placed on {decode}, prefill {prefill}; the attempt is counted",
    "refused": "refused: {reason}, {message}",
    "worker_lost": "lost {by}: {message}",
    "superseded": "leaves it to another router",
    "adopted": "adopts it as router number {turn}: {state}",
    "record_lost": "finds its record lost or behind, and makes it again",
    "blame_taken_back": "is not to blame for the end of {worker}",
    "orphan_ended": "ends it: its gateway and its router are gone",
    "died_in_a_step": "finds that its predecessor ended in a step of this request",
    "given_up": "gives up: {reason}, {message}",
    "already_ended": "finds it ended: {ending}",
    "ended": "is told the end: {ending}",
    "end_never_heard": "was never told the end, and lets it go",
    "taken_in": "takes it in, {way}; {cached_tokens} tokens cached",
    "ticket_sent": "sends {writer} a ticket: {blocks} blocks, {cached_tokens} tokens cached",
    "ticket_revoked": "revokes the ticket of {writer}: {quarantined} blocks in quarantine",
    "quarantine_over": "frees {blocks} blocks from quarantine, on the word of {by}",
    "committed": "has verified all {blocks} blocks, {handover_ms} ms after prefill's last step",
    "preempted": "takes its blocks for an older request ({stage})",
    "cancelled": "cancelled: {reason}",
    "finished": "complete: {finish}, {tokens} tokens; its blocks are free",
    "attempt_failed": "the attempt failed: {reason}, {message}",
    "work_refused": "refuses the work: {reason}, {message}",
    "chunk_stored": "stored {tokens} tokens up to {upto} in {chunk_ms} ms: announces {blocks}",
    "prefilled": "commits: {tokens} tokens in {prefill_ms} ms",
    "ticket_never_came": "gives it back: no ticket came",
}
_COMMON = frozenset({"ts", "level", "event", "worker", "role", "incarnation", "request_id"})


@dataclass(frozen=True, slots=True)
class Line:
    """One event of the request."""

    at: datetime
    worker: str
    event: str
    fields: Mapping[str, Any]

    def words(self) -> str:
        """Return the event as a person would tell it."""
        pattern = _WORDS.get(self.event)
        if pattern is None:
            rest = " ".join(f"{name}={value}" for name, value in self.fields.items())
            return f"{self.event} {rest}".strip()
        return pattern.format_map(_OrUnknown(self.fields))


class _OrUnknown(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


def time_line(folder: Path, request_id: str) -> list[Line]:
    """Return the request's events from every log in ``folder``, oldest first."""
    found: list[Line] = []
    for path in sorted(folder.glob("*.log*")):
        found += _lines(path, request_id)
    # Clocks are one host's; the order of one process's lines is kept.
    return sorted(found, key=lambda line: line.at)


def _lines(path: Path, request_id: str) -> Iterator[Line]:
    needle = request_id.encode()
    with path.open("rb") as log:
        for raw in log:
            if needle not in raw or not raw.startswith(b"{"):
                continue
            try:
                entry = msgspec.json.decode(raw)
                named = str(entry["request_id"])
                at = datetime.fromisoformat(entry["ts"])
            except (msgspec.DecodeError, KeyError, ValueError, TypeError):
                continue  # a line cut by a kill, or another library's
            # Choices of one request are requests of their own: <id>-0, <id>-1.
            if named != request_id and not _is_choice(named, request_id):
                continue
            fields = {name: value for name, value in entry.items() if name not in _COMMON}
            if named != request_id:
                fields["choice"] = named.removeprefix(f"{request_id}-")
            # Enough of the incarnation to see that it is another one.
            run = str(entry.get("incarnation", ""))[-4:]
            worker = f"{entry.get('worker', path.name.partition('.')[0])}/{run}"
            yield Line(at, worker, str(entry.get("event", "?")), fields)


def _is_choice(named: str, request_id: str) -> bool:
    return named.startswith(f"{request_id}-") and named.removeprefix(f"{request_id}-").isdecimal()


def explain(config: Config, request_id: str, *, as_json: bool) -> int:
    """Tell what is known of one request; exit code 1 if nothing is."""
    cluster = Cluster(config, os.environ, warn)
    record = _record(cluster, request_id)
    lines = time_line(cluster.run_dir / LOGS, request_id)
    if not lines and record is None:
        raise CommandError(
            f"neither the logs in {cluster.run_dir / LOGS} nor the ledger know {request_id}: "
            "wanted is the `id` that every part of the answer has (chatcmpl-..., cmpl-..., "
            "resp_...), not its X-Request-Id"
        )
    if as_json:
        say(json.dumps(_plain(request_id, record, lines), indent=2))
    else:
        for text in told(request_id, record, lines):
            say(text)
    return ExitCode.OK


def _record(cluster: Cluster, request_id: str) -> Record | None:
    if cluster.running() is None:
        return None
    settings = cluster.started_with()
    url = ledger_url(settings, cluster.run_dir)
    try:
        return read_record(url, settings.ledger.pool, request_id)
    except LedgerSilent as error:
        warn(f"the ledger does not answer: {error}")
        return None


def told(request_id: str, record: Record | None, lines: Iterable[Line]) -> Iterator[str]:
    """Yield the lines of the answer."""
    yield f"{request_id}: {_summary(record)}"
    began: datetime | None = None
    epoch: object = None
    for line in lines:
        began = began or line.at
        now = line.fields.get("epoch")
        mark = ""
        if now is not None and now != epoch:
            mark, epoch = f"  [epoch {now}]", now
        seconds = (line.at - began).total_seconds()
        choice = f" (choice {line.fields['choice']})" if "choice" in line.fields else ""
        yield f"{seconds:9.3f}  {line.worker:16} {line.words()}{choice}{mark}"


def _summary(record: Record | None) -> str:
    if record is None:
        return "the ledger has no record (any more)"
    owners = ", ".join(f"{role} {peer}" for role, peer in record.owners.items())
    words = f"{record.state}, epoch {record.epoch}, {counted(record.attempts, 'attempt')}; {owners}"
    if record.outcome is not None:
        outcome = record.outcome
        why = outcome.finish or outcome.reason or ""
        words += f"; ended by {record.ended_by}: {outcome.ending} {why}"
        if outcome.message:
            words += f" ({outcome.message})"
    return words


def _plain(request_id: str, record: Record | None, lines: Iterable[Line]) -> dict[str, object]:
    return {
        "request_id": request_id,
        "record": None
        if record is None
        else {
            "state": str(record.state),
            "epoch": record.epoch,
            "attempts": record.attempts,
            "owners": {role: str(peer) for role, peer in record.owners.items()},
            "outcome": msgspec.to_builtins(record.outcome),
            "ended_by": record.ended_by,
        },
        "events": [
            {
                "ts": line.at.isoformat(),
                "worker": line.worker,
                "event": line.event,
                "words": line.words(),
                **line.fields,
            }
            for line in lines
        ],
    }
