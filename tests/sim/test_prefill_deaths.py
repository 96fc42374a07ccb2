"""Prefill alone dies, at every stage of a prompt: nobody notices, and no chunk is computed twice.

The checkers are those of every run. Here nobody has an excuse (only prefill is killed, once), and
what decode had verified when it died is where the next attempt begins, with another prefill worker
or with the dead one's successor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from baton.core.outcomes import Ending
from baton.decode.handover import TicketRecord
from baton.ports.engine import Row
from baton.prefill.io import RunChunk
from baton.prefill.job import Job
from sim.cluster import Cluster, Scenario
from sim.process import Process

SEEDS = range(2)
#: Several chunks, each larger than the one before; the last one ends within a block.
PROMPT = 1_000
BLOCK = 16
#: What the second attempt begins with, be it with prefill or, for a small rest, with decode alone.
BEGAN_AGAIN = re.compile(
    r"(?:taken_in|ticket_sent) request_id=r1 epoch=[2-9] .*cached_tokens=(\d+)"
)
#: Requests with short prompts that are under way as well.
OTHERS = 6


@dataclass
class Look:
    """What can be seen of one request between two events."""

    cluster: Cluster
    request_id: str
    stored: int = 0
    """Chunks that prefill has stored."""
    complete: bool = False
    """The last of them is."""
    worker: Process | None = None
    """Who stored them."""

    @property
    def prefills(self) -> list[Process]:
        return [p for p in self.cluster.processes.values() if p.worker_id.startswith("prefill")]

    @property
    def prefill(self) -> Process:
        """The one that has the prompt, or had it; any while nobody has."""
        having = (p for p in self.prefills if self.request_id in p.machine.state.jobs)
        return self.worker or next(having, self.prefills[0])

    @property
    def job(self) -> Job | None:
        return self.prefill.machine.state.jobs.get(self.request_id)

    @property
    def row(self) -> Row | None:
        """What is computed of it now."""
        flying = self.prefill.machine.state.flying
        return next((row.row for row, job in flying if job is self.job), None)

    @property
    def ticket(self) -> TicketRecord | None:
        tickets = self.cluster.processes["decode-0"].machine.handover.tickets
        return tickets.get((self.request_id, 1))

    @property
    def verified(self) -> int:
        """Tokens in blocks that decode has verified and that are full."""
        blocks = self.ticket.verified if self.ticket is not None else set()
        return BLOCK * sum(logical < PROMPT // BLOCK for logical in blocks)

    def count_chunks(self) -> None:
        """Have the stored chunks counted at the very moment, before anybody is told."""
        for process in self.prefills:
            self._count(process)

    def _count(self, process: Process) -> None:
        complete = process.chunks.complete

        def counted(command: RunChunk, live: list[int], *rest: Any) -> Any:
            result = complete(command, live, *rest)
            for row in (command.rows[number].row for number in live):
                if row.request_id == self.request_id:
                    self.stored, self.worker = self.stored + 1, process
                    self.complete = row.sample is not None
            return result

        process.chunks.complete = counted


def queued(look: Look) -> bool:
    """Its router has it, and no prefill yet."""
    return look.request_id in look.cluster.processes["router-0"].machine.state.entries


def assigned(look: Look) -> bool:
    """Prefill has the prompt, or its ticket, and waits for the other."""
    early = any((look.request_id, 1) in each.machine.state.early for each in look.prefills)
    return early or (look.job is not None and look.job.ticket is None)


def ticketed(look: Look) -> bool:
    """Decode has reserved its blocks; the ticket is on its way, or waits behind another chunk."""
    return look.ticket is not None and look.row is None


def first_chunk(look: Look) -> bool:
    """It is computed, and nothing of it is stored."""
    return look.row is not None and not look.stored


def first_stored(look: Look) -> bool:
    """All of it is in decode's memory, and nobody has heard of it."""
    return look.stored == 1 and not (look.job and look.job.computed)


def first_announced(look: Look) -> bool:
    """The announcement is on its way."""
    return bool(look.job and look.job.computed) and not (look.ticket and look.ticket.announced)


def second_chunk(look: Look) -> bool:
    """It is computed, and the first one has verified."""
    return look.row is not None and 0 < look.row.start == look.verified and look.stored == 1


def last_chunk(look: Look) -> bool:
    """It is computed, and all before it has verified."""
    row = look.row
    return row is not None and row.sample is not None and 0 < row.start == look.verified


def last_stored(look: Look) -> bool:
    """All KV is there; neither that nor the first token is told."""
    return look.complete


def committing(look: Look) -> bool:
    """Prefill has said all that it had to say; decode has not heard it."""
    return look.complete and look.job is None and look.ticket is not None


def committed(look: Look) -> bool:
    """Decode has the commit; the last blocks may still be verified."""
    return look.complete and (look.ticket is None or look.ticket.commit is not None)


STAGES = (
    queued,
    assigned,
    ticketed,
    first_chunk,
    first_stored,
    first_announced,
    second_chunk,
    last_chunk,
    last_stored,
    committing,
    committed,
)


def killed_at(stage: Callable[[Look], bool], seed: int, prefills: int) -> tuple[Cluster, int]:
    """Return a finished run in which prefill died at ``stage``, and how many tokens had verified
    by then."""
    cluster = Cluster(seed, Scenario(prefills=prefills, blocks=200, requests=0))
    cluster.start()
    asked = cluster.clients.ask(tokens=PROMPT, max_tokens=30)
    look = Look(cluster, asked.spec.request_id)
    look.count_chunks()
    for _ in range(OTHERS):
        cluster.clock.call_later(cluster.clock.random.uniform(0, 0.3), cluster.clients.ask)
    assert cluster.clock.run_while(lambda: not stage(look), 5.0), "the stage was never reached"
    verified = look.verified
    look.prefill.kill()
    cluster.settle()
    for answer in cluster.clients.answers.values():
        assert answer.outcome is not None
        assert answer.outcome.ending is Ending.COMPLETED, answer.outcome
    return cluster, verified


@pytest.mark.parametrize("prefills", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_nobody_notices_the_death_of_prefill(stage: Callable[[Look], bool], prefills: int) -> None:
    """Every client gets its answer; what had verified is found and not computed again."""
    for seed in SEEDS:
        cluster, verified = killed_at(stage, seed, prefills)
        found = [int(words[1]) for line in cluster.story if (words := BEGAN_AGAIN.search(line))]
        # What prefill had said when it died arrives: a commit that was on its way is enough.
        again = any(re.search(r"placed request_id=r1 epoch=[2-9]", line) for line in cluster.story)
        assert bool(found) == again, f"seed {seed}: {verified} tokens had verified"
        assert all(each >= verified for each in found), f"seed {seed}: {found} of {verified}"
