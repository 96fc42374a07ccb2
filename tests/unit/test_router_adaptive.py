"""Conversations with a router that chooses each request's way by what it would take and cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.ids import Peer
from baton.core.outcomes import Reason
from baton.core.slo import Slo
from baton.core.step_times import MICROS_MAX, PICOS_MAX, StepCurve
from baton.ports.driving import CallLedger, Measure, Note
from baton.ports.ledger import AdmitRequest, PlaceRequest
from baton.wire.messages import MoveOffered, RequestEnded, RequestRefused, RequestSpec, WorkFailed
from support.machine_playbook import ids, request, sent
from support.router_playbook import COMPLETED, D1, FENCE, P1, D, G, P, Router, call, cancels, spec

#: 5 ms and 0.5 ms a token: 1,000 tokens take half a second.
CURVE = StepCurve((1, 64, 256), (5_500, 37_000, 133_000))
#: Steps of four rows keep the SLO; with a block of a prompt beside them they do not.
SLOW = StepCurve((1, 64, 256), (40_000, 63_900, 150_000))
SLO = Slo(ttft_s=1.0, itl_s=0.05)


class Adaptive(Router):
    """A router with an SLO; its workers have computed for a while."""

    def __init__(self, workers: tuple[Peer, ...] = (P, D), **fields: Any) -> None:
        super().__init__((), **{"slo": SLO, **fields})
        self.prompts = 0
        for worker in workers:
            self.says(worker)

    def says(self, worker: Peer, *expected: object, **status: Any) -> None:
        """``worker`` tells how it is: without work unless ``status`` says otherwise."""
        chunk = 128 if worker in (D, D1) else 256
        status = {"blocks": 1_000, "curve": CURVE, "chunk_tokens": chunk, **status}
        self.ready(worker, *expected, **status)

    def goes(self, name: str, tokens: int, decode: Peer, prefill: Peer | None) -> None:
        """A request with a new prompt of ``tokens`` tokens goes that way."""
        self.place(self.fresh(name, tokens), decode, prefill)

    def fresh(self, name: str, tokens: int) -> RequestSpec:
        """Return a request whose prompt shares nothing with another one's."""
        self.prompts += 1
        prompt = (1_000 + self.prompts, *range(1, tokens))
        return request(name, prompt, gateway=G, max_tokens=20)


def busy(rows: int, context: int = 300) -> dict[str, int]:
    """``rows`` streams run."""
    return {"running": rows, "context_tokens": rows * context}


def test_a_short_prompt_goes_straight_to_decode() -> None:
    """It is less than a hand-over, also beside streams, whose gaps stay within the SLO."""
    play = Adaptive()
    play.says(D, **busy(8))
    play.goes("r", 20, D, None)


def test_what_is_nearly_all_cached_goes_straight_to_decode() -> None:
    """The same prompt once more: only its last block is left to compute."""
    play = Adaptive()
    play.says(D, **busy(8))
    play.place(spec("a", 500), D, P)
    play.stores(D, 500)
    play.says(D, **busy(8))
    play.place(spec("b", 500), D, None)


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    """Even if it would have its first token sooner there: they would lose theirs."""
    play = Adaptive()
    play.says(P, waiting=1, queued_tokens=600)
    play.says(D, curve=SLOW, **busy(4))
    play.goes("r", 1_000, D, P)


def test_without_another_way_it_is_computed_beside_them() -> None:
    """No prefill worker is there: nobody waits for ever."""
    play = Adaptive((D,))
    play.says(D, curve=SLOW, **busy(4))
    play.goes("r", 1_000, D, None)


def test_a_long_prompt_goes_to_prefill_while_streams_run() -> None:
    """Both ways keep the SLOs; decode's would delay its streams, and takes longer."""
    play = Adaptive()
    play.says(D, **busy(4))
    play.goes("r", 1_000, D, P)


def test_what_was_given_counts_as_joining_until_the_worker_tells() -> None:
    """What a prefill worker computes does, what decode computes itself does not."""
    play = Adaptive()
    play.says(D, **busy(8))
    view = play.machine.state.placement.workers[D]
    play.goes("local", 20, D, None)
    assert view.joining == 0
    play.goes("remote", 1_000, D, P)
    assert view.joining == 1
    play.says(D, waiting=2, joining=2)
    assert view.joining == 2


