"""What every ledger must do with resumable requests: the scripts, and the simulator's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.ids import Peer
from baton.ports.ledger import (
    AnyOp,
    ClaimResumable,
    CloseResumable,
    Closing,
    Denial,
    Denied,
    OpenResumable,
    Repeated,
    RestoreResumable,
    Resumable,
)
from baton.sim.ledger import LedgerModel
from support.ledger_bench import GATEWAY, LIMITS, LedgerBench, RealBench
from support.ledger_server import LedgerServer

OTHER = Peer("gateway-1", 22)
RECIPE = bytes(range(256))
OPEN = OpenResumable(
    resumable_id="c1",
    gateway=GATEWAY,
    token="t",
    owner="k",
    requests=("c1-0", "c1-1"),
    recipe=RECIPE,
    window_ms=30_000,
    life_ms=60_000,
)
KEYED = replace(OPEN, repeat="i", body="b")
CLAIM = ClaimResumable("c1", OTHER, claim="n1", owner="k", token="t")
CLOSE = CloseResumable("c1", 0, keep_ms=60_000, answer=b"answer")
RESTORE = RestoreResumable(
    resumable_id="c1",
    gateway=GATEWAY,
    turn=5_000,
    again=0,
    token="t",
    owner="k",
    requests=("c1-0", "c1-1"),
    recipe=RECIPE,
    window_ms=30_000,
    life_ms=60_000,
    repeat="i",
    body="b",
)
OPENED = Resumable(0, 0, 0, 30_000, "", ("c1-0", "c1-1"), RECIPE)


def resumable(bench: LedgerBench, op: AnyOp) -> Resumable:
    answer = bench.ask(op)
    assert isinstance(answer, Resumable), answer
    return answer


def test_opening_makes_the_record_once(bench: LedgerBench) -> None:
    """A repeated opening gets the same answer."""
    assert bench.ask(OPEN) == OPENED
    assert bench.ask(OPEN) == OPENED


def test_every_claim_is_a_turn_and_a_repeated_one_is_not(bench: LedgerBench) -> None:
    """The turn orders the gateways; an answer that was lost is given again."""
    bench.ask(OPEN)
    first = resumable(bench, CLAIM)
    assert first.turn > first.former == 0
    assert resumable(bench, CLAIM) == first
    second = resumable(bench, replace(CLAIM, claim="n2", gateway=GATEWAY))
    assert second.turn > second.former == first.turn


def test_a_turn_that_the_ledger_lost_is_not_given_again(bench: LedgerBench) -> None:
    """(DESIGN 4.10) Turns grow with time, not with the claims that are remembered: a ledger that
    went back by a moment gives none out for the second time."""
    bench.ask(OPEN)
    bench.pass_time(0.1)
    first = resumable(bench, CLAIM).turn
    assert first >= 100
    bench.pass_time(0.05)
    assert resumable(bench, replace(CLAIM, claim="n2")).turn >= first + 50


def test_only_the_owner_with_the_token_is_given_it(bench: LedgerBench) -> None:
    """A wrong secret is as good as none; a right one with another API key is foreign."""
    bench.ask(OPEN)
    for claim, denial in (
        (replace(CLAIM, resumable_id="c2"), Denial.UNKNOWN),
        (replace(CLAIM, token="x"), Denial.UNKNOWN),
        (replace(CLAIM, token=""), Denial.UNKNOWN),
        (replace(CLAIM, token="", repeat=""), Denial.UNKNOWN),
        (replace(CLAIM, owner="other"), Denial.FOREIGN),
        (replace(CLAIM, owner=""), Denial.FOREIGN),
    ):
        assert bench.ask(claim) == Denied(denial), claim
    assert resumable(bench, CLAIM).former == 0, "a claim that was denied changes nothing"
    assert bench.ask(replace(CLAIM, owner="other")) == Denied(Denial.UNKNOWN), "a claim's own name"


def change(bench: RealBench, old: bytes, new: bytes) -> None:
    """Change the script that claims."""
    script = bench.ledger._scribe.scripts[ClaimResumable]
    assert old in script.source
    script.source = script.source.replace(old, new)
    script.sha = hashlib.sha1(script.source, usedforsecurity=False).hexdigest().encode()
    bench.ledger._sources.append(script.source)
    bench.redis.script_load(script.source)


def test_scripts_that_do_not_compare_owners_are_noticed(server: LedgerServer) -> None:
    """The test above fails for a script in which any API key will do."""
    server.command("FLUSHALL")
    bench = RealBench(server, "mutant")
    try:
        change(bench, b"record.owner ~= owner", b"false")
        with pytest.raises(AssertionError, match="owner='other'"):
            test_only_the_owner_with_the_token_is_given_it(bench)
    finally:
        bench.close()


def test_an_idempotency_key_names_one_request(bench: LedgerBench) -> None:
    """The second opening with it is told which one, and whether it asked for the same."""
    bench.ask(KEYED)
    second = replace(KEYED, resumable_id="c2", token="t2")
    assert bench.ask(second) == Repeated("c1", same=True)
    assert bench.ask(replace(second, body="other")) == Repeated("c1", same=False)
    assert resumable(bench, KEYED).turn == 0, "one's own opening, repeated"


def test_an_idempotency_key_claims_and_brings_a_new_token(bench: LedgerBench) -> None:
    """Who shows the key is given the request; from then on only the new token counts."""
    bench.ask(KEYED)
    claim = replace(CLAIM, token="", repeat="i", new_token="t2")
    assert resumable(bench, claim).repeat == "i"
    assert resumable(bench, claim).former == 0, "repeated after the token changed"
    assert bench.ask(replace(CLAIM, claim="n2")) == Denied(Denial.UNKNOWN)
    assert resumable(bench, replace(CLAIM, claim="n3", token="t2")).former > 0


def test_an_opening_may_take_an_idempotency_key_over(bench: LedgerBench) -> None:
    """When what the key named is gone, the next one with it begins anew."""
    bench.ask(KEYED)
    anew = replace(KEYED, resumable_id="c2", token="t2", anew=True)
    assert resumable(bench, anew).turn == 0
    assert bench.ask(replace(KEYED, resumable_id="c3")) == Repeated("c2", same=True)


def test_a_kept_answer_is_given_to_every_claim(bench: LedgerBench) -> None:
    """Closed with its answer it is told as it is, and never made again."""
    bench.ask(OPEN)
    assert resumable(bench, CLOSE).closed
    assert resumable(bench, CLOSE).answer == b"answer"
    given = resumable(bench, replace(CLAIM, again=True))
    assert (given.again, given.closed, given.answer) == (0, True, b"answer")


def test_a_failure_is_kept_as_an_answer_is(bench: LedgerBench) -> None:
    """With its idempotency key: who repeats the request hears of it."""
    bench.ask(KEYED)
    assert resumable(bench, replace(CLOSE, closed=Closing.FAILED, repeat="i")).answer == b"answer"
    assert bench.ask(replace(KEYED, resumable_id="c2")) == Repeated("c1", True)
    assert resumable(bench, CLAIM).answer == b"answer"


def test_what_was_closed_without_an_answer_is_made_again(bench: LedgerBench) -> None:
    """Its requests get names of their own: the turn tells them apart."""
    bench.ask(OPEN)
    bench.ask(replace(CLOSE, answer=b""))
    given = resumable(bench, CLAIM)
    assert given.again == given.turn and not given.closed
    later = resumable(bench, replace(CLAIM, claim="n2"))
    assert later.again == given.turn < later.turn, "running again: claimed as it is"
    anew = resumable(bench, replace(CLAIM, claim="n3", again=True))
    assert anew.again == anew.turn


def test_what_nobody_wants_any_more_is_over(bench: LedgerBench) -> None:
    """A claim is told so, and the idempotency key is free again."""
    bench.ask(KEYED)
    bench.ask(replace(CLOSE, answer=b"", closed=Closing.OVER, repeat="i"))
    assert bench.ask(CLAIM) == Denied(Denial.OVER)
    assert bench.ask(replace(CLAIM, again=True)) == Denied(Denial.OVER)
    assert resumable(bench, replace(KEYED, resumable_id="c2")).turn == 0


def test_what_was_refused_is_tried_again(bench: LedgerBench) -> None:
    """For who claims it by its token; its idempotency key is free for another attempt."""
    bench.ask(KEYED)
    bench.ask(replace(CLOSE, answer=b"", closed=Closing.REFUSED, repeat="i"))
    again = resumable(bench, CLAIM)
    assert again.again == again.turn and not again.closed
    assert resumable(bench, replace(KEYED, resumable_id="c2")).turn == 0


def test_who_was_superseded_closes_nothing_but_brings_its_answer(bench: LedgerBench) -> None:
    """A complete answer is the same whoever says so; that it failed, or that nobody wants it, is
    the last gateway's to say: who has lost it may have lost everybody that works on it too."""
    bench.ask(OPEN)
    bench.ask(CLAIM)
    for closed in (Closing.OVER, Closing.REFUSED, Closing.FAILED):
        assert bench.ask(replace(CLOSE, closed=closed)) == Denied(Denial.CLAIMED)
    assert not resumable(bench, replace(CLAIM, claim="n2")).closed
    assert bench.ask(CLOSE) == Denied(Denial.CLAIMED)
    assert resumable(bench, replace(CLAIM, claim="n3")).answer == b"answer"


