"""Conversations with the gateway's machine under a virtual clock."""

from __future__ import annotations

from array import array

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.gateway.machine import GatewayMachine
from baton.gateway.session import HELD_RUNS_MAX
from baton.gateway.vocabulary import (
    ClientGone,
    ClientsLeft,
    Deliver,
    End,
    LeaveClients,
    ReportsReady,
    ReportsWanted,
    StopMatched,
)
from baton.ports.driving import EXIT_RESTART, CallLedger, Exit, Measure, Send
from baton.ports.ledger import Conflict, EndRequest, Unavailable
from baton.ports.transport import PeerLost, Received
from baton.runtime.catalogue import CATALOGUE
from baton.wire.messages import (
    FenceRequest,
    PoolStatus,
    ReadReport,
    Report,
    RequestEnded,
    RequestFailed,
    RequestFenced,
    SubmitRequest,
    TokenChunk,
    TokenRun,
    TokensWanted,
)
from support.gateway_talk import D0, D1, DONE, ME, P0, R0, R1, Talk, only, sent, spec, up

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


def test_a_message_that_fits_nothing_is_counted_and_dropped() -> None:
    """(12) What is no gateway's to hear changes nothing."""
    talk = Talk()
    talk.submit()
    before = talk.machine.status()
    said = talk.hear(D0, SubmitRequest(spec("x", 5), turn=1))
    assert only(said, Measure).labels == {"kind": "unknown"}
    assert talk.machine.status() == before


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