def test_decode_helps_when_prefill_is_overloaded() -> None:
    """Within the slack of its streams: the first token would come too late on the other way."""
    play = Adaptive()
    play.says(P, waiting=2, queued_tokens=3_000)
    play.says(D, **busy(4))
    play.goes("r", 600, D, None)


def test_it_waits_for_prefill_when_that_is_better_than_what_is_free() -> None:
    """Decode would stall its streams, prefill has its hands full: what waits costs nothing. Then
    it goes there."""
    play = Adaptive(prefill_ahead_max=1)
    play.says(P, waiting=1, queued_tokens=200)
    play.says(D, curve=SLOW, **busy(4))
    play.admit(spec("r", 600))
    play.says(P, call(PlaceRequest, decode=D, prefill=P))


def test_who_waits_for_a_row_keeps_no_prefill_worker_from_the_next() -> None:
    """A long context would break every gap, a short one does not: that one goes, and is not
    expected to wait for the other's prompt."""
    heavy = StepCurve(CURVE.tokens, CURVE.micros, 0, 20_000_000)
    play = Adaptive()
    play.says(P, curve=CURVE)
    play.says(D, curve=heavy, **busy(8, context=100))
    play.admit(play.fresh("long", 2_000))
    play.goes("short", 300, D, P)
    forecast = play.machine.state.entries["short"].forecast
    assert forecast is not None and forecast.chosen.raw_s < 0.25
    assert play.machine.state.entries["long"].epoch == 1
    assert not play.machine.state.entries["long"].placed_once


def test_a_prompt_is_held_back_while_one_more_row_would_break_every_gap() -> None:
    """Eight rows keep the SLO, nine do not. It has cost nothing yet when one of them is over."""
    steep = StepCurve((1, 8, 9, 128), (20_000, 48_000, 60_000, 90_000))
    play = Adaptive()
    play.says(D, curve=steep, **busy(8))
    play.admit(spec("r", 200))
    assert play.wait(5.0) == []
    play.says(D, call(PlaceRequest, decode=D), curve=steep, **busy(7))


def test_nobody_is_refused_for_the_sake_of_others_gaps() -> None:
    """Held back until half of the time that a request may wait, then placed."""
    steep = StepCurve((1, 8, 9, 128), (20_000, 48_000, 60_000, 90_000))
    play = Adaptive(queue_deadline_ms=10_000)
    play.says(D, curve=steep, **busy(8))
    play.admit(spec("r", 200))
    said = play.wait(5.2)
    assert [call(PlaceRequest, decode=D).matches(each) for each in said] == [True]


def test_room_for_what_is_there_comes_before_what_is_new() -> None:
    """The running answers will want 990 of 1,000 blocks: a prompt that fits now does not go, until
    they want less. A retried one goes: it was taken in once."""
    play = Adaptive()
    play.says(D, free=900, growth_blocks=890, **busy(4))
    play.admit(spec("r", 200))
    play.says(D, call(PlaceRequest), free=900, growth_blocks=300, **busy(4))
    play.counted("r")
    play.says(D, free=900, growth_blocks=890, **busy(4))
    play.hear(D, WorkFailed("r", 1, Reason.NO_BLOCKS), *cancels(D, P), FENCE)
    play.retried(call(PlaceRequest, epoch=2))


def test_of_several_workers_the_pair_with_the_least_to_do() -> None:
    """Each prefill worker is estimated with each decode worker."""
    play = Adaptive((P, P1, D, D1))
    play.says(P, waiting=2, queued_tokens=900)
    play.says(D, **busy(8))
    play.says(D1, **busy(4))
    play.goes("r", 1_000, D1, P1)


