"""One session: what the gateway knows of one request while it lives.

Decides which token runs count (ADR 0008): only those of the current attempt's epoch and
incarnations, only the next index; what is repeated must repeat. It sends nothing and ends nothing:
the machine does, from the :class:`Verdict`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from baton.core.ids import Peer, Role
from baton.core.outcomes import FinishReason
from baton.wire.fields import TokenLogprob
from baton.wire.messages import RequestSpec, SubmitRequest, TokenRun

#: Runs above the next index kept while the gap is asked for again. The link is ordered, so a gap
#: appears only when a message died with its sender; more than this is asked for again instead.
HELD_RUNS_MAX = 64
#: Claims of one resumable are counted in the upper bits of a request's turn, routers in the lower.
TURN_BITS = 16


class Phase(Enum):
    """Where a session stands. It leaves the machine when its outcome is decided."""

    WAITING = "waiting"
    """No router has it yet (none is linked, or the one that had it was lost)."""
    SUBMITTED = "submitted"
    """A router has it; nobody was placed."""
    RUNNING = "running"
    """Placed, or tokens came."""


_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.SUBMITTED, Phase.RUNNING}),
    Phase.SUBMITTED: frozenset({Phase.WAITING, Phase.SUBMITTED, Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.RUNNING}),
}


class Verdict(Enum):
    """What became of a token run."""

    FRESH = "fresh"
    """At least one new id: :attr:`Session.fresh` holds the runs to deliver."""
    REPEATED = "repeated"
    STALE = "stale"
    """A lower epoch, or another incarnation: refused."""
    GAP = "gap"
    """Ids below it are missing; ask for them."""
    CORRUPT = "corrupt"
    """It contradicts what was delivered already."""


@dataclass(slots=True)
class Session:
    """One request from submission to outcome."""

    spec: RequestSpec
    submitted_at: float
    phase: Phase = Phase.WAITING
    router: Peer | None = None
    """Who has it, or had it last: the only router whose word counts."""
    turn: int = 0
    """Grows with each router it is given to."""
    declined: set[Peer] = field(default_factory=set)
    """Routers that are going away and did not have it."""
    waiting_since: float | None = None
    """Since when no router has it."""
    epoch: int = 1
    """Lower ones are refused (the fence)."""
    base: int = 0
    """Ids held when the attempt of ``epoch`` began."""
    fenced: bool = False
    """Fenced at ``epoch``, and not placed at it yet."""
    decode: Peer | None = None
    prefill: Peer | None = None
    told: set[Peer] = field(default_factory=set)
    """Everybody who may hold something for it, in any attempt: they all hear of the end."""
    ids: array[int] = field(default_factory=lambda: array("I"))
    cached_tokens: int = 0
    decode_spoke: bool = False
    """Decode has sent tokens in this attempt: prefill's death does not matter any more."""
    held: dict[int, TokenRun] = field(default_factory=dict)
    wanted_at: float | None = None
    """When missing ids were asked for last."""
    recovery_due: float | None = None
    """A worker of the attempt, or every router, is lost; somebody must have taken over by then."""
    told_stale: set[tuple[Peer, int]] = field(default_factory=set)
    """Which worker was told that which epoch of it is over."""
    first_at: float | None = None
    last_at: float | None = None
    choice: str = ""
    """The id under which its client is told of it, where that is not the request's own."""
    kept: str = ""
    """The resumable request that it is a choice of; "" if its client's leaving ends it."""
    claimed: bool = False
    """It ran under another gateway, and nobody has said yet in which epoch it is."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each id, where it may have to be told again."""
    finish: FinishReason | None = None
    """What decode said with the last id."""
    bound: int | None = None
    """Nobody reads: decode is not to go beyond that many ids."""
    bound_told: int = 0
    """Epoch of the attempt whose decode knows that."""

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def name(self) -> str:
        """What its client calls it."""
        return self.choice or self.spec.request_id

    @property
    def from_elsewhere(self) -> bool:
        """Whether another gateway had it before: routers may not know that it is here."""
        return self.turn >= 1 << TURN_BITS

    def become(self, phase: Phase) -> None:
        """Move; an illegal move is a bug."""
        assert phase in _MOVES[self.phase], f"illegal move {self.phase} -> {phase}"
        self.phase = phase

    def submission(self, now: float, *, decode_lost: bool) -> SubmitRequest:
        """Return what its router has to know of it."""
        return SubmitRequest(
            spec=self.spec,
            turn=self.turn,
            begun=self.phase is Phase.RUNNING,
            epoch=self.epoch,
            decode=self.decode,
            prefill=self.prefill,
            base=self.base,
            decode_lost=decode_lost,
            age_ms=max(0, int((now - self.submitted_at) * 1000)),
            held=len(self.ids),
        )

    def fence(self, epoch: int) -> None:
        """Refuse everything below ``epoch`` from now on and forget the attempt's workers."""
        assert epoch > self.epoch
        self.epoch = epoch
        self.base = len(self.ids)
        self.fenced, self.claimed = True, False
        self._unbind()

    def place(self, epoch: int, decode: Peer, prefill: Peer | None) -> bool:
        """Bind an attempt to its workers; ``False`` if it contradicts what is bound already."""
        if epoch < self.epoch:
            return False
        if epoch > self.epoch:
            self.epoch = epoch
            self._unbind()
        if self.decode not in (None, decode):
            return False
        if self.prefill is not None and prefill is not None and self.prefill != prefill:
            return False
        self.decode = decode
        self.prefill = prefill if prefill is not None else self.prefill
        self.fenced = self.claimed = False
        self.told.update(peer for peer in (decode, prefill) if peer is not None)
        return True

    def _unbind(self) -> None:
        self.decode = self.prefill = None
        self.decode_spoke = False
        self.held.clear()
        self.wanted_at = None

    def accept(
        self, peer: Peer, role: Role | None, run: TokenRun
    ) -> tuple[Verdict, list[TokenRun]]:
        """Judge ``run``; the second value is what is new, in order, each starting at the next
        index."""
        if self.claimed and role is Role.DECODE and run.epoch > self.epoch:
            # The router that adopted it told decode of this gateway; its word comes later.
            self.epoch, self.claimed = run.epoch, False
        if run.epoch != self.epoch or not self._binds(peer, role, run):
            return Verdict.STALE, []
        if run.index > len(self.ids):
            fits = run.index + len(run.ids) <= self.spec.max_tokens
            if fits and len(self.held) < HELD_RUNS_MAX:
                self.held[run.index] = run
            return Verdict.GAP, []
        fresh: list[TokenRun] = []
        if not self._take(run, fresh):
            return Verdict.CORRUPT, fresh
        while self.held and (index := min(self.held)) <= len(self.ids):
            if not self._take(self.held.pop(index), fresh):
                return Verdict.CORRUPT, fresh
        if not self.held:
            self.wanted_at = None
        return (Verdict.FRESH if fresh else Verdict.REPEATED), fresh

    def _binds(self, peer: Peer, role: Role | None, run: TokenRun) -> bool:
        """Whether ``peer`` is (or now becomes) this attempt's worker for what it sends.

        Tokens may overtake :class:`RequestPlaced`, which comes from somebody else: the first
        incarnation seen with an epoch is bound to it. Only decode has a say: it alone has verified.
        """
        if role is not Role.DECODE:
            return False
        if self.decode is None:
            self.decode = peer
            self.told.add(peer)
        if self.decode != peer:
            return False
        self.decode_spoke = True
        return True

    def _take(self, run: TokenRun, fresh: list[TokenRun]) -> bool:
        """Append what is new in ``run``; ``False`` if it contradicts what is held already."""
        have = len(self.ids)
        known = min(have - run.index, len(run.ids))
        if tuple(self.ids[run.index : run.index + known]) != run.ids[:known]:
            return False
        if run.logprobs and len(run.logprobs) != len(run.ids):
            return False
        room = self.spec.max_tokens - have
        new = run.ids[known : known + room]
        if run.index == 0 and known == 0:
            self.cached_tokens = run.cached_tokens
        finish = run.finish if known + len(new) == len(run.ids) else None
        if finish is None and len(new) == room:
            # The worker ends it at this length itself; a longer answer never reaches a client.
            finish = FinishReason.LENGTH
        if not new and finish is None:
            return True
        self.ids.extend(new)
        self.finish = finish
        if self.kept:
            self.logprobs += run.logprobs[known : known + len(new)]
        fresh.append(
            TokenRun(
                request_id=run.request_id,
                epoch=run.epoch,
                index=have,
                ids=new,
                logprobs=run.logprobs[known : known + len(new)],
                finish=finish,
                cached_tokens=self.cached_tokens,
            )
        )
        return True

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self.ids) <= self.spec.max_tokens
        assert len(self.held) <= HELD_RUNS_MAX
        assert all(index > len(self.ids) for index in self.held)
        assert self.phase is not Phase.RUNNING or self.told or self.fenced
        assert self.phase is not Phase.SUBMITTED or self.router is not None
        assert self.turn > 0 or self.router is None
