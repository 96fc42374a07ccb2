"""What every ledger must do: the Redis adapter on a real server, and the simulator's."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from baton.core.ids import Peer
from baton.core.lifecycles import REQUEST_MOVES, TERMINAL, RequestState
from baton.core.outcomes import Ending, Outcome
from baton.ports.ledger import (
    AcquireLease,
    AdmitRequest,
    Adopted,
    AdoptRequest,
    AdvanceRequest,
    AnyOp,
    Conflict,
    Done,
    EndRequest,
    FindOrphans,
    FindOwned,
    LeaseHeld,
    LeaseLost,
    LeaveRole,
    Leaving,
    Orphans,
    Owned,
    PlaceRequest,
    ReleaseLease,
    RenewLease,
    Reply,
    RetryRequest,
    Unavailable,
)
from support.ledger_bench import (
    CANCELLED,
    COMPLETED,
    DECODE,
    DECODE_2,
    GATEWAY,
    GATEWAY_2,
    LIMITS,
    PREFILL,
    PREFILL_2,
    ROUTER,
    ROUTER_2,
    TTL,
    WAIT_S,
    LedgerBench,
    member,
    spec,
)

S = RequestState
HOLD = 60_000
ADMIT = AdmitRequest(spec(), ROUTER)
PLACE = PlaceRequest("r1", 1, ROUTER, DECODE, PREFILL)
PREFILLING = AdvanceRequest("r1", 1, S.PREFILLING, PREFILL)
COMMITTED = AdvanceRequest("r1", 1, S.COMMITTED, DECODE)
DECODING = AdvanceRequest("r1", 1, S.DECODING, DECODE)
RETRY = RetryRequest("r1", 1, ROUTER)
ADOPT = AdoptRequest(spec(), ROUTER_2, 2, 1)
MOVED = msgspec.structs.replace(spec(), gateway=GATEWAY_2)
END = EndRequest("r1", 1, COMPLETED, GATEWAY)

#: How each live state is reached at epoch 1.
WAYS: dict[RequestState, list[AnyOp]] = {
    S.ADMITTED: [ADMIT],
    S.PLACED: [ADMIT, PLACE],
    S.PREFILLING: [ADMIT, PLACE, PREFILLING],
    S.COMMITTED: [ADMIT, PLACE, PREFILLING, COMMITTED],
    S.DECODING: [ADMIT, PLACE, PREFILLING, COMMITTED, DECODING],
}


def held(bench: LedgerBench, op: AcquireLease | RenewLease) -> LeaseHeld:
    answer = bench.ask(op)
    assert isinstance(answer, LeaseHeld), answer
    return answer


def acquire(bench: LedgerBench, *peers: Peer) -> LeaseHeld:
    for peer in peers:
        answer = held(bench, AcquireLease(member(peer), TTL))
    return answer


def renew_until_lost(bench: LedgerBench, peer: Peer) -> tuple[Peer, ...]:
    """Renew ``peer``'s lease until the ledger finds others expired; return them."""
    pace_s = TTL / 1000 / 20
    for _ in range(int(WAIT_S / pace_s)):
        lost = held(bench, RenewLease(peer, TTL)).lost
        if lost:
            return lost
        bench.pass_time(pace_s)
    raise AssertionError("nobody was declared lost")


# --- leases -----------------------------------------------------------------------------------


def test_acquire_brings_everybody_and_the_ledgers_id(bench: LedgerBench) -> None:
    """An acquire answers with all members, sorted, as they announced themselves."""
    first = acquire(bench, ROUTER)
    assert first.members == (member(ROUTER),)
    assert first.ledger_id
    second = acquire(bench, DECODE)
    assert second.members == (member(DECODE), member(ROUTER))
    assert second.ledger_id == first.ledger_id
    assert held(bench, RenewLease(ROUTER, TTL)).members == second.members


def test_repeating_an_acquire_changes_nothing(bench: LedgerBench) -> None:
    """The same incarnation may acquire as often as it likes."""
    assert acquire(bench, ROUTER) == acquire(bench, ROUTER)


def test_a_new_ledger_is_in_rebuild_for_one_ttl(bench: LedgerBench) -> None:
    """Rebuilding is said from the first lease on, for one TTL, and then no more."""
    assert acquire(bench, ROUTER).rebuilding
    assert held(bench, RenewLease(ROUTER, TTL)).rebuilding
    bench.pass_time(TTL / 1000)
    assert not held(bench, RenewLease(ROUTER, TTL)).rebuilding


