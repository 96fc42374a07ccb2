"""Conversations with the gateway's machine under a virtual clock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested, TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.core.sampling import SamplingParams
from baton.gateway.machine import GatewayMachine
from baton.gateway.session import HELD_RUNS_MAX
from baton.gateway.vocabulary import (
    ClientGone,
    ClientsLeft,
    Command,
    Deliver,
    End,
    Event,
    LeaveClients,
    ReportsReady,
    ReportsWanted,
    StopMatched,
    Submitted,
)
from baton.ports.driving import EXIT_RESTART, CallLedger, Exit, LedgerAnswered, Measure, Send
from baton.ports.ledger import Conflict, Done, EndRequest, Unavailable
from baton.ports.transport import PeerLost, PeerUp, Received
from baton.runtime.catalogue import CATALOGUE
from baton.wire.messages import (
    FenceRequest,
    PoolStatus,
    ReadReport,
    Report,
    RequestEnded,
    RequestFailed,
    RequestFenced,
    RequestPlaced,
    RequestRefused,
    RequestSpec,
    SubmitRequest,
    TokenChunk,
    TokenRun,
    TokensWanted,
)
from support.held import holdings
from support.machine_playbook import is_look

ME = Peer("gateway-0", 1)
R0, R1 = Peer("router-0", 2), Peer("router-1", 3)
P0 = Peer("prefill-0", 4)
D0, D1 = Peer("decode-0", 5), Peer("decode-1", 6)
ROLES = {R0: Role.ROUTER, R1: Role.ROUTER, P0: Role.PREFILL, D0: Role.DECODE, D1: Role.DECODE}

T = TypeVar("T")


def up(peer: Peer, role: Role | None = None) -> PeerUp:
    role = role or ROLES[peer]
    return PeerUp(Member(peer=peer, role=role, endpoint="", pid=1, boot_id="b"))


class Talk:
    """Feeds a machine, keeps what it said, and checks it after each event."""

    def __init__(
        self,
        peers: Sequence[Peer] = (R0, P0, D0, D1),
        limits: Limits | None = None,
        **place: bool,
    ) -> None:
        self.limits = limits or Limits()
        self.machine = GatewayMachine(ME, self.limits, **place)
        self.now = 100.0
        self.all: list[Command] = []
        self.feed(LeaseChanged(LeaseState.HELD))
        for peer in peers:
            self.feed(up(peer))

    def feed(self, event: Event) -> list[Command]:
        commands = self.machine.handle(event, self.now)
        commands = [each for each in commands if not is_look(each)]
        self.machine.check()
        holdings(self.machine)
        for command in commands:
            if isinstance(command, Measure):
                assert CATALOGUE[command.name].labels.keys() == command.labels.keys()
        self.all += commands
        return commands

    def hear(self, peer: Peer, message: Any) -> list[Command]:
        return self.feed(Received(peer, message))

    def submit(self, request_id: str = "r", max_tokens: int = 100, **values: Any) -> list[Command]:
        return self.feed(Submitted(spec(request_id, max_tokens, **values)))

    def place(
        self, epoch: int = 1, decode: Peer = D0, prefill: Peer | None = P0, request_id: str = "r"
    ) -> list[Command]:
        placed = RequestPlaced(request_id=request_id, epoch=epoch, decode=decode, prefill=prefill)
        return self.hear(R0, placed)

    def tokens(
        self,
        peer: Peer,
        index: int,
        ids: Sequence[int],
        epoch: int = 1,
        finish: FinishReason | None = None,
    ) -> list[Command]:
        run = TokenRun(request_id="r", epoch=epoch, index=index, ids=tuple(ids), finish=finish)
        return self.hear(peer, TokenChunk(runs=(run,)))

    def pass_time(self, seconds: float) -> list[Command]:
        """Let time pass; the machine is woken exactly when it asked to be."""
        until = self.now + seconds
        out: list[Command] = []
        for _ in range(1000):
            due = self.machine.deadline()
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            out += self.feed(TimePassed())
        else:
            raise AssertionError("the machine asks to be woken for ever")
        self.now = until
        return out

    def answer(self, reply: Any) -> list[Command]:
        """Answer the last ledger call."""
        call = only(self.all[::-1], CallLedger, first=True)
        return self.feed(LedgerAnswered(call.op, reply))

    @property
    def delivered(self) -> list[int]:
        return [i for c in self.all if isinstance(c, Deliver) for i in c.ids]

    @property
    def ends(self) -> list[End]:
        return [c for c in self.all if isinstance(c, End)]


def spec(request_id: str = "r", max_tokens: int = 100, deadline_ms: int = 600_000) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        gateway=ME,
        prompt=array("I", [1, 2, 3]).tobytes(),
        sampling=SamplingParams(seed=1),
        max_tokens=max_tokens,
        deadline_ms=deadline_ms,
    )


def only(commands: Sequence[Command], kind: type[T], *, first: bool = False) -> T:
    found = [command for command in commands if isinstance(command, kind)]
    assert found, f"no {kind.__name__} in {commands}"
    assert first or len(found) == 1, found
    return found[0]


def sent(commands: Sequence[Command], kind: type[T]) -> list[tuple[Peer, T]]:
    return [
        (c.peer, c.message) for c in commands if isinstance(c, Send) and isinstance(c.message, kind)
    ]


DONE = Done(epoch=1, state=RequestState.COMPLETED)


# --- the usual way ------------------------------------------------------------------------------


def test_whole_way() -> None:
    """A request is submitted, placed, delivered token by token and ended once, with everybody
    who worked on it told."""
    talk = Talk()
    assert [peer for peer, _ in sent(talk.submit(), SubmitRequest)] == [R0]
    talk.place()
    talk.tokens(D0, 0, [7])
    talk.tokens(D0, 0, [7, 8])
    out = talk.tokens(D0, 2, [9], finish=FinishReason.STOP)
    assert talk.delivered == [7, 8, 9]
    assert {peer for peer, _ in sent(out, RequestEnded)} == {R0, P0, D0}
    assert not talk.ends, "the client hears of completion when the ledger has it"
    talk.answer(DONE)
    (end,) = talk.ends
    assert end.outcome == Outcome(Ending.COMPLETED, finish=FinishReason.STOP, completion_tokens=3)


def test_first_token_may_end_the_request() -> None:
    """A first token that finishes the answer ends it."""
    talk = Talk()
    talk.submit()
    talk.place()
    out = talk.tokens(D0, 0, [7], finish=FinishReason.STOP)
    assert sent(out, RequestEnded)
    assert talk.delivered == [7]


def test_tokens_may_overtake_the_placement() -> None:
    """Tokens that come before RequestPlaced bind the epoch to their senders."""
    talk = Talk()
    talk.submit()
    talk.tokens(D0, 0, [7])
    talk.tokens(D0, 0, [7, 8])
    talk.place()
    talk.tokens(D0, 2, [9])
    assert talk.delivered == [7, 8, 9]


def test_max_tokens_is_enforced_here_too() -> None:
    """A worker that runs on beyond max_tokens never reaches the client."""
    talk = Talk()
    talk.submit(max_tokens=2)
    talk.place()
    talk.tokens(D0, 0, [1, 2, 3, 4])
    talk.answer(DONE)
    assert talk.delivered == [1, 2]
    assert talk.ends[0].outcome.finish is FinishReason.LENGTH
    assert talk.ends[0].outcome.completion_tokens == 2


def test_stop_matched_ends_at_the_token_that_completed_it() -> None:
    """The HTTP layer's stop ends the request once, counting the tokens it says."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1, 2, 3, 4])
    out = talk.feed(StopMatched("r", 3))
    assert {peer for peer, _ in sent(out, RequestEnded)} == {R0, P0, D0}
    assert not talk.feed(StopMatched("r", 3))
    assert not [c for c in talk.tokens(D0, 4, [5]) if isinstance(c, Deliver | Send)]
    talk.answer(DONE)
    assert talk.ends[0].outcome.completion_tokens == 3


