"""Conversations with the decode machine. Numbers in brackets are entries of the failure list."""

from __future__ import annotations

import pytest

from baton.core.events import DrainRequested, LeaseChanged, RestartRequested, TimePassed
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.decode.io import RunStep, StepFailed, StepFinished, VerifyBlocks
from baton.ports.driving import EXIT_RESTART, CallLedger, Exit, RecordStep, Send
from baton.ports.engine import Sampled
from baton.ports.ledger import EndRequest
from baton.wire.handover import ChunkAnnounced, PrefillFailed, TicketRevoked, WriterStopped
from baton.wire.messages import (
    AttemptId,
    CancelWork,
    DecodeReserved,
    LastStep,
    MoveOffered,
    RequestEnded,
    TokenChunk,
    TokensWanted,
    WorkAdopted,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
)
from support.decode_parts import (
    ADVANCED,
    CANCELLED,
    EOS,
    R1,
    STEP,
    Decode,
    G,
    P,
    R,
    commit,
    run,
    spec,
    sums,
)
from support.machine_playbook import Like, ids, sent

# --- epochs -------------------------------------------------------------------------------------


def test_a_lower_epoch_is_refused_and_the_same_one_is_a_repetition() -> None:
    """A sequence is never started twice, nor moved back."""
    play = Decode()
    play.local(spec(), epoch=3)
    play.reserve(spec(), None, epoch=3)
    refused = sent(R, WorkRefused, epoch=2, reason=Reason.STALE_EPOCH)
    play.reserve(spec(), None, refused, epoch=2)
    play.cancel("r", epoch=2)
    assert "r" in play.machine.state.sequences


def test_an_attempt_that_is_not_given_back_yet_is_not_begun_again() -> None:
    """A ledger that lost its last writes has one attempt placed twice: what its writer may still
    store into belongs to the first time, and comes back once."""
    play = Decode()
    play.remote(spec())
    play.cancel("r", sent(P, TicketRevoked))
    refused = sent(R, WorkRefused, epoch=1, reason=Reason.STALE_EPOCH)
    play.reserve(spec(), P, refused)
    play.hear(P, WriterStopped("r", 1))
    assert play.used() == 0
    play.remote(spec())


def test_a_higher_epoch_replaces_what_is_here_in_mid_step() -> None:
    """(16) The old attempt's blocks stay pinned by its step; its result goes nowhere."""
    play = Decode()
    play.local(spec(tokens=6))
    reserved = sent(R, DecodeReserved, epoch=2)
    play.reserve(spec(tokens=6), None, reserved, epoch=2, output=ids(50))
    assert play.states()["RESIDENT"] == 4
    play.stepped((50,), STEP)
    assert play.states()["RESIDENT"] == 2
    play.stepped((51,), Like(CallLedger), STEP, run(1, 51, epoch=2))


def test_forced_ids_are_continued_and_never_sent_again() -> None:
    """A new attempt goes on behind the ids that the client has."""
    play = Decode()
    play.local(spec(tokens=3, max_tokens=4), epoch=2, output=ids(50, 51))
    row = play.last(RunStep).rows[0]
    assert row.token_ids.tolist() == [1, 2, 3, 50, 51]
    assert row.sample is not None and (row.sample.index, list(row.sample.output)) == (2, [50, 51])
    play.stepped((52,), Like(CallLedger), STEP, run(2, 52, epoch=2))
    play.stepped((53,), run(3, 53, epoch=2, finish=FinishReason.LENGTH))


@pytest.mark.parametrize("prefill", [None, P])
@pytest.mark.parametrize(
    ("output", "finish"),
    [
        (ids(50, 51, 52), FinishReason.LENGTH),
        (ids(50, 51, 52, 53, 54), FinishReason.LENGTH),
        (ids(50, EOS), FinishReason.STOP),
    ],
)
def test_forced_ids_that_are_the_whole_answer_end_it(
    prefill: Peer | None, output: bytes, finish: FinishReason
) -> None:
    """(31) Nothing is computed, and the gateway hears why it is complete."""
    play = Decode()
    count = len(output) // 4
    reserved = sent(R, DecodeReserved, epoch=2)
    ended = run(count, epoch=2, finish=finish)
    request_spec = spec(tokens=3, max_tokens=3)
    play.reserve(request_spec, prefill, reserved, ended, epoch=2, output=output)
    assert play.used() == 0 and play.machine.scheduler.step == 0
    play.hear(G, RequestEnded("r", 2, Outcome(Ending.COMPLETED)))
    assert not play.machine.state.sequences