def test_renewing_what_was_never_held_is_lost(bench: LedgerBench) -> None:
    """A renewal without a lease answers LeaseLost with the ledger's id."""
    ledger_id = acquire(bench, ROUTER).ledger_id
    assert bench.ask(RenewLease(DECODE, TTL)) == LeaseLost(ledger_id)


def test_an_expired_lease_is_lost_once_and_may_be_acquired_again(bench: LedgerBench) -> None:
    """A member that stops renewing is reported lost by one sweep, and may come back."""
    ledger_id = acquire(bench, ROUTER, DECODE).ledger_id
    assert renew_until_lost(bench, ROUTER) == (DECODE,)
    after = held(bench, RenewLease(ROUTER, TTL))
    assert after.lost == ()
    assert after.members == (member(ROUTER),)
    assert bench.ask(RenewLease(DECODE, TTL)) == LeaseLost(ledger_id)
    assert acquire(bench, DECODE).members == (member(DECODE), member(ROUTER))


def test_the_expired_members_requests_stay_to_be_found(bench: LedgerBench) -> None:
    """Losing a member touches the registry only: its requests stay in the index of owners."""
    acquire(bench, ROUTER, DECODE)
    for op in WAYS[S.DECODING]:
        bench.ask(op)
    renew_until_lost(bench, ROUTER)
    assert bench.owned(DECODE) == {"r1"}


def test_nobody_is_lost_within_a_ttl_after_a_gap(bench: LedgerBench) -> None:
    """After a time without any renewal, the first sweep prolongs all leases by a full TTL."""
    acquire(bench, ROUTER, DECODE)
    bench.pass_time(2.5 * TTL / 1000)
    after = held(bench, RenewLease(ROUTER, TTL))
    assert after.lost == ()
    assert len(after.members) == 2
    bench.pass_time(TTL / 1000 / 3)
    assert isinstance(bench.ask(RenewLease(DECODE, TTL)), LeaseHeld)


def test_an_emptied_ledger_has_another_id_and_rebuilds(bench: LedgerBench) -> None:
    """After a wipe renewals answer LeaseLost with a new id; acquiring starts a rebuild."""
    before = acquire(bench, ROUTER, DECODE).ledger_id
    bench.wipe()
    answer = bench.ask(RenewLease(ROUTER, TTL))
    assert isinstance(answer, LeaseLost)
    assert answer.ledger_id != before
    again = acquire(bench, ROUTER)
    assert again.ledger_id == answer.ledger_id
    assert again.rebuilding
    bench.wipe()
    assert acquire(bench, ROUTER).ledger_id not in (before, answer.ledger_id)


def test_a_newer_incarnation_replaces_the_older_for_good(bench: LedgerBench) -> None:
    """The older one can neither renew nor acquire; numbers do not matter, order does."""
    older, newer = Peer("decode-0", 900), Peer("decode-0", 5)
    ledger_id = acquire(bench, ROUTER, older).ledger_id
    assert acquire(bench, newer).members == (member(newer), member(ROUTER))
    assert bench.ask(RenewLease(older, TTL)) == LeaseLost(ledger_id)
    assert bench.ask(AcquireLease(member(older), TTL)) == LeaseLost(ledger_id)
    assert held(bench, RenewLease(newer, TTL)).members == (member(newer), member(ROUTER))


def test_replaced_incarnations_stay_replaced_over_several_starts(bench: LedgerBench) -> None:
    """The first of four incarnations is still refused, also when the fourth was swept."""
    peers = [Peer("decode-0", number) for number in (7, 3, 8, 1)]
    acquire(bench, ROUTER, *peers)
    assert renew_until_lost(bench, ROUTER) == (peers[-1],)
    for peer in peers[:-1]:
        assert isinstance(bench.ask(AcquireLease(member(peer), TTL)), LeaseLost)
    assert isinstance(bench.ask(AcquireLease(member(peers[-1]), TTL)), LeaseHeld)


def test_a_released_lease_leaves_the_registry(bench: LedgerBench) -> None:
    """Release is answered with LeaseLost, again and again; an older one's harms nobody."""
    older, newer = Peer("decode-0", 1), Peer("decode-0", 2)
    ledger_id = acquire(bench, ROUTER, older, newer).ledger_id
    assert bench.ask(ReleaseLease(older)) == LeaseLost(ledger_id)
    assert held(bench, RenewLease(ROUTER, TTL)).members == (member(newer), member(ROUTER))
    for _ in range(2):
        assert bench.ask(ReleaseLease(newer)) == LeaseLost(ledger_id)
    assert held(bench, RenewLease(ROUTER, TTL)).members == (member(ROUTER),)
    assert bench.ask(RenewLease(newer, TTL)) == LeaseLost(ledger_id)