# --- tokens: the linearization point ------------------------------------------------------------


def test_repeated_tokens_are_dropped() -> None:
    """What is sent again is delivered once, also when it overlaps what is new."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1, 2])
    talk.tokens(D0, 0, [1, 2])
    talk.tokens(D0, 1, [2, 3])
    assert talk.delivered == [1, 2, 3]


def test_contradicting_tokens_fail_the_request() -> None:
    """Another id at an index that was delivered is an integrity failure, never an answer."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1])
    out = talk.tokens(D0, 0, [2, 3])
    assert only(out, End).outcome.reason is Reason.INTEGRITY
    assert talk.delivered == [1]


def test_a_gap_is_held_and_asked_for() -> None:
    """Ids above the next index wait for the missing ones, which are asked for at once and then
    once a second."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1])
    ((peer, wanted),) = sent(talk.tokens(D0, 3, [4]), TokensWanted)
    assert (peer, wanted.index) == (D0, 1)
    assert not sent(talk.tokens(D0, 4, [5]), TokensWanted)
    assert len(sent(talk.pass_time(2.5), TokensWanted)) == 2
    assert talk.delivered == [1]
    talk.tokens(D0, 1, [2, 3])
    assert talk.delivered == [1, 2, 3, 4, 5]
    assert not sent(talk.pass_time(5), TokensWanted)


def test_held_tokens_are_bounded() -> None:
    """However many runs lie above a gap, a bounded number is held (check() asserts it)."""
    talk = Talk()
    talk.submit(max_tokens=10_000)
    talk.place()
    for index in range(1, 3 * HELD_RUNS_MAX):
        talk.tokens(D0, 2 * index, [1])
    assert talk.delivered == []


def test_a_run_beyond_the_answer_is_not_held() -> None:
    """A broken worker's runs take no more memory than the answer may; what fits is asked for."""
    talk = Talk()
    talk.submit(max_tokens=10)
    talk.place()
    talk.tokens(D0, 2, [7] * 1_000)
    assert not talk.machine.state.sessions["r"].held
    talk.tokens(D0, 2, [3, 4])
    talk.tokens(D0, 0, [1, 2])
    assert talk.delivered == [1, 2, 3, 4]