# --- ends of generation ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("way", ["local", "remote"])
def test_exactly_max_tokens_are_generated(count: int, way: str) -> None:
    """(31) For one token a remote prompt needs no step at all."""
    play = Decode()
    request_spec = spec(tokens=6, max_tokens=count)
    length = FinishReason.LENGTH
    if way == "remote":
        ticket = play.remote(request_spec)
        play.complete(ticket, 6)
        steps = (STEP,) if count > 1 else ()
        play.verified(ADVANCED, *steps, run(0, 50, finish=None if count > 1 else length))
    else:
        play.local(request_spec)
        steps = (STEP,) if count > 1 else ()
        play.stepped((50,), ADVANCED, *steps, run(0, 50, finish=None if count > 1 else length))
    for index in range(1, count):
        last = index + 1 == count
        more = () if last else (STEP,)
        play.stepped((50 + index,), *more, run(index, 50 + index, finish=length if last else None))
    assert play.machine.scheduler.step == count - (way == "remote")
    assert play.used() == 0


def test_a_first_token_that_is_a_stop_token_ends_the_request() -> None:
    """(30) The stop rules apply to prefill's token as to every other; decode makes no step."""
    play = Decode()
    ticket = play.remote(spec(tokens=6))
    play.complete(ticket, 6, first_id=EOS)
    play.verified(ADVANCED, run(0, EOS, finish=FinishReason.STOP))
    assert play.machine.scheduler.step == 0 and play.used() == 0


def test_an_end_may_overtake_the_commit() -> None:
    """(30) Its gateway may end it by what an earlier attempt has sent (a stop string): the commit
    is then prefill's word that it stopped, and no token of it goes out."""
    play = Decode()
    ticket = play.remote(spec(tokens=6))
    play.hear(G, RequestEnded("r", 1, Outcome(Ending.COMPLETED)), sent(P, TicketRevoked))
    play.hear(P, commit(ticket, first_id=EOS))
    assert play.used() == 0
    play.hear(P, WriterStopped("r", 1))


def test_the_clients_parameters_reach_the_sampler_unchanged() -> None:
    """(33) Minimum tokens and stop ids are the request's own in every stage."""
    play = Decode()
    request_spec = spec(tokens=6, min_tokens=5)
    play.local(request_spec)
    sample = play.last(RunStep).rows[0].sample
    assert sample is not None and sample.params == request_spec.sampling


def test_a_finished_sequence_is_kept_until_its_gateway_said_how_it_ended() -> None:
    """The last tokens can be asked for again; blocks are not kept for that."""
    play = Decode()
    play.local(spec(tokens=3, max_tokens=2))
    play.stepped((50,), ADVANCED, STEP, run(0, 50))
    play.stepped((51,), run(1, 51, finish=FinishReason.LENGTH))
    assert play.used() == 0
    play.hear(G, TokensWanted("r", 1, 0), run(0, 50, 51, finish=FinishReason.LENGTH))
    play.hear(G, TokensWanted("r", 2, 0))
    play.hear(R, TokensWanted("r", 1, 0))
    play.hear(G, RequestEnded("r", 1, Outcome(Ending.COMPLETED)))
    assert not play.machine.state.sequences


def test_a_resent_beginning_says_again_what_was_cached() -> None:
    """The gateway takes the number of cached tokens from whatever brings index 0."""
    play = Decode(blocks=12)
    play.local(spec("a", tokens=9, max_tokens=1))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.local(spec(tokens=9))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    play.hear(G, TokensWanted("r", 1, 0), sent(G, TokenChunk))
    first, again = play.messages(TokenChunk)[-2:]
    assert first.runs[0].cached_tokens == again.runs[0].cached_tokens == 8