# --- requests ---------------------------------------------------------------------------------


def test_a_plain_life(bench: LedgerBench) -> None:
    """Admit, place, advance, end: each step answers with the new state, each repetition too."""
    wanted: list[tuple[AnyOp, Done]] = [
        (ADMIT, Done(1, S.ADMITTED, 0)),
        (PLACE, Done(1, S.PLACED, 1)),
        (PREFILLING, Done(1, S.PREFILLING, 1)),
        (COMMITTED, Done(1, S.COMMITTED, 1)),
        (DECODING, Done(1, S.DECODING, 1)),
        (END, Done(1, S.COMPLETED, 1)),
    ]
    for op, answer in wanted:
        assert bench.ask(op) == answer
        assert bench.ask(op) == answer


def test_a_late_repetition_gets_its_old_answer_and_changes_nothing(bench: LedgerBench) -> None:
    """Repeating an op of this epoch answers as it did, whatever happened since."""
    for op in WAYS[S.DECODING]:
        bench.ask(op)
    assert bench.ask(PLACE) == Done(1, S.PLACED, 1)
    assert bench.ask(PREFILLING) == Done(1, S.PREFILLING, 1)
    assert bench.ask(ADMIT) == Done(1, S.DECODING, 1)
    assert bench.ask(PlaceRequest("r1", 1, ROUTER, DECODE_2, None)) == Conflict(1, S.DECODING)


@pytest.mark.parametrize("op", [PLACE, PREFILLING, RETRY, END], ids=lambda op: type(op).__name__)
def test_without_a_record_every_transition_conflicts(bench: LedgerBench, op: AnyOp) -> None:
    """No record: Conflict with no state, and none is created."""
    assert bench.ask(op) == Conflict(0, None)
    assert bench.ask(ADMIT) == Done(1, S.ADMITTED, 0)


def test_admission_is_create_or_return(bench: LedgerBench) -> None:
    """The admitting router goes on; another router learns whose it is not."""
    assert bench.ask(ADMIT) == Done(1, S.ADMITTED, 0)
    assert bench.ask(AdmitRequest(spec(), ROUTER_2)) == Conflict(1, S.ADMITTED)
    assert bench.ask(PlaceRequest("r1", 1, ROUTER_2, DECODE, None)) == Conflict(1, S.ADMITTED)
    assert bench.ask(PLACE) == Done(1, S.PLACED, 1)


def test_only_the_epochs_workers_advance_it(bench: LedgerBench) -> None:
    """A worker that the epoch is not bound to changes nothing."""
    for op in WAYS[S.PLACED]:
        bench.ask(op)
    for stranger in (DECODE_2, PREFILL_2, Peer(DECODE.worker_id, 1)):
        op = AdvanceRequest("r1", 1, S.PREFILLING, stranger)
        assert bench.ask(op) == Conflict(1, S.PLACED)
    assert bench.ask(PREFILLING) == Done(1, S.PREFILLING, 1)


def test_decode_alone_may_prefill(bench: LedgerBench) -> None:
    """A placement without a prefill worker goes from PLACED to DECODING."""
    bench.ask(ADMIT)
    bench.ask(PlaceRequest("r1", 1, ROUTER, DECODE, None))
    assert bench.ask(DECODING) == Done(1, S.DECODING, 1)
    assert bench.owned(PREFILL) == set()


@pytest.mark.parametrize("source", WAYS, ids=str)
@pytest.mark.parametrize("target", [S.PREFILLING, S.COMMITTED, S.DECODING], ids=str)
def test_advances_are_those_of_the_table(
    bench: LedgerBench, source: RequestState, target: RequestState
) -> None:
    """An advance that REQUEST_MOVES does not list is a conflict; one that it lists is done."""
    for op in WAYS[source]:
        bench.ask(op)
    # By whom it was not made on the way, so that it is no repetition.
    by = DECODE if target is S.PREFILLING else PREFILL
    legal = target in REQUEST_MOVES[source] and source is not S.ADMITTED
    attempts = 0 if source is S.ADMITTED else 1
    wanted = Done(1, target, attempts) if legal else Conflict(1, source)
    assert bench.ask(AdvanceRequest("r1", 1, target, by)) == wanted