def test_other_incarnation_of_the_same_epoch_is_refused() -> None:
    """Only the incarnations an epoch is bound to are heard."""
    talk = Talk()
    talk.submit()
    talk.place(decode=D0)
    assert not [c for c in talk.tokens(D1, 0, [9]) if isinstance(c, Deliver)]
    talk.tokens(D0, 0, [1])
    assert talk.delivered == [1]


def test_prefill_has_no_say() -> None:
    """Only decode has verified what a token was computed from: nobody else's tokens count."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(P0, 0, [1])
    assert talk.delivered == []


# --- epochs -------------------------------------------------------------------------------------


def test_fence_refuses_the_old_attempt_and_says_what_is_held() -> None:
    """After a fence the lower epoch is refused, and the new attempt goes on from the ids held."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1, 2])
    ((peer, fenced),) = sent(talk.hear(R0, FenceRequest(request_id="r", epoch=2)), RequestFenced)
    assert peer == R0
    assert array("I", fenced.output).tolist() == [1, 2]
    talk.tokens(D0, 2, [66])
    talk.place(epoch=2, decode=D1, prefill=None)
    talk.tokens(D0, 2, [66])
    talk.tokens(D1, 2, [3], epoch=2, finish=FinishReason.STOP)
    assert talk.delivered == [1, 2, 3]


def test_repeated_and_lower_fences_are_answered_with_the_epoch_held() -> None:
    """A fence that comes twice, or late, moves nothing."""
    talk = Talk()
    talk.submit()
    talk.hear(R0, FenceRequest(request_id="r", epoch=3))
    for epoch in (3, 2):
        ((_, fenced),) = sent(
            talk.hear(R0, FenceRequest(request_id="r", epoch=epoch)), RequestFenced
        )
        assert fenced.epoch == 3


