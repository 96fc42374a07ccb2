"""What a router knows of decode workers' prefix caches, and where requests go by it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from baton.core.ids import Peer, Role
from baton.core.limits import Limits
from baton.core.prefix import chain_of, numbers_of, short_names
from baton.core.slo import Slo
from baton.core.step_times import StepCurve
from baton.ports.driving import CallLedger, LedgerAnswered, Measure
from baton.ports.ledger import Done, PlaceRequest
from baton.router.prefixes import LIST_PAUSE_S, PrefixIndex
from baton.router.spread import common, within_balance
from baton.router.workers import WorkerView
from baton.wire.messages import (
    AssignPrefill,
    BlocksChanged,
    BlocksListed,
    BlocksWanted,
    DecodeReserved,
    RequestEnded,
    RequestSpec,
    SubmitRequest,
    WorkerStatus,
)
from support.machine_playbook import ids, request
from support.router_playbook import (
    COMPLETED,
    D1,
    D1_AGAIN,
    ROOT,
    SIZE,
    D,
    G,
    P,
    R,
    Router,
)

#: 5 ms and 0.5 ms a token.
CURVE = StepCurve((1, 64, 256), (5_500, 37_000, 133_000))
A, B, C = (bytes([n]) * 8 for n in (1, 2, 3))


def known(index: PrefixIndex, peer: Peer = D) -> set[int]:
    return set(index.known[peer].names)


def set_of(*names: bytes) -> set[int]:
    return set(numbers_of(b"".join(names)))


class Told(PrefixIndex):
    """An index that has been told ``names`` by D, change ``number`` included."""

    def __init__(self, *names: bytes, number: int = 5, **limits: Any) -> None:
        super().__init__(Limits(**limits))
        self.meet(D, 0.0)
        assert self.to_ask(0.0) == [(D, BlocksWanted(0))]
        assert not self.listed(D, BlocksListed(number, 0, b"".join(names)), 0.0)
        self.check()


# --- the index ------------------------------------------------------------------------------------


def test_changes_are_taken_in_one_after_the_other() -> None:
    """What came is there, what went is not, and what is told twice counts once."""
    index = Told(A)
    assert not index.changed(D, BlocksChanged(6, B, A), 0.0)
    assert not index.changed(D, BlocksChanged(6, B, A), 0.0)
    assert not index.changed(D, BlocksChanged(7, B + C, A), 0.0)
    assert known(index) == set_of(B, C) and index.total == 2
    assert index.deadline() is None
    index.check()


@pytest.mark.parametrize(
    ("message", "why"),
    [(BlocksChanged(7, B), "gap"), (BlocksChanged(6, too_many=True), "too_many")],
)
def test_after_a_missed_change_nothing_is_known_until_all_is_told(
    message: BlocksChanged, why: str
) -> None:
    """What was known may have been evicted meanwhile; all is asked for again."""
    index = Told(A)
    assert index.changed(D, message, 1.0) == why
    assert known(index) == set() and index.total == 0
    assert not index.changed(D, BlocksChanged(message.number + 1, C), 1.0)
    assert known(index) == set(), "the page that is asked for will have it"
    assert index.to_ask(1.0) == [(D, BlocksWanted(0))]
    assert not index.listed(D, BlocksListed(9, 0, B), 1.0)
    assert not index.changed(D, BlocksChanged(10, C), 1.0)
    assert known(index) == set_of(B, C)
    index.check()


def test_a_change_that_was_lost_is_missed_by_the_next_status() -> None:
    """No change need follow for the router to notice."""
    index = Told(A)
    assert not index.told(D, 5, 1.0)
    assert index.told(D, 6, 1.0) == "gap"
    assert known(index) == set()
    assert not index.told(D, 6, 1.0), "it is asked already"


def test_pages_and_changes_in_between_make_one_whole() -> None:
    """A change behind a page counts for what that page says, whichever page its block is in."""
    index = PrefixIndex(Limits())
    index.meet(D, 0.0)
    index.to_ask(0.0)
    assert not index.listed(D, BlocksListed(3, 0, A + B, next=100), 0.0)
    assert index.to_ask(0.0) == [(D, BlocksWanted(100))]
    assert not index.changed(D, BlocksChanged(4, b"", A), 0.0)
    assert not index.listed(D, BlocksListed(4, 100, C), 0.0)
    assert known(index) == set_of(B, C) and index.deadline() is None


def test_a_page_of_another_number_begins_again() -> None:
    """A change between two pages is missing: what the first page said may not be so any more."""
    index = PrefixIndex(Limits())
    index.meet(D, 0.0)
    index.to_ask(0.0)
    index.listed(D, BlocksListed(3, 0, A, next=100), 0.0)
    assert index.listed(D, BlocksListed(5, 100, B), 0.0) == "gap"
    assert known(index) == set()
    assert index.to_ask(LIST_PAUSE_S) == [(D, BlocksWanted(0))]


def test_a_page_that_does_not_come_is_asked_for_again() -> None:
    """And one that comes twice, or unasked, counts once."""
    index = PrefixIndex(Limits())
    index.meet(D, 0.0)
    assert index.to_ask(0.0) and not index.to_ask(0.5)
    assert index.deadline() == 1.0
    assert index.to_ask(1.0) == [(D, BlocksWanted(0))]
    index.listed(D, BlocksListed(3, 0, A), 1.1)
    index.listed(D, BlocksListed(3, 0, A + B), 1.2)
    index.listed(D, BlocksListed(3, 50, C), 1.2)
    assert known(index) == set_of(A)
    assert not index.listed(D1, BlocksListed(3, 0, A), 1.2), "nobody knows that worker"


def test_a_worker_that_misses_all_the_time_is_not_asked_all_the_time() -> None:
    """Two first pages are ``LIST_PAUSE_S`` apart."""
    index = Told(A)
    now, asked = 10.0, 0
    for number in range(100, 10_000, 10):
        index.changed(D, BlocksChanged(number, B), now)
        for _, wanted in index.to_ask(now):
            asked += 1
            index.listed(D, BlocksListed(number, wanted.start, A), now)
        now += 0.001
    assert asked <= 0.99 / LIST_PAUSE_S + 1


def test_the_index_has_a_bound() -> None:
    """What is beyond counts as not cached; what goes makes room."""
    index = Told(A, prefix_index_blocks_max=2)
    index.meet(D1, 0.0)
    index.listed(D1, BlocksListed(1, 0, A + B + C), 0.0)
    index.check()
    assert index.total == 2 and len(known(index, D1)) == 1
    index.changed(D, BlocksChanged(6, b"", A), 0.0)
    index.changed(D, BlocksChanged(7, C), 0.0)
    assert known(index) == set_of(C)
    index.check()


def test_a_dead_worker_is_forgotten() -> None:
    """Its successor tells what it took over."""
    index = Told(A)
    index.forget(D)
    assert index.total == 0 and index.leading(D, tuple(set_of(A))) == 0
    assert not index.changed(D, BlocksChanged(6, B), 0.0)
    index.check()


def test_only_the_leading_blocks_count() -> None:
    """A block whose beginning was evicted is of no use."""
    index = Told(A, C)
    names = tuple(numbers_of(A + B + C))
    assert index.leading(D, names) == 1
    assert index.leading(D, names[2:]) == 1
    assert index.leading(D1, names) == 0


def test_common_leading_names_are_found() -> None:
    """Of equal, diverging, shorter and empty ones."""
    one = tuple(range(100, 137))
    for cut in (0, 1, 5, 36, 37):
        assert common(one, (*one[:cut], *range(1_000, 1_020))) == cut
        assert common(one[:cut], one) == cut


# --- placement ------------------------------------------------------------------------------------


class Placing(Router):
    """A router with decode workers whose caches are known."""

    def __init__(self, workers: tuple[Peer, ...] = (D, D1), **fields: Any) -> None:
        super().__init__((), split=P in workers, **fields)
        self.numbers: Counter[Peer] = Counter()
        for worker in workers:
            self.says(worker)
            if worker != P:
                self.lists(worker)

    def lists(self, worker: Peer, stored: bytes = b"") -> None:
        """It answers what it was asked when its link opened."""
        wanted = self.messages(BlocksWanted, worker)[-1]
        self.numbers[worker] += 1
        self.do_hear(worker, BlocksListed(self.numbers[worker], wanted.start, stored))

    def stores(self, worker: Peer, tokens: int, first: int = 0) -> None:
        """It says that it has the full blocks of that prompt."""
        self.numbers[worker] += 1
        self.do_hear(worker, BlocksChanged(self.numbers[worker], names(tokens, first)))

    def says(self, worker: Peer, **status: Any) -> None:
        status = {"blocks": 10_000, "blocks_told": self.numbers[worker], **status}
        self.ready(worker, **status)

    def goes(self, spec: RequestSpec) -> Peer:
        """Place a request; return where it went."""
        self.do_hear(G, SubmitRequest(spec))
        self.do(LedgerAnswered(self.last(CallLedger).op, Done(1, R.ADMITTED)))
        op = self.last(CallLedger).op
        assert isinstance(op, PlaceRequest) and op.request_id == spec.request_id
        self.do(LedgerAnswered(op, Done(1, R.PLACED)))
        return op.decode


def names(tokens: int, first: int = 0) -> bytes:
    return short_names(chain_of(ROOT, ids(*range(first, first + tokens)), SIZE))


def prompt(name: str, tokens: int, first: int = 0) -> RequestSpec:
    return request(name, tuple(range(first, first + tokens)), gateway=G)


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    """Also to a worker that has a little more to do."""
    play = Placing()
    play.stores(D1, 800)
    play.says(D1, running=4)
    assert play.goes(prompt("a", 900)) == D1
    assert play.goes(prompt("b", 900, first=5_000)) == D


def test_a_few_cached_tokens_are_not_worth_a_longer_queue() -> None:
    """A short prompt is soon computed."""
    play = Placing()
    play.stores(D1, 64)
    play.says(D1, running=4)
    assert play.goes(prompt("a", 70)) == D


def test_what_was_evicted_does_not_count() -> None:
    """The router knows it from the worker, not from what it once sent there."""
    play = Placing()
    play.stores(D1, 800)
    play.numbers[D1] += 1
    play.do_hear(D1, BlocksChanged(play.numbers[D1], b"", names(800)))
    play.says(D1, running=1)
    assert play.goes(prompt("a", 900)) == D


def test_one_prefix_for_all_does_not_make_a_hot_spot() -> None:
    """However much of it is cached there: a quarter more than the share, and two."""
    play = Placing()
    play.stores(D, 1_600)
    went: Counter[Peer] = Counter()
    for number in range(40):
        went[play.goes(prompt(f"r{number}", 1_700))] += 1
        assert went[D] <= math.ceil(1.25 * (number + 1) / 2) + 2
    assert went[D] > went[D1] > 10


def test_within_balance_leaves_somebody() -> None:
    """Whatever the loads are, and the least loaded is among them."""
    for loads in ((0,), (0, 0), (9, 9, 9), (1, 50), (3, 4, 5, 40)):
        views = [
            WorkerView(
                Peer(f"d-{n}", n + 1), Role.DECODE, WorkerStatus(True, running=load), 0.0, "b"
            )
            for n, load in enumerate(loads)
        ]
        left = [view.status.running for view in within_balance(views)]
        assert min(loads) in left
        assert 50 not in left and 40 not in left


def test_a_burst_of_one_new_prompt_goes_to_one_place() -> None:
    """Nothing of it is stored yet, but it is where the first one is being computed."""
    play = Placing()
    first = play.goes(prompt("a", 900))
    assert play.goes(prompt("b", 900)) == first
    assert play.goes(prompt("c", 900, first=5_000)) != first


def test_what_is_being_computed_counts_until_the_attempt_is_over() -> None:
    """A cancelled one may never store it."""
    play = Placing()
    first = play.goes(prompt("a", 900))
    for worker in (D, D1):
        play.says(worker)
    play.do_hear(G, RequestEnded("a", 1, COMPLETED))
    play.says(first, running=1)
    assert play.goes(prompt("b", 900)) != first


def test_a_restarted_worker_is_asked_what_it_has() -> None:
    """It took its memory over, or made it anew: only it knows."""
    play = Placing()
    play.stores(D1, 800)
    play.do_lose(D1)
    play.says(D1_AGAIN, running=2)
    assert play.goes(prompt("a", 900)) == D
    play.do_hear(G, RequestEnded("a", 1, COMPLETED))
    play.says(D)
    play.lists(D1_AGAIN, names(800))
    assert play.goes(prompt("b", 900)) == D1_AGAIN


def test_a_lost_change_makes_the_router_ask_and_forget() -> None:
    """It does not place by what it only believes; the metric tells."""
    play = Placing()
    play.stores(D1, 800)
    play.numbers[D1] += 1
    play.says(D1, running=1)
    assert play.goes(prompt("a", 900)) == D
    resyncs = [each for each in play.all if isinstance(each, Measure)]
    assert Measure("prefix_resyncs_total", 1, {"reason": "gap"}) in resyncs
    play.do_hear(G, RequestEnded("a", 1, COMPLETED))
    play.wait(0.1)
    play.lists(D1, names(800))
    play.says(D, running=1)
    assert play.goes(prompt("b", 900)) == D1


def test_what_was_expected_is_held_against_what_decode_found() -> None:
    """Both sums, and their differences either way."""
    play = Placing()
    play.stores(D1, 800)
    assert play.goes(prompt("a", 900)) == D1
    play.do_hear(D1, DecodeReserved("a", 1, 784))
    play.do_hear(D1, DecodeReserved("a", 1, 784))
    found = {each.name: each.value for each in play.all if isinstance(each, Measure)}
    assert found["prefix_expected_tokens_total"] == 800
    assert found["prefix_found_tokens_total"] == 784
    assert found["prefix_misjudged_tokens_total"] == 16
    assert play.machine.gauges()["prefix_index_blocks"] == 50


def test_the_last_token_is_never_expected_to_be_cached() -> None:
    """A prompt of whole blocks leaves its last one to compute."""
    play = Placing()
    play.stores(D1, 800)
    assert play.goes(prompt("a", 800)) == D1
    play.do_hear(D1, DecodeReserved("a", 1, 784))
    found = {each.name: each.value for each in play.all if isinstance(each, Measure)}
    assert found["prefix_misjudged_tokens_total"] == 0


def test_round_robin_takes_each_in_turn_whatever_it_has() -> None:
    """For comparison: neither load nor prefixes count."""
    play = Placing(rule="round-robin")
    play.stores(D, 800)
    play.says(D1, running=5)
    assert [play.goes(prompt(f"r{n}", 900)) for n in range(4)] == [D, D1, D, D1]


def test_least_loaded_looks_at_the_load_alone() -> None:
    """For comparison: what is cached does not count."""
    play = Placing(rule="least-loaded")
    play.stores(D, 800)
    play.says(D, running=1)
    assert play.goes(prompt("a", 900)) == D1


@pytest.mark.parametrize(("rule", "goes"), [("prefix", D1), ("round-robin", D)])
def test_estimates_are_made_with_what_is_cached(rule: Any, goes: Peer) -> None:
    """Adaptive mode: the worker that need not compute it all is faster; for comparison only one
    worker is looked at."""
    play = Placing((), slo=Slo(10.0, 10.0), rule=rule)
    for worker in (D, D1):
        play.says(worker, curve=CURVE, chunk_tokens=128)
        play.lists(worker)
    play.stores(D1, 800)
    assert play.goes(prompt("a", 900)) == goes


def test_in_split_mode_the_prefix_decides_where_prefill_writes() -> None:
    """The decode worker with the prefix, and a prefill worker that can write there."""
    play = Placing((P, D, D1))
    play.stores(D1, 800)
    assert play.goes(prompt("a", 900)) == D1
    assert play.messages(AssignPrefill, P)[-1].decode == D1