@pytest.mark.parametrize("source", WAYS, ids=str)
@pytest.mark.parametrize("ending", Ending, ids=str)
def test_ends_are_those_of_the_table(
    bench: LedgerBench, source: RequestState, ending: Ending
) -> None:
    """An end that REQUEST_MOVES does not list is a conflict; one that it lists is done."""
    for op in WAYS[source]:
        bench.ask(op)
    target = RequestState(ending.value)
    attempts = 0 if source is S.ADMITTED else 1
    legal = target in REQUEST_MOVES[source]
    wanted = Done(1, target, attempts) if legal else Conflict(1, source)
    assert bench.ask(EndRequest("r1", 1, Outcome(ending), GATEWAY)) == wanted


@pytest.mark.parametrize("source", WAYS, ids=str)
def test_a_retry_starts_the_next_epoch(bench: LedgerBench, source: RequestState) -> None:
    """From any live state: epoch + 1, ADMITTED, attempts kept; repeated, the same answer."""
    for op in WAYS[source]:
        bench.ask(op)
    attempts = 0 if source is S.ADMITTED else 1
    assert bench.ask(RetryRequest("r1", 1, ROUTER_2)) == Conflict(1, source)
    assert bench.ask(RETRY) == Done(2, S.ADMITTED, attempts)
    place = PlaceRequest("r1", 2, ROUTER, DECODE, PREFILL_2)
    assert bench.ask(place) == Done(2, S.PLACED, attempts + 1)
    assert bench.ask(RETRY) == Done(2, S.ADMITTED, attempts)
    assert bench.ask(RetryRequest("r1", 1, ROUTER_2)) == Conflict(2, S.PLACED)
    assert bench.ask(RetryRequest("r1", 2, ROUTER)) == Done(3, S.ADMITTED, attempts + 1)
    assert bench.ask(RETRY) == Conflict(3, S.ADMITTED)


@pytest.mark.parametrize("source", WAYS, ids=str)
def test_an_adoption_changes_the_router_and_nothing_else(
    bench: LedgerBench, source: RequestState
) -> None:
    """In any live state: the answer is what the record says, repeated the same; the former router
    may make no transition any more, the new one all, workers and gateway as before."""
    for op in WAYS[source]:
        bench.ask(op)
    placed = source is not S.ADMITTED
    decode, prefill = (DECODE, PREFILL) if placed else (None, None)
    adopted = Adopted(1, source, int(placed), 0, decode, prefill)
    acquire(bench, ROUTER_2)
    assert bench.ask(ADOPT) == adopted
    assert bench.ask(ADOPT) == adopted
    for stale in (RETRY, EndRequest("r1", 1, CANCELLED, ROUTER), ADMIT):
        assert bench.ask(stale) == Conflict(1, source)
    if source is S.PLACED:
        assert bench.ask(PREFILLING) == Done(1, S.PREFILLING, 1)
    retry = RetryRequest("r1", 1, ROUTER_2, failures=2)
    assert bench.ask(retry) == Done(2, S.ADMITTED, int(placed))
    again = AdoptRequest(spec(), ROUTER, 3, 1)
    assert bench.ask(again) == Adopted(2, S.ADMITTED, int(placed), 2, None, None)
    assert bench.ask(EndRequest("r1", 2, CANCELLED, GATEWAY)) == Done(2, S.CANCELLED, int(placed))


@pytest.mark.parametrize("above", [0, 2**47], ids=["routers", "claims"])
def test_routers_that_fight_are_ordered_by_their_turn(bench: LedgerBench, above: int) -> None:
    """Whoever comes with a lower turn than the record has seen is superseded, however late he
    comes; so is another router with the same turn, and an admission. Turns of late claims are
    large numbers."""
    bench.ask(ADMIT)
    third = Peer("router-2", 13)
    assert isinstance(bench.ask(AdoptRequest(spec(), third, above + 3, 1)), Adopted)
    for turn, router in ((1, ROUTER), (2, ROUTER_2), (3, ROUTER_2)):
        reply = bench.ask(AdoptRequest(spec(), router, above + turn, 1))
        assert reply == Conflict(1, S.ADMITTED)
        assert isinstance(reply, Conflict) and reply.turn == above + 3
        assert bench.ask(PlaceRequest("r1", 1, router, DECODE, None)) == Conflict(1, S.ADMITTED)
    assert bench.ask(PlaceRequest("r1", 1, third, DECODE, None)) == Done(1, S.PLACED, 1)
    assert isinstance(bench.ask(AdoptRequest(spec(), ROUTER, above + 4, 1)), Adopted)