def test_failure_of_an_old_epoch_is_ignored() -> None:
    """RequestFailed below the fence does not end the request."""
    talk = Talk()
    talk.submit()
    talk.hear(R0, FenceRequest(request_id="r", epoch=2))
    failed = RequestFailed(
        request_id="r", epoch=1, outcome=Outcome(Ending.FAILED, reason=Reason.WORKER_LOST)
    )
    talk.hear(R0, failed)
    assert not talk.ends


def test_an_end_before_any_attempt_is_repeated_once_if_there_is_no_record() -> None:
    """A router may just be about to have it admitted; the client does not wait for that."""
    talk = Talk()
    talk.submit()
    out = talk.feed(ClientGone("r", Reason.CLIENT_DISCONNECTED))
    assert all(message.early for _, message in sent(out, RequestEnded))
    assert len(talk.ends) == 1
    talk.answer(Conflict(0, None))
    repeated = [each for each in talk.pass_time(1.5) if isinstance(each, CallLedger)]
    assert len(repeated) == 1 and isinstance(repeated[0].op, EndRequest)
    talk.answer(Conflict(0, None))
    assert not [each for each in talk.pass_time(30.0) if isinstance(each, CallLedger)]


def test_only_the_router_of_a_request_may_give_it_up() -> None:
    """RequestFailed counts from the session's router alone; from anybody else it is stale."""
    outcome = Outcome(Ending.FAILED, reason=Reason.WORKER_LOST)
    failed = RequestFailed(request_id="r", epoch=1, outcome=outcome)
    for peer, ends in ((R1, 0), (D1, 0), (P0, 0), (R0, 1), (D0, 0)):
        talk = Talk((R0, P0, D0, D1))
        talk.submit()
        talk.place()
        talk.feed(up(R1))
        talk.hear(peer, failed)
        assert len(talk.ends) == ends, peer


# --- routers ------------------------------------------------------------------------------------


def test_routers_take_turns() -> None:
    """Requests go to the routers in turn."""
    talk = Talk(peers=(R0, R1, P0, D0))
    peers = [sent(talk.submit(f"r{i}"), SubmitRequest)[0][0] for i in range(4)]
    assert sorted(peers) == [R0, R0, R1, R1]


def test_lost_router_before_placement_means_another_router() -> None:
    """The same id goes to another router; a placed request goes on without its router."""
    talk = Talk(peers=(R0, R1, P0, D0))
    first = sent(talk.submit(), SubmitRequest)[0][0]
    other = R1 if first == R0 else R0
    ((peer, again),) = sent(talk.feed(PeerLost(first, "died")), SubmitRequest)
    assert peer == other
    assert again.spec.request_id == "r"
    talk.hear(other, RequestPlaced(request_id="r", epoch=1, decode=D0))
    assert not talk.feed(PeerLost(other, "died"))
    talk.tokens(D0, 0, [1])
    assert talk.delivered == [1]


def test_lost_router_is_waited_for() -> None:
    """With no other router the request waits for the restarted one, up to the queue's limit."""
    talk = Talk()
    talk.submit()
    talk.feed(PeerLost(R0, "died"))
    talk.pass_time(5)
    assert not talk.ends
    assert sent(talk.feed(up(R1)), SubmitRequest)
    talk.feed(PeerLost(R1, "died"))
    talk.pass_time(120)
    assert talk.ends[0].outcome.reason is Reason.NO_ROUTER


def test_no_router_at_all_is_refused_soon() -> None:
    """A gateway that never saw a router refuses within the lease's time."""
    talk = Talk(peers=(P0, D0))
    talk.submit()
    assert not talk.ends
    talk.pass_time(talk.limits.lease_ttl_ms / 1000 + 0.1)
    assert talk.ends[0].outcome.reason is Reason.NO_ROUTER
    assert talk.ends[0].outcome.ending is Ending.REFUSED


