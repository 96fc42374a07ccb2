"""Simulated clients: what they ask, what they got, and whether it is the right answer.

The reference of every answer comes from the fake engine run alone, in one piece. A request that
completed must equal it id for id; one that did not must have a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from baton.core.ids import Peer
from baton.core.outcomes import Ending, Outcome, Reason
from baton.core.sampling import SamplingParams
from baton.core.stopping import finish_of
from baton.engine.fake import EOS_ID, FakeEngine, chain
from baton.gateway.vocabulary import (
    ClientGone,
    Deliver,
    NotResumed,
    Ready,
    ReportsReady,
    Submitted,
    Told,
)
from baton.ports.engine import Row, SampleSpec
from baton.wire.messages import RequestSpec
from sim.comebacks import Comebacks
from support.sampling import EVERY_RULE

if TYPE_CHECKING:
    from sim.cluster import Cluster
    from sim.process import Process


@dataclass(slots=True)
class Answer:
    """One request as its client sees it."""

    spec: RequestSpec
    ids: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    cancelled: bool = False
    gateway_died: bool = False
    submitted_at: float = 0.0
    ended_at: float = 0.0
    last_at: float = 0.0
    """When the last ids came."""
    longest_gap_s: float = 0.0
    """Between two deliveries."""
    resumable: bool = False
    known: bool = False
    """Its client has the resume token."""
    reader: Peer | None = None
    """The gateway that its client reads from, or asks."""
    claim: str = ""
    """What it has asked for and not got yet."""
    claims: int = 0
    told: int = 0
    """Ids told on this connection."""
    lost_at: float | None = None
    longest_away_s: float = 0.0
    abandoned: bool = False
    """Its client will not come back."""


class SoloEngine(FakeEngine):
    """One request alone, in one piece: its KV is nobody else's business and needs no memory."""

    digest = 0

    def _compute(self, row: Row) -> int:
        before = self.digest if row.start else 0
        self.digest = chain(before, [int(token) for token in row.token_ids])[-1]
        return self.digest


