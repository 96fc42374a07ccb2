"""Clients that asked to be resumable: they come back, to any gateway, until they have it all.

What the HTTP layer does between the machine and a client is done here with ids instead of text: a
client that comes back has some ids, is told all from the first on, and must be told the same ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.core.ids import Peer, Role
from baton.core.outcomes import Ending, Outcome, Reason
from baton.gateway.vocabulary import (
    CancelWanted,
    Deliver,
    End,
    NotResumed,
    ReaderBack,
    ReaderGone,
    Ready,
    ResumableWanted,
    ResumeWanted,
    Submitted,
    Unresumable,
)
from baton.wire.messages import RequestSpec

if TYPE_CHECKING:
    from sim.clients import Answer, Clients
    from sim.process import Process

WINDOW_S = 20.0
#: A claim that is not answered for this long is given up, and another gateway asked.
PATIENCE_S = 4.0

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(RequestSpec)


class Comebacks:
    """All resumable requests of the simulated clients."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.cluster = clients.cluster

    # --- asking -------------------------------------------------------------------------------

    def ask(self, answer: Answer, gateway: Process) -> None:
        """Open a resumable request."""
        request_id = answer.spec.request_id
        answer.resumable = True
        answer.claim, answer.reader = request_id, gateway.me
        event = ResumableWanted(
            resumable_id=request_id,
            token=f"token of {request_id}",
            owner="",
            choices=(request_id,),
            recipe=_encode(answer.spec),
            window_ms=int(WINDOW_S * 1000),
        )
        self._say(gateway, event)

    def cancel(self, answer: Answer) -> None:
        """Say that nobody wants it."""
        gateway = self._process(answer.reader)
        if gateway is not None and answer.known:
            answer.cancelled = True
            self._say(gateway, CancelWanted(answer.spec.request_id))

    def lose(self, answer: Answer, *, noticed: bool) -> None:
        """Its network breaks; its gateway notices that, or goes on talking to nobody."""
        if answer.outcome is not None or answer.reader is None or not answer.known:
            return
        gateway = self._process(answer.reader)
        if noticed and gateway is not None:
            self._say(gateway, ReaderGone(answer.spec.request_id))
        self._lost(answer)

    def gateway_died(self, gateway: Peer) -> None:
        """Every connection to it breaks."""
        for answer in self.clients.answers.values():
            if not answer.resumable or answer.outcome is not None or answer.reader != gateway:
                continue
            if answer.known:
                self._lost(answer)
            else:
                answer.gateway_died = True  # its client never heard of a token

    def _lost(self, answer: Answer) -> None:
        random, clock = self.cluster.clock.random, self.cluster.clock
        answer.reader, answer.claim = None, ""
        if answer.lost_at is None:
            answer.lost_at = clock.now()
        if not answer.abandoned:
            clock.call_later(random.choice((0.01, 0.3, 2.0)), lambda: self.come_back(answer))

    def come_back(self, answer: Answer) -> None:
        """Show the token to any gateway."""
        random, clock = self.cluster.clock.random, self.cluster.clock
        if answer.outcome is not None or answer.reader is not None or answer.claim:
            return
        there = [p for p in self.cluster.gateways() if p.takes_clients]
        if not there:
            clock.call_later(0.5, lambda: self.come_back(answer))
            return
        gateway = random.choice(there)
        request_id = answer.spec.request_id
        answer.claims += 1
        claim = answer.claim = f"{request_id} claim {answer.claims}"
        answer.reader = gateway.me
        self._say(gateway, ResumeWanted(claim, request_id, f"token of {request_id}", ""))
        clock.call_later(PATIENCE_S, lambda: self._impatient(answer, claim))

    def _impatient(self, answer: Answer, claim: str) -> None:
        if answer.claim == claim:
            self._lost(answer)

    # --- hearing ------------------------------------------------------------------------------

    def on_ready(self, gateway: Process, ready: Ready) -> None:
        """A request is this gateway's; somebody reads it, or nobody any more."""
        answer = self.clients.answers[ready.resumable_id]
        if answer.claim != ready.claim:
            gateway.feed(ReaderGone(ready.resumable_id))
            return
        answer.claim, answer.known, answer.told = "", True, 0
        if answer.lost_at is not None:
            away = self.cluster.clock.now() - answer.lost_at
            answer.longest_away_s = max(answer.longest_away_s, away)
            answer.lost_at = None
        if ready.submit:
            spec = _decoder.decode(ready.recipe)
            spec = msgspec.structs.replace(spec, gateway=gateway.me, resume_ms=ready.window_ms)
            gateway.feed(Submitted(spec, ready.resumable_id))
        else:
            name = ready.resumable_id
            gateway.feed(ReaderBack(name, (name,)))

    def on_refusal(self, gateway: Process, refused: NotResumed) -> None:
        """There is nothing to resume, or not now."""
        for answer in self.clients.answers.values():
            if answer.resumable and answer.claim == refused.claim:
                break
        else:
            return
        if refused.why is Unresumable.REFUSED and answer.known:
            self._lost(answer)
            return
        answer.claim = ""
        reason = refused.reason or Reason.GATEWAY_LOST
        ending = Ending.REFUSED if refused.why is Unresumable.REFUSED else Ending.CANCELLED
        self._end(answer, Outcome(ending, reason=reason, message=refused.why.value))

    def hears(self, gateway: Process, answer: Answer) -> bool:
        """Whether its client reads from ``gateway``."""
        return answer.reader == gateway.me and not answer.claim

    def deliver(self, answer: Answer, command: Deliver) -> None:
        """All from the first id on, and what the client has must be told the same."""
        name = answer.spec.request_id
        assert command.index == answer.told, f"{name}: gap or duplicate after coming back"
        answer.told += len(command.ids)
        had = len(answer.ids) - command.index
        known = answer.ids[command.index : command.index + len(command.ids)]
        assert list(command.ids[: len(known)]) == known, f"{name}: another answer after coming back"
        answer.ids.extend(command.ids[max(0, had) :])

    def end(self, answer: Answer, command: End) -> None:
        """An end may be this reader's alone: then it comes back."""
        outcome = command.outcome
        elsewhere = outcome.ending is Ending.CANCELLED and outcome.reason is Reason.SUPERSEDED
        refused = outcome.ending is Ending.REFUSED and outcome.reason is not Reason.TOO_LONG
        not_now = refused and answer.claims > 0
        draining = outcome.reason is Reason.DRAINING and outcome.ending is Ending.REFUSED
        if elsewhere or not_now or draining:
            self._lost(answer)
        else:
            self._end(answer, outcome)

    def _end(self, answer: Answer, outcome: Outcome) -> None:
        now = self.cluster.clock.now()
        if answer.lost_at is not None:
            answer.longest_away_s = max(answer.longest_away_s, now - answer.lost_at)
        answer.outcome, answer.ended_at = outcome, now

    # --- judging ------------------------------------------------------------------------------

    def judge(self, answer: Answer) -> None:
        """Assert that nobody was forgotten who came back in time."""
        outcome = answer.outcome
        assert outcome is not None
        gone = outcome.ending is Ending.CANCELLED and not answer.cancelled
        if gone and not self.cluster.wiped:
            late = answer.longest_away_s > 0.9 * WINDOW_S
            assert late, f"{answer.spec.request_id}: given up after {answer.longest_away_s} s"

    def _say(self, gateway: Process, event: object) -> None:
        gateway.later(0.0, lambda: gateway.feed(event))

    def _process(self, peer: Peer | None) -> Process | None:
        if peer is None:
            return None
        process = self.cluster.processes[peer.worker_id]
        assert process.role is Role.GATEWAY
        return process if process.alive and process.me == peer else None