def test_refusal_reaches_the_client_with_its_retry_time() -> None:
    """What the router refuses is refused to the client at once."""
    talk = Talk()
    talk.submit()
    out = talk.hear(
        R0,
        RequestRefused(
            request_id="r", reason=Reason.OVERLOADED, message="full", retry_after_ms=700
        ),
    )
    end = only(out, End)
    assert end.outcome.reason is Reason.OVERLOADED
    assert end.retry_after_ms == 700


def test_refusal_after_a_resubmission_by_the_wrong_router_is_ignored() -> None:
    """Only the router that has the request may refuse it."""
    talk = Talk(peers=(R0, R1, P0, D0))
    first = sent(talk.submit(), SubmitRequest)[0][0]
    other = R1 if first == R0 else R0
    talk.hear(other, RequestRefused(request_id="r", reason=Reason.OVERLOADED, message=""))
    assert not talk.ends


# --- losses -------------------------------------------------------------------------------------


def test_lost_decode_is_waited_for_then_fails() -> None:
    """Nobody takes over: a clear failure within the recovery limit, never silence."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1, 2])
    talk.feed(PeerLost(D0, "died"))
    talk.pass_time(talk.limits.recovery_ms / 1000 - 0.1)
    assert not talk.ends
    talk.pass_time(0.2)
    assert talk.ends[0].outcome.reason is Reason.WORKER_LOST
    assert talk.ends[0].outcome.completion_tokens == 2


def test_lost_decode_with_a_take_over_goes_on() -> None:
    """A fence and a placement after the loss continue the same answer."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1])
    talk.feed(PeerLost(D0, "died"))
    talk.pass_time(5)
    talk.hear(R0, FenceRequest(request_id="r", epoch=2))
    talk.pass_time(5)
    talk.place(epoch=2, decode=D1)
    talk.pass_time(60)
    assert not talk.ends
    talk.tokens(D1, 0, [1, 2], epoch=2)
    assert talk.delivered == [1, 2]


def test_lost_decode_after_its_router_goes_to_another_router() -> None:
    """Whatever the order of the two losses, a router that lives is asked to take over, once."""
    for losses in ((R0, D0), (D0, R0)):
        talk = Talk()
        talk.submit()
        talk.place()
        talk.tokens(D0, 0, [1])
        for peer in losses:
            talk.feed(PeerLost(peer, "died"))
        assert [p for p, _ in sent(talk.feed(up(R1)), SubmitRequest)] == [R1]
        assert not sent(talk.feed(up(Peer("router-9", 9), Role.ROUTER)), SubmitRequest)
        talk.hear(R1, FenceRequest(request_id="r", epoch=2))
        placed = RequestPlaced(request_id="r", epoch=2, decode=D1)
        talk.hear(R1, placed)
        talk.tokens(D1, 1, [2], epoch=2, finish=FinishReason.STOP)
        assert talk.delivered == [1, 2]