def test_a_finished_sequence_whose_gateway_never_speaks_is_dropped_in_the_end() -> None:
    """Nothing is kept for ever."""
    play = Decode()
    play.local(spec(tokens=3, max_tokens=1))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.wait(59.0)
    assert "r" in play.machine.state.sequences
    play.wait(2.0)
    assert not play.machine.state.sequences


# --- cancel -------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["router", "gateway"])
@pytest.mark.parametrize(
    "stage", ["remote", "announced", "committed", "local", "between", "step", "finished"]
)
def test_a_cancel_has_effect_in_every_stage(stage: str, by: str) -> None:
    """(19) Whoever says it and whenever: every block is back as soon as nothing touches it."""
    play = Decode()
    writing = stage in ("remote", "announced")
    if writing or stage == "committed":
        ticket = play.remote(spec(tokens=6, max_tokens=1 if stage == "finished" else 10))
        if stage == "announced":
            announced = ChunkAnnounced("r", 1, sums(ticket, 6, last=0))
            play.hear(P, announced, Like(VerifyBlocks))
        if stage == "committed":
            play.complete(ticket, 6)
    else:
        play.local(spec(tokens=6, max_tokens=1 if stage == "finished" else 10))
        if stage in ("step", "finished"):
            more = (STEP,) if stage == "step" else ()
            play.stepped((50,), ADVANCED, *more, sent(G, TokenChunk))
    said = (sent(P, TicketRevoked),) if writing else ()
    if by == "router":
        play.cancel("r", *said)
        play.cancel("r")
    else:
        play.hear(G, RequestEnded("r", 1, CANCELLED), *said)
        play.hear(G, RequestEnded("r", 1, CANCELLED))
    assert not play.machine.state.sequences
    if writing:
        play.hear(P, WriterStopped("r", 1))
    elif play.machine.scheduler.step_since is not None:
        assert play.states()["RESIDENT"] == 2, "the step still uses them"
        play.stepped((50,))
    assert play.used() == 0


def test_blocks_of_a_step_are_free_only_when_it_returned() -> None:
    """(16) A request that ends in mid step gives nothing to the one admitted meanwhile."""
    play = Decode(blocks=4)
    play.local(spec("a", tokens=8, max_tokens=4))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    play.cancel("a")
    refused = sent(R, WorkRefused, reason=Reason.NO_BLOCKS)
    play.reserve(spec("b", tokens=12, first=20, max_tokens=4), None, refused)
    play.stepped((51,))
    play.local(spec("b", tokens=12, first=20, max_tokens=4), epoch=2)


# --- life ---------------------------------------------------------------------------------------


def test_who_is_handed_over_is_told_apart_from_who_is_computed_here() -> None:
    """Both wait; routers shorten what they expect of chunks for the one that joins."""
    play = Decode()
    play.remote(spec("a"))
    play.local(spec("b", first=60))
    play.wait(0.1)
    told = play.messages(WorkerStatus)[-1]
    assert (told.waiting, told.joining) == (2, 1)


def test_a_request_that_came_and_went_between_two_statuses_is_told() -> None:
    """The router counts its blocks until the next status, which must not wait for the beat."""
    play = Decode()
    for request_id in ("a", "b"):
        told = len(play.messages(WorkerStatus))
        play.local(spec(request_id, tokens=2, max_tokens=1))
        play.stepped((50,), Like(CallLedger), sent(G, TokenChunk))
        play.hear(G, RequestEnded(request_id, 1, Outcome(Ending.COMPLETED)))
        play.wait(0.06)
        assert len(play.messages(WorkerStatus)) > told
        assert play.messages(WorkerStatus)[-1].running == 0


def test_a_suspect_worker_takes_nothing_new_and_goes_on_with_what_it_has() -> None:
    """A lease permits new work and transitions; stepping is safe without one."""
    play = Decode()
    play.local(spec("r", tokens=2, max_tokens=3))
    play.feed(LeaseChanged(LeaseState.SUSPECT))
    play.reserve(spec("b", tokens=2), None, sent(R, WorkRefused, reason=Reason.SUSPECT))
    play.stepped((50,), STEP, run(0, 50))
    assert play.messages(WorkerStatus)[-1].accepting is False