def test_a_lost_record_is_made_again_as_it_was_known(bench: LedgerBench) -> None:
    """An emptied ledger: the record has the epoch that its gateway knows, placed if it was, and
    goes on from there; a late admission does not begin it anew."""
    adopt = AdoptRequest(spec(), ROUTER_2, 2, 4, DECODE, PREFILL)
    adopted = Adopted(4, S.PLACED, 1, 0, DECODE, PREFILL)
    assert bench.ask(adopt) == adopted
    assert bench.ask(adopt) == adopted
    assert bench.ask(ADMIT) == Conflict(4, S.PLACED)
    assert bench.ask(AdvanceRequest("r1", 4, S.DECODING, DECODE)) == Done(4, S.DECODING, 1)
    assert bench.ask(AdoptRequest(spec("r2"), ROUTER, 1, 2)) == Adopted(
        2, S.ADMITTED, 0, 0, None, None
    )
    assert bench.ask(PlaceRequest("r2", 2, ROUTER, DECODE, None)) == Done(2, S.PLACED, 1)


def test_a_record_that_went_back_is_raised_to_what_is_known(bench: LedgerBench) -> None:
    """A failover lost writes: the epoch never goes back, and answers of the lower one are gone."""
    for op in WAYS[S.DECODING]:
        bench.ask(op)
    adopt = AdoptRequest(spec(), ROUTER, 1, 3)
    assert bench.ask(adopt) == Adopted(3, S.ADMITTED, 1, 0, None, None)
    assert bench.ask(PLACE) == Conflict(3, S.ADMITTED)
    assert bench.ask(PlaceRequest("r1", 3, ROUTER, DECODE, PREFILL)) == Done(3, S.PLACED, 2)
    assert bench.ask(AdoptRequest(spec(), ROUTER, 1, 2, DECODE_2)) == Adopted(
        3, S.PLACED, 2, 0, DECODE, PREFILL
    )


def test_only_owners_end_a_request(bench: LedgerBench) -> None:
    """Gateway, router and the epoch's workers may; strangers and former owners may not, as long as
    gateway or router holds a lease."""
    acquire(bench, GATEWAY)
    for op in WAYS[S.PLACED]:
        bench.ask(op)
    for stranger in (ROUTER_2, GATEWAY_2, DECODE_2, PREFILL_2, Peer(ROUTER.worker_id, 1)):
        assert bench.ask(EndRequest("r1", 1, CANCELLED, stranger)) == Conflict(1, S.PLACED)
    assert bench.ask(EndRequest("r1", 1, CANCELLED, DECODE)) == Done(1, S.CANCELLED, 1)


def test_who_has_a_higher_turn_than_the_record_may_end_it(bench: LedgerBench) -> None:
    """The ledger has lost that the request was moved: its last gateway is not in the record."""
    acquire(bench, GATEWAY, ROUTER)
    bench.ask(AdoptRequest(spec(), ROUTER, 3, 1))
    for turn in (0, 2, 3):
        op = EndRequest("r1", 1, CANCELLED, GATEWAY_2, turn)
        assert bench.ask(op) == Conflict(1, S.ADMITTED)
    assert bench.ask(EndRequest("r1", 1, CANCELLED, GATEWAY_2, 4)) == Done(1, S.CANCELLED)


def test_requests_of_the_lost_are_found_and_ended(bench: LedgerBench) -> None:
    """(104) Whoever sweeps is told which requests have an owner without a lease, and only workers
    with one, and for how long its client may come back; where neither gateway nor router has one
    it may end them, and nobody else's."""
    acquire(bench, ROUTER, GATEWAY, ROUTER_2, DECODE)
    for name, router, resume_ms in (("r1", ROUTER, 0), ("r2", ROUTER_2, 9_000)):
        bench.ask(AdmitRequest(spec(name, resume_ms=resume_ms), router))
        bench.ask(PlaceRequest(name, 1, router, DECODE, None))
    sweep = FindOrphans(ROUTER_2, TTL, 10, (DECODE,))
    assert bench.ask(sweep) == Orphans({})
    keep_alive = [RenewLease(peer, TTL) for peer in (ROUTER_2, DECODE)]
    for _ in range(60):
        bench.pass_time(TTL / 1000 / 20)
        for op in keep_alive:
            bench.ask(op)
        found = windows_of(bench.ask(sweep))
        if len(found) == 2:
            break
    assert list(found) == ["r1", "r2"] and found["r1"] == 0 < found["r2"] <= 9_000
    assert bench.ask(FindOrphans(ROUTER_2, TTL, 1, (DECODE,))) == Orphans({"r1": 0})
    assert bench.ask(FindOrphans(ROUTER_2, TTL, 10)) == Orphans({})
    stranger = Peer("router-9", 9)
    assert bench.ask(EndRequest("r2", 1, CANCELLED, stranger)) == Conflict(1, S.PLACED)
    assert bench.ask(EndRequest("r1", 0, CANCELLED, stranger)) == Conflict(1, S.PLACED)
    assert bench.ask(EndRequest("r1", 1, CANCELLED, stranger)) == Done(1, S.CANCELLED, 1)
    assert list(windows_of(bench.ask(sweep))) == ["r2"]