def test_lost_prefill_matters_only_before_decode_spoke() -> None:
    """Prefill's death after the hand-over changes nothing."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1])
    talk.feed(PeerLost(P0, "died"))
    talk.pass_time(60)
    assert not talk.ends
    late = Talk()
    late.submit()
    late.place()
    late.feed(PeerLost(P0, "died"))
    late.pass_time(60)
    assert late.ends[0].outcome.reason is Reason.WORKER_LOST


def test_placement_on_a_worker_that_never_appears_fails() -> None:
    """A placement names a worker without a link: it turns up in time, or the request fails."""
    talk = Talk(peers=(R0, P0))
    talk.submit()
    talk.place()
    talk.pass_time(60)
    assert talk.ends[0].outcome.reason is Reason.WORKER_LOST
    talk = Talk(peers=(R0, P0))
    talk.submit()
    talk.place()
    talk.feed(up(D0))
    talk.pass_time(60)
    assert not talk.ends


def test_deadline_expires() -> None:
    """A request older than its deadline ends as expired."""
    talk = Talk()
    talk.submit(deadline_ms=30_000)
    talk.place()
    talk.tokens(D0, 0, [1])
    talk.pass_time(31)
    assert talk.ends[0].outcome.ending is Ending.EXPIRED


def test_unplaced_request_is_refused_after_the_queue_limit() -> None:
    """A router that never places is not waited for without end."""
    talk = Talk()
    talk.submit()
    talk.pass_time(62)
    assert talk.ends[0].outcome.reason is Reason.OVERLOADED


# --- ends and the ledger ------------------------------------------------------------------------


def test_client_gone_cancels_everywhere_once() -> None:
    """A disconnect ends the request at once, and a second one changes nothing."""
    talk = Talk()
    talk.submit()
    talk.place()
    out = talk.feed(ClientGone("r", Reason.CLIENT_DISCONNECTED))
    assert {peer for peer, _ in sent(out, RequestEnded)} == {R0, P0, D0}
    op = only(out, CallLedger).op
    assert isinstance(op, EndRequest)
    assert op.outcome.ending is Ending.CANCELLED
    assert not talk.feed(ClientGone("r", Reason.CLIENT_DISCONNECTED))


def test_ledger_away_does_not_hold_the_client() -> None:
    """With the ledger away the client gets its end, and the transition is repeated until it is
    in effect."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1], finish=FinishReason.STOP)
    talk.answer(Unavailable("away"))
    assert len(talk.ends) == 1
    calls = [c for c in talk.pass_time(0.3) if isinstance(c, CallLedger)]
    assert len(calls) == 1
    talk.answer(Unavailable("away"))
    talk.pass_time(1)
    talk.answer(DONE)
    assert not [c for c in talk.pass_time(120) if isinstance(c, CallLedger)]
    assert len(talk.ends) == 1


def test_repetitions_are_given_up_in_the_end() -> None:
    """An end that cannot be recorded is not repeated for ever."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1], finish=FinishReason.STOP)
    for _ in range(100):
        talk.answer(Unavailable("away"))
        if not [c for c in talk.pass_time(5) if isinstance(c, CallLedger)]:
            break
    else:
        raise AssertionError("repeated for ever")
    assert talk.machine.status()["ends_unconfirmed"] == 0


def test_a_newer_epoch_in_the_ledger_is_ended_too() -> None:
    """The end holds for the epoch the record has meanwhile."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1], finish=FinishReason.STOP)
    out = talk.answer(Conflict(epoch=2, state=RequestState.ADMITTED))
    op = only(out, CallLedger).op
    assert isinstance(op, EndRequest)
    assert op.epoch == 2
    talk.answer(DONE)
    assert talk.ends[0].outcome.ending is Ending.COMPLETED


def test_the_ledgers_outcome_is_the_clients_outcome() -> None:
    """If the record is terminal otherwise, the client is told that one."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1], finish=FinishReason.STOP)
    expired = Outcome(Ending.EXPIRED, reason=Reason.DEADLINE)
    talk.answer(Conflict(epoch=1, state=RequestState.EXPIRED, outcome=expired))
    assert talk.ends == [End("r", expired)]


def test_work_on_a_request_that_is_over_is_told_so_once() -> None:
    """Late tokens of an ended or unknown request are answered with its end, once a peer."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.feed(ClientGone("r", Reason.CLIENT_CANCELLED))
    assert not sent(talk.tokens(D0, 0, [1]), RequestEnded), "told already"
    assert len(sent(talk.tokens(D1, 0, [1]), RequestEnded)) == 1
    assert not sent(talk.tokens(D1, 1, [1]), RequestEnded)
    run = TokenRun(request_id="never", epoch=1, index=0, ids=(1,))
    assert len(sent(talk.hear(D0, TokenChunk(runs=(run,))), RequestEnded)) == 1