def test_a_long_prefix_leads_to_the_worker_that_has_it_until_that_is_overloaded() -> None:
    """What is cached need not be computed; a worker with a long queue is not worth it."""
    play = Adaptive((P, D, D1))
    play.place(spec("a", 500, max_tokens=5), D, P)
    play.stores(D, 500)
    play.says(D, **busy(1))
    play.says(D1, **busy(1))
    longer = spec("b", 600, max_tokens=5)
    play.admit(longer, call(PlaceRequest, decode=D))
    play.counted("b", D, play.last(CallLedger).op.prefill)
    steep = StepCurve((1, 8, 9, 128), (20_000, 48_000, 60_000, 90_000))
    play.says(D, curve=steep, **busy(8))
    play.says(D1, **busy(1))
    play.admit(spec("c", 600, max_tokens=5), call(PlaceRequest, decode=D1))


def test_before_anything_is_known_it_goes_as_in_split_mode() -> None:
    """The first steps are what everything is learned from."""
    play = Router(slo=SLO)
    play.place(spec("r", 20), D, P)
    alone = Router((D,), slo=SLO)
    alone.place(spec("r", 20), D, None)


def test_a_request_that_decode_computed_is_placed_again_like_any_other() -> None:
    """Decode fails: the next attempt may go another way."""
    play = Adaptive((P, D, D1))
    play.says(D1, **busy(4))
    play.place(spec("r", 20), D, None)
    play.lose(D, FENCE)
    play.retried(call(PlaceRequest, epoch=2, decode=D1, prefill=None), output=ids(7))
    play.counted("r", D1, None, epoch=2)


def test_what_was_expected_is_held_against_what_came() -> None:
    """The log tells the way, the others and the difference; metrics tell error and regret; the
    next estimate is the better for it."""
    play = Adaptive()
    errors = []
    for number in range(12):
        play.says(P)
        play.says(D, **busy(4))
        play.goes(f"r{number}", 1_000, D, P)
        play.hear(G, RequestEnded(f"r{number}", 1, COMPLETED, ttft_ms=900.0))
        last = [each for each in play.all if isinstance(each, Measure)]
        errors.append([m.value for m in last if m.name == "ttft_forecast_error_ratio"][-1])
    assert errors[0] > 0.3 and errors[-1] < 0.05
    chosen = [each for each in play.all if isinstance(each, Note) and each.event == "chosen"][-1]
    assert "prefill-0 for decode-0" in str(chosen.fields["why"])
    assert "other ways: decode-0 " in str(chosen.fields["why"])
    held = [each for each in play.all if isinstance(each, Note)]
    told = [each.fields for each in held if each.event == "forecast_held_against"][-1]
    assert told["actual_ms"] == 900.0 and told["way"] == "remote"
    assert told["expected_ms"] == pytest.approx(900, rel=0.05)
    ways = [m for m in play.all if isinstance(m, Measure) and m.name == "ways_total"]
    assert [m.labels["way"] for m in ways] == ["remote"] * 12


def test_a_retried_request_teaches_nothing() -> None:
    """Its first token was late for other reasons."""
    play = Adaptive()
    play.says(D, **busy(4))
    play.goes("r", 1_000, D, P)
    play.failed(D, Reason.NO_BLOCKS, *cancels(D, P), FENCE)
    play.says(P)
    play.retried(call(PlaceRequest, epoch=2))
    play.counted("r", epoch=2)
    play.hear(G, RequestEnded("r", 2, COMPLETED, ttft_ms=9_000.0))
    assert play.machine.state.placement.choice.estimator.lines["remote"].count == 0


@pytest.mark.parametrize("refuse", [True, False])
def test_what_would_only_wait_is_refused_with_an_honest_time(refuse: bool) -> None:
    """4,000 tokens are before it, which take two seconds and more: it may come again then."""
    play = Adaptive(slo=Slo(2.0, 0.05, refuse=refuse), prefill_ahead_max=1)
    play.says(P, waiting=1, queued_tokens=1_000)
    play.says(D, curve=SLOW, free=5, **busy(4))
    for number in range(3):
        play.admit(spec(f"w{number}", 1_000))
    if not refuse:
        play.submit(spec("r", 100), call(AdmitRequest))
        return
    play.submit(spec("r", 100), sent(G, RequestRefused, reason=Reason.OVERLOADED))
    refused = play.messages(RequestRefused)[-1]
    assert 2_000 <= refused.retry_after_ms <= 3_500 and "would wait" in refused.message