def windows_of(reply: Reply | Unavailable) -> Mapping[str, int]:
    """Return the orphans, and for how long each may still be asked for."""
    assert isinstance(reply, Orphans)
    return reply.windows_ms


def test_whoever_says_goodbye_leaves_orphans_as_the_dead_do(bench: LedgerBench) -> None:
    """A lease that is given back is no lease: who is asked next names what its owner left, unless
    the other one, gateway or router, is there."""
    acquire(bench, ROUTER, GATEWAY, ROUTER_2, DECODE)
    bench.pass_time(TTL / 1000)  # the rebuild; the sweep after such a gap prolongs all leases
    bench.ask(AdmitRequest(spec("r1"), ROUTER))
    bench.ask(AdoptRequest(spec("r2", resume_ms=9_000), ROUTER, 1, 1))
    bench.ask(PlaceRequest("r1", 1, ROUTER, DECODE, PREFILL))
    sweep = FindOrphans(ROUTER_2, TTL, 10, (DECODE,))
    own = FindOrphans(ROUTER, TTL, 10, (DECODE,))
    bench.ask(ReleaseLease(DECODE))
    assert bench.ask(sweep) == bench.ask(own) == Orphans({})
    bench.ask(ReleaseLease(GATEWAY))
    assert bench.ask(sweep) == Orphans({})
    assert list(windows_of(bench.ask(own))) == ["r1", "r2"]
    bench.ask(ReleaseLease(ROUTER))
    assert list(windows_of(bench.ask(sweep))) == ["r1", "r2"]


def test_a_window_is_counted_from_the_loss_of_the_gateway(bench: LedgerBench) -> None:
    """Whoever loses the request later, and whoever finds it first; and anew once it was back."""
    acquire(bench, ROUTER, GATEWAY, ROUTER_2, DECODE)
    bench.pass_time(TTL / 1000)
    bench.ask(AdmitRequest(spec("r1", resume_ms=9_000), ROUTER))
    # In short pauses: after a long one the ledger takes itself for what was away.
    keep = [RenewLease(peer, TTL) for peer in (ROUTER_2, DECODE)]

    def after(seconds: float) -> int:
        for _ in range(round(seconds / (TTL / 4000))):
            bench.pass_time(TTL / 4000)
            for op in keep:
                bench.ask(op)
        bench.ask(ReleaseLease(ROUTER))
        return windows_of(bench.ask(FindOrphans(ROUTER_2, TTL, 10, (DECODE,))))["r1"]

    bench.ask(ReleaseLease(GATEWAY))
    first = after(TTL / 2000)
    assert 0 < first <= 9_000 - TTL / 2
    assert after(TTL / 1000) <= first - TTL
    acquire(bench, GATEWAY)
    bench.ask(ReleaseLease(GATEWAY))
    assert after(0.0) > first


def test_nobody_is_an_orphan_while_the_ledger_is_in_rebuild(bench: LedgerBench) -> None:
    """Who has not registered again yet is not lost."""
    acquire(bench, ROUTER)
    bench.ask(AdoptRequest(spec(), ROUTER_2, 2, 1))
    assert bench.ask(FindOrphans(ROUTER, TTL, 10)) == Orphans({})


def test_a_process_is_told_what_live_records_name_it(bench: LedgerBench) -> None:
    """Those of its own incarnation, whoever else is in them; what is over names nobody."""
    for name in ("r1", "r2", "r3"):
        bench.ask(AdmitRequest(spec(name), ROUTER))
    bench.ask(PlaceRequest("r2", 1, ROUTER, DECODE, PREFILL))
    assert bench.ask(FindOwned(GATEWAY, 10)) == Owned(("r1", "r2", "r3"))
    assert bench.ask(FindOwned(GATEWAY, 2)) == Owned(("r1", "r2"))
    assert bench.ask(FindOwned(DECODE, 10)) == Owned(("r2",))
    before = Peer(GATEWAY.worker_id, GATEWAY.incarnation - 1)
    for nobody in (before, GATEWAY_2, PREFILL_2, Peer(GATEWAY.worker_id[:-2], 1)):
        assert bench.ask(FindOwned(nobody, 10)) == Owned(())
    bench.ask(EndRequest("r1", 1, CANCELLED, GATEWAY))
    assert bench.ask(FindOwned(GATEWAY, 10)) == Owned(("r2", "r3"))