def test_a_draining_worker_finishes_what_it_has_and_exits() -> None:
    """Nothing new; code 0 when the last block is back."""
    play = Decode()
    play.local(spec("r", tokens=2, max_tokens=1))
    play.feed(DrainRequested(), sent(R, MoveOffered, request_id="r"))
    play.reserve(spec("b", tokens=2), None, sent(R, WorkRefused, reason=Reason.DRAINING))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.hear(G, RequestEnded("r", 1, Outcome(Ending.COMPLETED)), Exit(0, "drained"))
    play.feed(DrainRequested())


def test_a_restart_ends_between_two_steps_and_leaves_everything_as_it_is() -> None:
    """What the step in flight brings is sent; then the successor goes on."""
    play = Decode()
    play.local(spec("r", tokens=2, max_tokens=9))
    play.feed(RestartRequested())
    play.reserve(spec("b", tokens=2), None, sent(R, WorkRefused, reason=Reason.DRAINING))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk), Exit(EXIT_RESTART, "restart"))
    assert play.machine.leaving and "r" in play.machine.state.sequences
    assert play.last(RecordStep).attempts == (), "nobody is to blame for a restart"


def test_an_idle_worker_restarts_at_once() -> None:
    """Nothing runs: nothing is waited for."""
    play = Decode()
    play.feed(RestartRequested(), Exit(EXIT_RESTART, "restart"))


@pytest.mark.parametrize("stage", ["remote", "revoked", "local", "finished"])
def test_a_drain_ends_in_time_in_every_state(stage: str) -> None:
    """What still runs at ``drain_ms`` fails as draining, so that the router places it elsewhere;
    a writer that does not answer holds nobody up: the memory ends with the process."""
    play = Decode(drain_ms=1_000)
    if stage in ("remote", "revoked"):
        play.remote(spec("r", tokens=6))
    else:
        play.local(spec("r", tokens=6, max_tokens=1))
    if stage == "revoked":
        play.cancel("r", sent(P, TicketRevoked))
    if stage == "finished":
        play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.do(DrainRequested())
    assert play.wait(0.9) == []
    said = play.wait(0.3)
    assert said[-1] == Exit(0, "drained")
    failed = sent(R, WorkFailed, request_id="r", reason=Reason.DRAINING)
    told = any(failed.matches(each) for each in said)
    assert told == (stage in ("remote", "local"))


def test_a_hung_step_ends_the_process() -> None:
    """Peers and the lease cannot help a process whose engine does not return."""
    play = Decode()
    play.local(spec())
    play.wait(29.0)
    assert not any(isinstance(each, Exit) for each in play.all)
    play.now += 2.0
    play.feed(TimePassed(), Like(Exit, code=75))


def test_a_gateway_that_is_over_is_ended_for() -> None:
    """Its requests are cancelled in the ledger by their owner, and every block comes back."""
    play = Decode()
    play.local(spec())
    ended = Like(CallLedger, op=Like(EndRequest, request_id="r", outcome=Like(Outcome)))
    play.lose(G, ended, gone=True)
    play.stepped((50,))
    assert play.used() == 0


def test_a_gateway_out_of_reach_makes_the_attempt_fail() -> None:
    """Tokens sent on the lost link may be lost: the router asks the gateway what it holds."""
    play = Decode()
    play.local(spec())
    play.lose(G, sent(R, WorkFailed, reason=Reason.NO_LINK))
    play.up(G, Role.GATEWAY)
    play.stepped((50,))
    play.local(spec(), epoch=2)


def test_a_failure_without_a_router_is_told_to_the_one_that_adopts() -> None:
    """Nobody is there to place it again; whoever comes asks for the attempt and hears the end."""
    play = Decode()
    play.remote(spec())
    play.lose(R, gone=True)
    play.lose(P, gone=True)
    play.up(R1, Role.ROUTER)
    unknown = sent(R1, WorkFailed, request_id="r", epoch=1, reason=Reason.UNKNOWN_ATTEMPT)
    play.hear(R1, WorkAdopted("r", 1, 2, G), unknown)