def test_nobody_waits_for_requests_whose_gateway_is_away() -> None:
    """They wait for their client to come back, for a minute perhaps: that delays nobody."""
    play = Adaptive(slo=Slo(2.0, 0.05, refuse=True), prefill_ahead_max=1)
    play.says(P, waiting=1, queued_tokens=1_000)
    play.says(D, curve=SLOW, free=5, **busy(4))
    for number in range(3):
        play.admit(replace(spec(f"w{number}", 1_000), resume_ms=60_000))
    for entry in play.machine.state.entries.values():
        entry.gateway_lost_at = play.now
    play.submit(spec("r", 100), call(AdmitRequest))


def test_a_full_queue_costs_little_until_something_changes() -> None:
    """Whoever waits is estimated again when a worker has spoken or time has passed, not with every
    message."""
    play = Adaptive(prefill_ahead_max=1)
    play.says(P, waiting=1, queued_tokens=200)
    play.says(D, curve=SLOW, **busy(4))
    looks = []
    choose = play.machine.state.placement.choose
    play.machine.state.placement.choose = lambda entry, now: (
        looks.append(entry.spec.request_id) or choose(entry, now)
    )
    for number in range(10):
        play.admit(play.fresh(f"r{number}", 600))
    assert len(looks) == 10
    play.says(P, call(PlaceRequest, request_id="r0"), waiting=0)
    assert len(looks) == 20


#: What a broken worker may say that could be true of some worker.
BROKEN: dict[str, dict[str, Any]] = {
    "endless queue": {"queued_tokens": 2**53, "waiting": 2**53},
    "endless streams": {"running": 2**53, "context_tokens": 2**53, "growth_blocks": 2**53},
    "no size": {"block_size": 0, "chunk_tokens": 0},
    "no memory": {"blocks": 0},
    "endless chunk": {"chunk_tokens": 2**53},
    "no time": {"curve": StepCurve((1,), (1,))},
    "endless steps": {"curve": StepCurve((1, 2), (MICROS_MAX, MICROS_MAX), PICOS_MAX)},
    "endless tokens": {"curve": StepCurve((2**31 - 1,), (1,))},
    "endless hand-over": {"handover_us": MICROS_MAX},
}