def test_one_outcome_whatever_comes_after() -> None:
    """Stop, disconnect, failure, deadline after the end: still one End."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [1, 2], finish=FinishReason.STOP)
    talk.feed(StopMatched("r", 1))
    talk.feed(ClientGone("r", Reason.CLIENT_DISCONNECTED))
    failed = Outcome(Ending.FAILED, reason=Reason.INTERNAL)
    talk.hear(R0, RequestFailed(request_id="r", epoch=1, outcome=failed))
    talk.answer(DONE)
    talk.pass_time(1000)
    assert len(talk.ends) == 1
    assert len([c for c in talk.all if isinstance(c, CallLedger)]) == 1


# --- the process --------------------------------------------------------------------------------


def test_sessions_are_bounded() -> None:
    """One request too many is refused as overloaded, without a ledger call."""
    talk = Talk(limits=Limits(sessions_max=2))
    talk.submit("a")
    talk.submit("b")
    out = talk.submit("c")
    assert only(out, End).outcome.reason is Reason.OVERLOADED
    assert not [c for c in out if isinstance(c, CallLedger | Send)]


def test_suspect_lease_takes_nothing_new_and_goes_on_with_the_rest() -> None:
    """A gateway that cannot renew refuses new requests; running ones go on."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.feed(LeaseChanged(LeaseState.SUSPECT))
    assert only(talk.submit("b"), End).outcome.reason is Reason.LEDGER_UNAVAILABLE
    talk.tokens(D0, 0, [1])
    assert talk.delivered == [1]
    talk.feed(LeaseChanged(LeaseState.HELD))
    assert sent(talk.submit("c"), SubmitRequest)


def test_drain_finishes_what_runs() -> None:
    """Draining refuses what is new, ends when the last request has ended, exits once."""
    talk = Talk()
    talk.submit()
    talk.place()
    assert not [c for c in talk.feed(DrainRequested()) if isinstance(c, Exit)]
    assert only(talk.submit("b"), End).outcome.reason is Reason.DRAINING
    talk.tokens(D0, 0, [1], finish=FinishReason.STOP)
    assert only(talk.answer(DONE), Exit).code == 0
    talk.pass_time(100)
    assert len([c for c in talk.all if isinstance(c, Exit)]) == 1


def test_drain_has_a_limit() -> None:
    """What still runs at the drain's limit fails as draining."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.feed(DrainRequested())
    out = talk.pass_time(talk.limits.drain_ms / 1000 + 0.1)
    assert only(out, End).outcome.reason is Reason.DRAINING
    assert only(out, Exit).code == 0


def test_a_restart_ends_when_the_last_client_has_its_answer() -> None:
    """Others take new connections; what comes on the old ones is served, for longer than a drain
    takes; the exit code asks for a successor."""
    talk = Talk()
    talk.submit()
    talk.place()
    only(talk.feed(RestartRequested()), LeaveClients)
    assert not [c for c in talk.feed(RestartRequested()) if isinstance(c, LeaveClients)]
    assert sent(talk.submit("b"), SubmitRequest)
    assert not [c for c in talk.pass_time(talk.limits.drain_ms / 1000) if isinstance(c, End | Exit)]
    talk.tokens(D0, 0, [1], finish=FinishReason.STOP)
    talk.answer(DONE)
    talk.feed(ClientGone("b", Reason.CLIENT_DISCONNECTED))
    assert not [c for c in talk.answer(DONE) if isinstance(c, Exit)]
    assert only(talk.feed(ClientsLeft()), Exit).code == EXIT_RESTART


def test_a_restart_has_a_limit() -> None:
    """A client that never ends keeps no gateway for ever: its request fails as draining, and a
    successor is asked for."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.feed(RestartRequested())
    talk.pass_time(talk.limits.restart_ms / 2000)
    talk.feed(RestartRequested())
    assert not [c for c in talk.all if isinstance(c, End | Exit)]
    out = talk.pass_time(talk.limits.restart_ms / 2000 + 0.1)
    outcome = only(out, End).outcome
    assert (outcome.ending, outcome.reason) == (Ending.FAILED, Reason.DRAINING)
    assert only(out, Exit).code == EXIT_RESTART