def test_one_worker_leaves_its_role_at_a_time(bench: LedgerBench) -> None:
    """Repeating it changes nothing; when the first is gone the next one may, but not at once where
    a change is to settle."""
    acquire(bench, DECODE, DECODE_2, PREFILL, PREFILL_2)
    assert bench.ask(LeaveRole(DECODE, HOLD, (DECODE_2,))) == Leaving(granted=True)
    assert bench.ask(LeaveRole(DECODE, HOLD, (DECODE_2,))) == Leaving(granted=True)
    leave = LeaveRole(PREFILL, HOLD, (PREFILL_2,))
    assert bench.ask(leave) == Leaving(granted=False, by=DECODE)
    patient = msgspec.structs.replace(leave, hold_ms=0)
    assert bench.ask(patient) == Leaving(granted=True), "the first had its time"
    assert bench.ask(LeaveRole(DECODE, 0, (DECODE_2,))) == Leaving(granted=True)
    bench.ask(ReleaseLease(DECODE))
    unsettled = msgspec.structs.replace(leave, settle_ms=60_000)
    assert bench.ask(unsettled) == Leaving(granted=False, by=DECODE)
    assert bench.ask(leave) == Leaving(granted=True)


def test_the_last_of_its_kind_keeps_its_role(bench: LedgerBench) -> None:
    """Of two that want to leave at once one stays; who needs nobody in its place may go."""
    acquire(bench, DECODE, DECODE_2, PREFILL)
    assert bench.ask(LeaveRole(DECODE, HOLD, (DECODE_2,))) == Leaving(granted=True)
    bench.ask(ReleaseLease(DECODE))
    assert bench.ask(LeaveRole(DECODE_2, HOLD, (DECODE,))) == Leaving(granted=False)
    assert bench.ask(LeaveRole(PREFILL, HOLD)) == Leaving(granted=True)


def test_who_holds_no_lease_leaves_no_role(bench: LedgerBench) -> None:
    """It may have been replaced."""
    acquire(bench, DECODE_2)
    assert bench.ask(LeaveRole(DECODE, HOLD, (DECODE_2,))) == Leaving(granted=False)


def test_another_epoch_changes_nothing(bench: LedgerBench) -> None:
    """A lower epoch is refused with the record's; so is one that the ledger never gave out."""
    for op in [*WAYS[S.DECODING], RETRY]:
        bench.ask(op)
    for epoch in (0, 1, 3):
        for op in (
            PlaceRequest("r1", epoch, ROUTER, DECODE_2, PREFILL),
            AdvanceRequest("r1", epoch, S.DECODING, DECODE),
            EndRequest("r1", epoch, COMPLETED, GATEWAY),
            RetryRequest("r1", epoch, ROUTER_2),
        ):
            assert bench.ask(op) == Conflict(2, S.ADMITTED)
    assert bench.ask(PlaceRequest("r1", 2, ROUTER, DECODE, None)) == Done(2, S.PLACED, 2)


@pytest.mark.parametrize("outcome", [COMPLETED, CANCELLED], ids=lambda each: each.ending)
def test_a_terminal_record_never_changes(bench: LedgerBench, outcome: Outcome) -> None:
    """After the end every op conflicts and brings the outcome, except the end's repetition."""
    for op in WAYS[S.DECODING]:
        bench.ask(op)
    end = EndRequest("r1", 1, outcome, GATEWAY)
    final = bench.ask(end)
    state = RequestState(outcome.ending.value)
    assert final == Done(1, state, 1)
    other = Outcome(Ending.FAILED, message="too late")
    for op in (
        ADMIT,
        ADOPT,
        PLACE,
        DECODING,
        RETRY,
        RetryRequest("r1", 0, ROUTER),
        EndRequest("r1", 1, other, GATEWAY),
        EndRequest("r1", 1, outcome, DECODE),
    ):
        assert bench.ask(op) == Conflict(1, state, outcome)
    assert bench.ask(end) == final
    assert state in TERMINAL


def test_a_terminal_record_is_kept_for_its_time_only(bench: LedgerBench) -> None:
    """A terminal record answers until terminal_ttl_ms; then the id is unknown."""
    bench.ask(ADMIT)
    end = EndRequest("r1", 1, CANCELLED, GATEWAY)
    bench.ask(end)
    assert bench.ask(RETRY) == Conflict(1, S.CANCELLED, CANCELLED)
    bench.pass_time((LIMITS.terminal_ttl_ms + 2) / 1000)
    assert bench.ask(end) == Conflict(0, None)