def test_a_record_that_the_ledger_has_lost_is_made_again(bench: LedgerBench) -> None:
    """By the gateway that serves it: token and idempotency key are good again, and its turns go on
    where they were, and grow with time as before."""
    restored = resumable(bench, RESTORE)
    assert (restored.turn, restored.repeat, restored.body) == (5_000, "i", "b")
    assert restored.requests == OPEN.requests and restored.recipe == RECIPE
    second = replace(KEYED, resumable_id="c2", token="t2")
    assert bench.ask(second) == Repeated("c1", same=True)
    bench.pass_time(0.1)
    claimed = resumable(bench, CLAIM)
    assert claimed.former == 5_000 and claimed.turn >= 5_100
    assert bench.ask(replace(CLAIM, claim="n2", owner="other")) == Denied(Denial.FOREIGN)


def test_what_the_ledger_knows_better_is_not_made_again(bench: LedgerBench) -> None:
    """A gateway that was away does not take back what another one claimed, nor open what is closed,
    nor an idempotency key that names another request by now."""
    bench.ask(KEYED)
    bench.ask(replace(CLAIM, token="", repeat="i", new_token="t2"))
    turn = resumable(bench, RESTORE).turn
    assert turn == 5_000, "an older turn was all that it remembered"
    later = resumable(bench, replace(CLAIM, claim="n2")).turn
    assert resumable(bench, RESTORE).turn == later > turn
    bench.ask(replace(CLOSE, turn=later, repeat="i"))
    assert resumable(bench, replace(RESTORE, turn=later + 1_000_000)).answer == b"answer"
    bench.ask(replace(KEYED, resumable_id="c2", repeat="j"))
    bench.ask(replace(RESTORE, resumable_id="c3", repeat="j", body="other"))
    assert bench.ask(replace(KEYED, resumable_id="c4", repeat="j")) == Repeated("c2", same=True)


