"""The lease keeper, as conversations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.events import LeaseChanged, TimePassed
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.ports.driving import CallLedger, LedgerAnswered
from baton.ports.lease import LeaseGivenUp, LeaseKeeper, MembersChanged, Replaced
from baton.ports.ledger import (
    AcquireLease,
    LeaseHeld,
    LeaseLost,
    PlaceRequest,
    ReleaseLease,
    RenewLease,
    Reply,
    Unavailable,
)

LIMITS = Limits()
TTL = LIMITS.lease_ttl_ms
RENEW_S = LIMITS.lease_renew_ms / 1000
TRUSTED_S = (LIMITS.lease_ttl_ms - LIMITS.lease_renew_ms) / 1000
PEER = Peer("decode-0", 7)
ME = Member(PEER, Role.DECODE, "ipc:///run/decode-0.sock", 100, "boot")
OTHER = Member(Peer("prefill-0", 9), Role.PREFILL, "ipc:///run/prefill-0.sock", 101, "boot")
ACQUIRE = AcquireLease(ME, TTL)
RENEW = RenewLease(PEER, TTL)
HELD = LeaseHeld("a", False, (ME,))


def held_keeper(now: float = 0.0) -> LeaseKeeper:
    keeper = LeaseKeeper(ME, LIMITS, now)
    keeper.handle(TimePassed(), now)
    keeper.handle(LedgerAnswered(ACQUIRE, HELD), now)
    assert keeper.state is LeaseState.HELD
    return keeper


def test_it_acquires_at_once_and_tells_who_is_there() -> None:
    """A new keeper acquires; the answer makes the lease HELD and brings the members."""
    keeper = LeaseKeeper(ME, LIMITS, 10.0)
    assert keeper.deadline() == 10.0
    assert keeper.handle(TimePassed(), 10.0) == [CallLedger(ACQUIRE)]
    assert keeper.deadline() is None
    assert keeper.handle(LedgerAnswered(ACQUIRE, HELD), 10.1) == [
        LeaseChanged(LeaseState.HELD),
        MembersChanged((ME,), "a"),
    ]
    assert keeper.deadline() == 10.0 + RENEW_S


def test_it_renews_and_reports_only_changes() -> None:
    """A renewal with the same members says nothing; a new member or ledger id is reported."""
    keeper = held_keeper()
    assert keeper.handle(TimePassed(), RENEW_S) == [CallLedger(RENEW)]
    assert keeper.handle(LedgerAnswered(RENEW, HELD), RENEW_S) == []
    keeper.handle(TimePassed(), 2 * RENEW_S)
    more = LeaseHeld("a", False, (ME, OTHER))
    assert keeper.handle(LedgerAnswered(RENEW, more), 2 * RENEW_S) == [
        MembersChanged((ME, OTHER), "a")
    ]
    keeper.handle(TimePassed(), 3 * RENEW_S)
    emptied = LeaseHeld("b", True, (ME, OTHER))
    assert keeper.handle(LedgerAnswered(RENEW, emptied), 3 * RENEW_S) == [
        MembersChanged((ME, OTHER), "b")
    ]
    assert keeper.rebuilding


def test_the_margin_counts_from_when_the_renewal_was_sent() -> None:
    """A renewal answered late does not prolong the trust beyond its sending."""
    keeper = held_keeper()
    keeper.handle(TimePassed(), RENEW_S)
    keeper.handle(LedgerAnswered(RENEW, HELD), RENEW_S + 0.4)
    sent_again_at = 2 * RENEW_S
    assert keeper.handle(TimePassed(), sent_again_at) == [CallLedger(RENEW)]
    assert keeper.deadline() == RENEW_S + TRUSTED_S


def test_an_unanswered_renewal_makes_it_suspect_in_time() -> None:
    """With no answer the lease is SUSPECT before the ledger could call it lost, and recovers."""
    keeper = held_keeper()
    keeper.handle(TimePassed(), RENEW_S)
    assert keeper.deadline() == TRUSTED_S
    assert TRUSTED_S < TTL / 1000
    assert keeper.handle(TimePassed(), TRUSTED_S) == [LeaseChanged(LeaseState.SUSPECT)]
    later = TRUSTED_S + 0.01
    assert keeper.handle(LedgerAnswered(RENEW, Unavailable("timeout")), later) == []
    again = keeper.deadline()
    assert again is not None and later < again < later + RENEW_S
    assert keeper.handle(TimePassed(), again) == [CallLedger(RENEW)]
    assert keeper.handle(LedgerAnswered(RENEW, HELD), again) == [LeaseChanged(LeaseState.HELD)]


def test_an_answer_older_than_the_trust_does_not_make_it_held() -> None:
    """A process that was frozen between sending and reading stays SUSPECT and asks again."""
    keeper = held_keeper()
    keeper.handle(TimePassed(), RENEW_S)
    thawed = RENEW_S + 30.0
    assert keeper.handle(LedgerAnswered(RENEW, HELD), thawed) == [
        LeaseChanged(LeaseState.SUSPECT),
        CallLedger(RENEW),
    ]


def test_a_lost_lease_is_acquired_again() -> None:
    """LeaseLost to a renewal: LOST at once, then acquired anew."""
    keeper = held_keeper()
    keeper.handle(TimePassed(), RENEW_S)
    assert keeper.handle(LedgerAnswered(RENEW, LeaseLost("a")), RENEW_S) == [
        LeaseChanged(LeaseState.LOST),
        CallLedger(ACQUIRE),
    ]
    assert keeper.handle(LedgerAnswered(ACQUIRE, HELD), RENEW_S) == [LeaseChanged(LeaseState.HELD)]


def test_a_replaced_process_stops_for_good() -> None:
    """LeaseLost to an acquire means a newer incarnation: Replaced once, then silence."""
    keeper = held_keeper()
    keeper.handle(TimePassed(), RENEW_S)
    keeper.handle(LedgerAnswered(RENEW, LeaseLost("a")), RENEW_S)
    assert keeper.handle(LedgerAnswered(ACQUIRE, LeaseLost("a")), RENEW_S) == [Replaced(PEER)]
    assert keeper.deadline() is None
    assert keeper.handle(TimePassed(), 100.0) == []
    keeper.check()


def test_a_lease_given_up_is_released_once() -> None:
    """At the end of the process the lease is released, and no answer brings it back."""
    keeper = held_keeper()
    keeper.handle(TimePassed(), RENEW_S)
    assert keeper.handle(LeaseGivenUp(), RENEW_S) == [
        LeaseChanged(LeaseState.VACANT),
        CallLedger(ReleaseLease(PEER)),
    ]
    assert keeper.handle(LedgerAnswered(RENEW, HELD), RENEW_S) == []
    assert keeper.handle(LedgerAnswered(ReleaseLease(PEER), LeaseLost("a")), RENEW_S) == []
    assert keeper.handle(LeaseGivenUp(), RENEW_S) == []
    assert keeper.deadline() is None


def test_it_knows_its_own_answers() -> None:
    """Answers to a machine's transitions are not the keeper's."""
    keeper = held_keeper()
    place = PlaceRequest("r", 1, PEER, PEER, None)
    assert not keeper.owns(LedgerAnswered(place, Unavailable("x")))
    assert keeper.owns(LedgerAnswered(RENEW, HELD))


REPLIES = st.sampled_from(["held", "lost", "unavailable"])


@given(st.lists(st.tuples(st.floats(0.0, 3.0), REPLIES), max_size=60), st.booleans())
@settings(max_examples=200, deadline=None)
def test_whatever_is_answered_it_goes_on_asking_one_at_a_time(
    answers: list[tuple[float, str]], give_up: bool
) -> None:
    """At most one op is in flight; HELD only within the margin of a renewal that was answered."""
    keeper = LeaseKeeper(ME, LIMITS, 0.0)
    now, in_flight, answered_sent_at, sent_at = 0.0, None, None, 0.0
    for delay, reply in answers:
        commands = keeper.handle(TimePassed(), now)
        for command in commands:
            if isinstance(command, CallLedger):
                assert in_flight is None
                in_flight, sent_at = command.op, now
        keeper.check()
        if in_flight is None:
            deadline = keeper.deadline()
            if deadline is None:
                break
            now = max(now, deadline)
            continue
        now += delay
        answers_by_name: dict[str, Reply | Unavailable] = {
            "held": LeaseHeld("a", False, (ME, OTHER)),
            "lost": LeaseLost("a"),
            "unavailable": Unavailable("x"),
        }
        answer = answers_by_name[reply]
        op, in_flight = in_flight, None
        if reply == "held":
            answered_sent_at = sent_at
        for command in keeper.handle(LedgerAnswered(op, answer), now):
            if isinstance(command, CallLedger):
                in_flight, sent_at = command.op, now
        keeper.check()
        if keeper.state is LeaseState.HELD:
            assert answered_sent_at is not None
            assert now < answered_sent_at + TRUSTED_S
    if give_up:
        keeper.handle(LeaseGivenUp(), now)
        assert keeper.deadline() is None