def test_a_stop_during_a_restart_takes_no_longer_than_a_drain() -> None:
    """SIGTERM after SIGUSR2: the shorter limit holds, and nobody follows."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.feed(RestartRequested())
    talk.pass_time(5)
    talk.feed(DrainRequested())
    out = talk.pass_time(talk.limits.drain_ms / 1000 + 0.1)
    assert only(out, End).outcome.reason is Reason.DRAINING
    assert only(out, Exit).code == 0


def test_a_drain_beside_others_leaves_the_clients_to_them() -> None:
    """Who shares its socket does not refuse: it takes no connections, and ends at the limit."""
    talk = Talk(others=True)
    talk.submit()
    talk.place()
    only(talk.feed(DrainRequested()), LeaveClients)
    assert sent(talk.submit("b"), SubmitRequest)
    out = talk.pass_time(talk.limits.drain_ms / 1000 + 0.1)
    assert [c.outcome.reason for c in out if isinstance(c, End)] == [Reason.DRAINING] * 2
    assert only(out, Exit).code == 0


def test_a_spare_has_no_successor() -> None:
    """It ends for good when its clients have left."""
    talk = Talk(spare=True)
    only(talk.feed(RestartRequested()), LeaveClients)
    assert only(talk.feed(ClientsLeft()), Exit).code == 0


def test_readiness_names_what_is_missing() -> None:
    """Ready means router, prefill and decode linked (decode alone when colocated) and a lease."""
    talk = Talk(peers=())
    for peer, missing in (
        (R0, Reason.NO_ROUTER),
        (D0, Reason.NO_DECODE_WORKER),
        (P0, Reason.NO_PREFILL_WORKER),
    ):
        unready = talk.machine.unready()
        assert unready is not None
        assert unready[0] is missing
        talk.feed(up(peer))
    # All are linked here; whether they have met each other the router knows.
    assert talk.machine.unready() == (Reason.NO_ROUTER, "the router has not said yet what it has")
    talk.hear(R0, PoolStatus(False, Reason.NO_PREFILL_WORKER, "not mapped"))
    assert talk.machine.unready() == (Reason.NO_PREFILL_WORKER, "not mapped")
    talk.hear(R0, PoolStatus(True))
    assert talk.machine.unready() is None
    talk.feed(LeaseChanged(LeaseState.SUSPECT))
    unready = talk.machine.unready()
    assert unready is not None
    assert unready[0] is Reason.LEDGER_UNAVAILABLE
    colocated = GatewayMachine(ME, Limits(), "colocated")
    for event in (
        LeaseChanged(LeaseState.HELD),
        up(R0),
        up(D0),
        Received(R0, PoolStatus(True)),
    ):
        colocated.handle(event, 0.0)
    assert colocated.unready() is None


def test_reports_are_collected_with_a_bounded_wait() -> None:
    """All peers are asked; those that answer in time are in the scrape, a lost one is not
    waited for."""
    talk = Talk(peers=(R0, P0, D0))
    asked = sent(talk.feed(ReportsWanted("metrics", 1)), ReadReport)
    assert {peer for peer, _ in asked} == {R0, P0, D0}
    talk.hear(D0, Report(kind="metrics", token=1, body=b"d"))
    talk.hear(D0, Report(kind="metrics", token=1, body=b"twice"))
    talk.feed(PeerLost(P0, "died"))
    ready = only(talk.pass_time(1.1), ReportsReady)
    assert ready.bodies == {"decode-0": b"d"}
    talk.hear(R0, Report(kind="metrics", token=1, body=b"late"))
    assert len([c for c in talk.all if isinstance(c, ReportsReady)]) == 1


def test_gauges_and_status_are_in_the_catalogue() -> None:
    """Every gauge has a place in the catalogue; the status holds no token ids."""
    talk = Talk()
    talk.submit()
    talk.place()
    talk.tokens(D0, 0, [4242])
    assert set(talk.machine.gauges()) <= CATALOGUE.keys()
    assert "4242" not in str(talk.machine.status())