def test_closing_what_is_not_there(bench: LedgerBench) -> None:
    assert bench.ask(CLOSE) == Denied(Denial.UNKNOWN)


def test_records_go_with_their_time(bench: LedgerBench) -> None:
    """An open one after its life, a closed one after its window, the key with them."""
    bench.ask(replace(OPEN, life_ms=100))
    bench.pass_time(0.15)
    assert bench.ask(CLAIM) == Denied(Denial.UNKNOWN)
    bench.ask(replace(KEYED, resumable_id="c2"))
    bench.ask(replace(CLOSE, resumable_id="c2", keep_ms=100, repeat="i"))
    bench.pass_time(0.15)
    assert bench.ask(replace(CLAIM, resumable_id="c2")) == Denied(Denial.UNKNOWN)
    assert resumable(bench, replace(KEYED, resumable_id="c3")).turn == 0


# --- the twins --------------------------------------------------------------------------------

IDS = st.sampled_from(["c1", "c2"])
NAMES = st.sampled_from(["", "x", "y"])
BOOLS = st.booleans()
OPS = st.one_of(
    st.builds(
        lambda i, token, owner, repeat, body, anew: replace(
            OPEN, resumable_id=i, token=token, owner=owner, repeat=repeat, body=body, anew=anew
        ),
        *(IDS, NAMES.filter(bool), NAMES, NAMES, NAMES, BOOLS),
    ),
    st.builds(
        ClaimResumable,
        *(IDS, st.just(OTHER), st.sampled_from(["n1", "n2", "n3"]), NAMES, NAMES, NAMES),
        *(NAMES, BOOLS),
    ),
    st.builds(
        lambda i, turn, again, token, repeat: replace(
            RESTORE, resumable_id=i, turn=turn, again=again, token=token, repeat=repeat
        ),
        *(IDS, st.integers(0, 4), st.integers(0, 4), NAMES.filter(bool), NAMES),
    ),
    st.builds(
        CloseResumable,
        *(IDS, st.integers(0, 4), st.just(60_000), st.sampled_from([b"", b"a"])),
        *(st.sampled_from(Closing), NAMES),
    ),
)


@pytest.fixture(scope="module")
def real(server: LedgerServer) -> Iterator[RealBench]:
    bench = RealBench(server, "twins")
    # As if no time went by: turns are the same on both sides then, and grow by one.
    change(bench, b"now() - record.opened", b"0")
    yield bench
    bench.close()


@given(ops=st.lists(OPS, max_size=40))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_simulators_answers_are_the_scripts(real: RealBench, ops: list[AnyOp]) -> None:
    """Any order of openings, claims and ends gets the same answers from both."""
    real.wipe()
    model, now_ms = LedgerModel(LIMITS, Random(1)), 1_000_000
    answers = [answer for _, answer in real.ask_all(ops)]
    assert answers == [model.execute(op, now_ms) for op in ops]