@pytest.mark.parametrize("status", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("broken", [P1, D1])
def test_a_worker_that_says_nonsense_stops_nobody(broken: Peer, status: dict[str, Any]) -> None:
    """Beside it one is healthy: requests are placed, and none is refused for the other's sake."""
    play = Adaptive((P, D, P1, D1), slo=replace_slo(refuse=True))
    play.says(broken, **status)
    assert play.machine.state.placement.drain_s(1_000) < 1.0
    for number, tokens in enumerate((20, 600, 1_000)):
        spec_ = play.fresh(f"r{number}", tokens)
        play.admit(spec_, call(PlaceRequest, request_id=spec_.request_id))
        play.says(broken, **status)


def replace_slo(**fields: Any) -> Slo:
    return dataclasses.replace(SLO, **fields)


def test_the_wait_is_that_for_whoever_is_done_first() -> None:
    """1,000 tokens beside two prefill workers of 1,925 tokens/s: both take part unless one has
    more before it than the other needs for all of them."""
    play = Adaptive((P, P1))
    placement = play.machine.state.placement
    speed = 256 / CURVE.seconds(256)
    assert placement.drain_s(1_000) == pytest.approx(500 / speed)
    play.says(P1, queued_tokens=400)
    assert placement.drain_s(1_000) == pytest.approx(700 / speed)
    play.says(P1, queued_tokens=50_000)
    assert placement.drain_s(1_000) == pytest.approx(1_000 / speed)


def test_a_moved_request_needs_no_more_than_it_may_become() -> None:
    """Whatever its draining worker says of its length: it would fit nowhere."""
    play = Adaptive()
    play.goes("r", 600, D, P)
    play.hear(D, MoveOffered("r", 1, 2**53))
    assert play.machine.state.entries["r"].tokens == 620


def test_a_worker_that_is_not_mixed_computes_a_prompt_only_where_nobody_else_can() -> None:
    """Also a short one; one that has no prefill worker to write there does."""
    play = Adaptive((P, D))
    play.says(D, mixed=False)
    play.goes("r", 20, D, P)
    play.says(D, mixed=False, writers=())
    play.goes("s", 1_000, D, None)


def test_who_is_too_late_lets_those_pass_that_can_be_in_time() -> None:
    """The first token is to come within a second. Of two that wait the older one cannot have it
    any more; in the order of arrival neither would."""
    play = Adaptive(prefill_ahead_max=1, queue_deadline_ms=10_000)
    play.says(P, waiting=1, queued_tokens=200)
    play.says(D, curve=SLOW, **busy(4))
    play.admit(play.fresh("old", 600))
    assert play.wait(0.8) == []
    play.admit(play.fresh("new", 600))
    play.says(P, call(PlaceRequest, request_id="new"))
    play.counted("new")
    play.says(P, call(PlaceRequest, request_id="old"))


def test_nobody_lets_others_pass_for_ever() -> None:
    """After half of the time that it may wait who came first is first again."""
    play = Adaptive(prefill_ahead_max=1, queue_deadline_ms=10_000)
    play.says(P, waiting=1, queued_tokens=200)
    play.says(D, curve=SLOW, **busy(4), free=5)
    play.admit(play.fresh("old", 600))
    assert play.wait(5.1) == []
    play.admit(play.fresh("new", 600))
    play.says(D, call(PlaceRequest, request_id="old"), curve=SLOW, **busy(4))


def test_a_cached_prompt_is_not_given_up_for_its_length() -> None:
    """Of 1,500 tokens 1,400 are cached: that takes no second."""
    play = Adaptive(prefill_ahead_max=1)
    play.place(spec("a", 1_400), D, P)
    play.stores(D, 1_400)
    play.says(P, waiting=1, queued_tokens=200)
    play.says(D, curve=SLOW, **busy(4))
    play.admit(spec("long", 1_500))
    assert play.wait(0.5) == []
    play.admit(play.fresh("new", 600))
    play.says(P, call(PlaceRequest, request_id="long"))


def test_who_borrows_cores_is_expected_to_be_as_fast_as_that() -> None:
    """Decode has those of an idle prefill worker and the other way round; nobody has
    those of a worker on another host."""
    play = Adaptive()
    helped = StepCurve((1, 64, 256), (3_300, 22_200, 79_800))
    play.says(P, curve_borrowed=helped)
    play.says(D, curve_borrowed=helped)
    placement = play.machine.state.placement
    choice, decode, prefill = placement.choice, placement.workers[D], placement.workers[P]
    assert choice.speed(decode, [prefill]).now == choice.speed(prefill, [decode]).now == helped
    assert choice.speed(decode, [prefill]).alone == CURVE
    assert choice.speed(decode, []).now == CURVE
    decode.host = "other"
    assert choice.speed(decode, [prefill]).now == CURVE
    decode.host = prefill.host
    play.says(D, curve_borrowed=helped, **busy(1))
    assert choice.speed(prefill, [decode]).now == CURVE
    assert choice.speed(decode, [prefill]).now == helped
    play.says(P, curve_borrowed=helped, waiting=1, queued_tokens=100)
    assert choice.speed(decode, [prefill]).now == CURVE
    play.says(P, curve_borrowed=helped)
    prefill.given()
    assert choice.speed(decode, [prefill]).now == CURVE


def test_who_is_late_anyway_costs_a_long_queue_next_to_nothing() -> None:
    """What is cached of it is asked for where that decides; the order is not with every message."""
    play = Adaptive(prefill_ahead_max=1)
    play.says(P, waiting=1, queued_tokens=200)
    play.says(D, curve=SLOW, **busy(4))
    for number in range(10):
        play.admit(play.fresh(f"r{number}", 600))
    placement = play.machine.state.placement
    asked, ordered, in_order = [], [], placement.in_order
    placement._cached = lambda view, entry: asked.append(entry.spec.request_id) or 0
    placement.in_order = lambda queue, now: ordered.append(now) or in_order(queue, now)
    assert play.wait(2.0) == []
    asked.clear()
    ordered.clear()
    placement.in_order(play.machine.state.queue, play.now)
    assert asked == []
    ordered.clear()
    play.admit(play.fresh("new", 600))
    assert ordered == []