class Clients:
    """Everybody who asks this cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.answers: dict[str, Answer] = {}
        self.number = 0
        self._references: dict[str, list[int]] = {}
        self.comebacks = Comebacks(self)

    # --- asking -------------------------------------------------------------------------------

    def ask(
        self,
        *,
        tokens: int | None = None,
        max_tokens: int | None = None,
        resumable: bool = False,
        gateway: Process | None = None,
    ) -> Answer:
        """Send one request with a prompt that sometimes shares its beginning with others."""
        random = self.cluster.clock.random
        length = tokens if tokens is not None else random.choice((1, 5, 16, 17, 40, 64, 100, 180))
        family = random.randrange(4)
        shared = [97 + (family * 7 + i * 3) % 26 for i in range(length)]
        own = random.randrange(1, 6)
        prompt = shared[: max(1, length - own)] + [random.randrange(97, 123) for _ in range(own)]
        prompt = prompt[:length]
        self.number += 1
        greedy = random.random() < 0.5
        gateway = gateway or self.cluster.gateways()[0]
        spec = RequestSpec(
            request_id=f"r{self.number}",
            gateway=gateway.me,
            prompt=np.array(prompt, dtype="<u4").tobytes(),
            sampling=self._sampling(random.randrange(2**31), greedy=greedy),
            max_tokens=max_tokens or random.choice(self.cluster.scenario.max_tokens),
            deadline_ms=120_000,
        )
        answer = Answer(spec, submitted_at=self.cluster.clock.now())
        self.answers[spec.request_id] = answer
        answer.reader = gateway.me
        if resumable:
            self.comebacks.ask(answer, gateway)
        else:
            gateway.feed(Submitted(spec))
        return answer

    def _sampling(self, seed: int, *, greedy: bool) -> SamplingParams:
        """Return plain parameters, or all at once that a request may ask for."""
        share, random = self.cluster.scenario.every_rule, self.cluster.clock.random
        if not greedy and share and random.random() < share:
            choice = random.randrange(3)
            # A rare letter ends it, so that there are longer ones.
            own = {"seed": seed, "choice": choice, "stop_token_ids": (113, EOS_ID)}
            return msgspec.structs.replace(EVERY_RULE, **own)
        return SamplingParams(
            seed=seed,
            temperature=0.0 if greedy else 1.0,
            repetition_penalty=1.0 if greedy else 1.3,
            stop_token_ids=(EOS_ID,),
        )

    def cancel(self, answer: Answer) -> None:
        """Hang up."""
        if answer.resumable:
            self.comebacks.cancel(answer)
        elif answer.outcome is None and not answer.gateway_died:
            answer.cancelled = True
            gateway = self.cluster.processes[answer.reader.worker_id]
            gone = ClientGone(answer.spec.request_id, Reason.CLIENT_DISCONNECTED)
            gateway.later(0.0, lambda: gateway.feed(gone))

    def gateway_dies(self, gateway: Process) -> None:
        """Every open connection to it breaks."""
        for answer in self.connected(gateway):
            if not answer.resumable:
                answer.gateway_died = True
        self.comebacks.gateway_died(gateway.me)

    def connected(self, gateway: Process) -> list[Answer]:
        """Return those who wait for something on a connection to it."""
        return [
            answer
            for answer in self.answers.values()
            if answer.outcome is None and not answer.gateway_died and answer.reader == gateway.me
        ]

    # --- hearing ------------------------------------------------------------------------------

    def on_command(self, gateway: Process, command: Told) -> None:
        """What the HTTP layer would do."""
        match command:
            case ReportsReady():
                return
            case Ready():
                self.comebacks.on_ready(gateway, command)
                return
            case NotResumed():
                self.comebacks.on_refusal(gateway, command)
                return
        answer = self.answers[command.request_id]
        if answer.resumable:
            if not self.comebacks.hears(gateway, answer):
                return
            if isinstance(command, Deliver):
                self.comebacks.deliver(answer, command)
            else:
                self.comebacks.end(answer, command)
            return
        assert answer.outcome is None, f"{command.request_id}: something after its end"
        if isinstance(command, Deliver):
            assert command.index == len(answer.ids), f"{command.request_id}: gap or duplicate"
            now = self.cluster.clock.now()
            if answer.ids:
                answer.longest_gap_s = max(answer.longest_gap_s, now - answer.last_at)
            answer.last_at = now
            answer.ids.extend(command.ids)
        else:
            answer.outcome = command.outcome
            answer.ended_at = self.cluster.clock.now()

    # --- judging ------------------------------------------------------------------------------

    def open(self) -> list[Answer]:
        """Requests whose client still waits."""
        return [
            answer
            for answer in self.answers.values()
            if answer.outcome is None and not answer.gateway_died and not answer.abandoned
        ]

    def judge(self) -> None:
        """Assert that nobody got a wrong token, and that every end has its reason."""
        for answer in self.answers.values():
            wanted = self.reference(answer.spec)
            got = answer.ids
            name = answer.spec.request_id
            assert got == wanted[: len(got)], f"{name}: wrong tokens {got} instead of {wanted}"
            if answer.gateway_died or answer.abandoned:
                continue
            assert answer.outcome is not None, f"{name}: silence"
            if answer.outcome.ending is Ending.COMPLETED:
                assert got == wanted, f"{name}: completed with {len(got)} of {len(wanted)} tokens"
            else:
                assert answer.outcome.reason is not None, f"{name}: ended without a reason"
            if answer.resumable:
                self.comebacks.judge(answer)

    def reference(self, spec: RequestSpec) -> list[int]:
        """Return the ids of an undisturbed run in one process."""
        known = self._references.get(spec.request_id)
        if known is None:
            known = self._references[spec.request_id] = self._solo(spec)
        return known

    def _solo(self, spec: RequestSpec) -> list[int]:
        engine = SoloEngine(self.cluster.info, self.cluster.layout)
        prompt = np.frombuffer(spec.prompt, dtype="<u4").astype(np.int32)
        table = np.empty(0, dtype=np.int32)
        output: list[int] = []
        fresh, start = prompt, 0
        while True:
            sample = SampleSpec(spec.sampling, len(output), prompt, output)
            (sampled,) = engine.step([Row(spec.request_id, fresh, start, table, "solo", sample)])
            assert sampled is not None
            finish = finish_of(spec.sampling, spec.max_tokens, len(output), sampled.token_id)
            output.append(sampled.token_id)
            if finish is not None:
                return output
            start += len(fresh)
            fresh = np.array([sampled.token_id], dtype=np.int32)