@pytest.mark.parametrize(
    "op",
    [
        AdmitRequest(spec(deadline_ms=50), ROUTER),
        AdoptRequest(spec(deadline_ms=50), ROUTER, 2, 1, DECODE),
    ],
    ids=["admitted", "made again"],
)
def test_a_request_that_nobody_ends_goes_after_its_deadline(
    bench: LedgerBench, op: AdmitRequest | AdoptRequest
) -> None:
    """A live record outlives its deadline by terminal_ttl_ms, then nothing is left of it; so does
    one that was made by whoever adopted it, in an emptied ledger."""
    bench.ask(op)
    bench.pass_time((50 + LIMITS.terminal_ttl_ms + 2) / 1000)
    assert bench.ask(RETRY) == Conflict(0, None)
    acquire(bench, ROUTER)
    assert bench.owned(ROUTER) == set()


def test_the_index_of_owners_follows_the_record(bench: LedgerBench) -> None:
    """Each peer's index holds exactly its live requests."""
    everybody = (ROUTER, ROUTER_2, GATEWAY, GATEWAY_2, DECODE, DECODE_2, PREFILL)

    def owners() -> set[Peer]:
        return {peer for peer in everybody if bench.owned(peer)}

    steps: list[tuple[AnyOp, set[Peer]]] = [
        (ADMIT, {ROUTER, GATEWAY}),
        (PLACE, {ROUTER, GATEWAY, DECODE, PREFILL}),
        (ADOPT, {ROUTER_2, GATEWAY, DECODE, PREFILL}),
        (RetryRequest("r1", 1, ROUTER_2), {ROUTER_2, GATEWAY}),
        (PlaceRequest("r1", 2, ROUTER_2, DECODE_2, None), {ROUTER_2, GATEWAY, DECODE_2}),
        (AdoptRequest(MOVED, ROUTER, 3, 1), {ROUTER, GATEWAY_2, DECODE_2}),
        (AdoptRequest(MOVED, ROUTER, 3, 5, DECODE, PREFILL), {ROUTER, GATEWAY_2, DECODE, PREFILL}),
        (EndRequest("r1", 5, CANCELLED, GATEWAY_2), set()),
        (AdoptRequest(spec("r2"), ROUTER, 2, 3, DECODE), {ROUTER, GATEWAY, DECODE}),
    ]
    for op, wanted in steps:
        assert isinstance(bench.ask(op), Done | Adopted)
        assert owners() == wanted


def test_a_peers_index_is_its_own(bench: LedgerBench) -> None:
    """Names that begin alike, and other incarnations, do not see each other's requests."""
    peers = [Peer("decode-1", 1), Peer("decode-1", 11), Peer("decode-11", 1)]
    for number, peer in enumerate(peers):
        bench.ask(AdmitRequest(spec(f"q{number}"), ROUTER))
        bench.ask(PlaceRequest(f"q{number}", 1, ROUTER, peer, None))
    assert [bench.owned(peer) for peer in peers] == [{"q0"}, {"q1"}, {"q2"}]
    assert bench.owned(ROUTER) == {"q0", "q1", "q2"}


# --- the port ---------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_calls(bench: LedgerBench) -> None:
    """2,000 ops called at once are executed and answered in order."""
    ops: list[AnyOp] = []
    for number in range(500):
        name = f"n{number}"
        ops += [
            AdmitRequest(spec(name), ROUTER),
            PlaceRequest(name, 1, ROUTER, DECODE, PREFILL),
            AdvanceRequest(name, 1, S.DECODING, DECODE),
            EndRequest(name, 1, COMPLETED, GATEWAY),
        ]
    answers = bench.ask_all(ops)
    assert [place for place, _ in answers] == list(range(len(ops)))
    states = [S.ADMITTED, S.PLACED, S.DECODING, S.COMPLETED]
    for place, answer in answers:
        assert isinstance(answer, Done)
        assert answer.state is states[place % 4]


def test_done_is_never_called_from_within_call(bench: LedgerBench) -> None:
    """A machine is not entered while it hands out commands."""
    assert not bench.called_back_inside(ADMIT)


def test_more_calls_than_may_be_unanswered_fail_at_once(bench: LedgerBench) -> None:
    """Beyond ledger_inflight_max the answer is Unavailable; the others are executed."""
    over = 3
    ops: list[AnyOp] = [PLACE] * (LIMITS.ledger_inflight_max + over)
    answers = dict(bench.ask_all(ops))
    refused = [place for place, answer in answers.items() if isinstance(answer, Unavailable)]
    assert sorted(refused) == list(range(LIMITS.ledger_inflight_max, len(ops)))