def test_an_adopted_attempt_runs_on_and_reports_to_its_new_router() -> None:
    """Nothing of it changes; only the new router may cancel it from then on."""
    play = Decode()
    play.local(spec())
    play.up(R1, Role.ROUTER)
    play.hear(R1, WorkAdopted("r", 1, 2, G), sent(R1, DecodeReserved, request_id="r", epoch=1))
    play.hear(R, CancelWork("r", 1, Reason.SUPERSEDED, 1))
    play.hear(R, WorkAdopted("r", 1, 1, G))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    failed = sent(R1, WorkFailed, request_id="r", reason=Reason.NO_LINK)
    play.lose(G, failed)


def test_a_router_of_a_higher_turn_may_cancel_before_it_has_said_that_it_adopts() -> None:
    """Its cancel is newer than whatever this worker heard."""
    play = Decode()
    play.local(spec())
    play.up(R1, Role.ROUTER)
    play.hear(R1, CancelWork("r", 1, Reason.SUPERSEDED, 2))
    assert not play.machine.state.sequences
    play.stepped((50,))


def test_an_attempt_of_a_later_epoch_is_not_adopted_by_an_older_word() -> None:
    """The asking router is behind: it hears of that from the ledger."""
    play = Decode()
    play.local(spec(), epoch=3)
    play.hear(R1, WorkAdopted("r", 2, 5, G))
    assert play.machine.state.sequences["r"].router == R


def test_only_the_blamed_rows_of_a_failed_step_end() -> None:
    """The others are stepped again, in place."""
    play = Decode(growth_tokens=0)
    play.local(spec("a", tokens=2, max_tokens=3))
    play.reserve(spec("b", tokens=2, first=20), None, sent(R, DecodeReserved))
    play.stepped((50,), ADVANCED, STEP, sent(G, TokenChunk))
    step = play.last(RunStep)
    failed = sent(R, WorkFailed, request_id="b", reason=Reason.DECODE_ERROR, retryable=False)
    play.feed(StepFailed(step.step, ("b",), "NaN", retryable=False), failed, STEP)
    assert [row.request_id for row in play.last(RunStep).rows] == ["a"]
    assert play.last(RunStep).rows[0].start == step.rows[0].start


def test_a_suspect_is_stepped_alone_in_turn_with_all_others() -> None:
    """(9) Should it end this worker, nobody else is blamed; nobody waits more than one step."""
    play = Decode(blocks=16)
    play.local(spec("a", first=1))
    for name, first, alone in (("b", 11, False), ("s", 21, True), ("t", 31, True)):
        reserved = sent(R, DecodeReserved, request_id=name)
        play.reserve(spec(name, first=first), None, reserved, alone=alone)
    names = []
    for _ in range(7):
        step = play.last(RunStep)
        names.append("".join(row.request_id for row in step.rows))
        record = play.last(RecordStep)
        assert [each.request_id for each in record.attempts] == list(names[-1])
        results = tuple(Sampled(50) for _ in step.rows)
        sums = tuple((7,) * len(seals) for seals in step.seals)
        play.do(StepFinished(step.step, results, sums, 0.01))
    assert names == ["a", "s", "ab", "t", "ab", "s", "ab"]


def test_the_record_names_nobody_when_no_step_runs() -> None:
    """A worker that is killed while it idles blames nobody."""
    play = Decode()
    play.local(spec(max_tokens=1))
    assert play.last(RecordStep).attempts == (AttemptId("r", 1),)
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    assert play.last(RecordStep).attempts == ()


def test_a_successor_tells_every_router_whose_step_its_former_self_left() -> None:
    """Before anything else it says on that link."""
    left = LastStep(Peer("decode-0", 99), (AttemptId("x", 3),))
    play = Decode(left=left)
    assert play.messages(LastStep, R) == [left]
    play.up(R1, Role.ROUTER, Send(R1, left))


def test_a_message_that_fits_nothing_is_counted_and_dropped() -> None:
    """(12) Unknown ids and foreign messages change nothing."""
    play = Decode()
    play.hear(R, WorkRefused("x", 1, Reason.INTERNAL))
    assert play.measured("stale_messages_total", kind="unknown") == 1
    play.hear(P, WriterStopped("x", 1))
    play.hear(P, PrefillFailed("x", 1, Reason.INTERNAL))
    play.hear(P, ChunkAnnounced("x", 1, ()))
    play.hear(R, CancelWork("x", 1, Reason.INTERNAL))
    play.hear(G, TokensWanted("x", 1, 0))
