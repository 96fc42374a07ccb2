"""`baton audit`: every kind of leak is found where one was planted, and nothing where none was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from baton.cli.audit import UNSEEN, watch
from baton.cli.discrepancies import KINDS, Discrepancy, Kind, bound_ms, discrepancies
from baton.cli.records import LedgerPicture, Record
from baton.cli.sample import ArenaFile, Sample
from baton.cli.terminal import ExitCode
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import BlockState, RequestState
from baton.core.limits import Limits
from baton.ports.channel import BlockMark
from baton.wire.holdings import HeldBlock, HeldRequest, HeldTicket, Holdings

LIMITS = Limits()
GATEWAY, ROUTER = Peer("gateway-0", 11), Peer("router-0", 12)
PREFILL, DECODE = Peer("prefill-0", 13), Peer("decode-0", 14)
ROLES = {
    GATEWAY: Role.GATEWAY,
    ROUTER: Role.ROUTER,
    PREFILL: Role.PREFILL,
    DECODE: Role.DECODE,
}
NOBODY = Peer("decode-9", 99)
ARENA = "/dev/shm/baton-c-decode-0.arena"
RUNS, FILLS, OVER = "runs", "fills", "over"


def held(request_id: str, stage: str, **fields: object) -> HeldRequest:
    return HeldRequest(request_id, 1, stage, **fields)  # type: ignore[arg-type]


def record(request_id: str, state: RequestState) -> Record:
    return Record(request_id, state, 1, 1, ROUTER, GATEWAY, DECODE, PREFILL)


def clean() -> Sample:
    """A cluster in which one request decodes, one is being prefilled and one is over."""
    members = {
        peer: Member(peer, role, "ipc://x", pid=1000 + number, boot_id="b")
        for number, (peer, role) in enumerate(ROLES.items())
    }
    records = {
        RUNS: record(RUNS, RequestState.DECODING),
        FILLS: record(FILLS, RequestState.PREFILLING),
        OVER: record(OVER, RequestState.COMPLETED),
    }
    return Sample(
        at=100.0,
        ledger=LedgerPicture(
            members=members,
            leases=dict.fromkeys(ROLES, 1500),
            records=records,
            owners=frozenset((peer, name) for peer in ROLES for name in (RUNS, FILLS)),
        ),
        holdings={
            GATEWAY: Holdings(requests=(held(RUNS, "running"), held(FILLS, "running"))),
            ROUTER: Holdings(requests=(held(RUNS, "placed"), held(FILLS, "placed"))),
            PREFILL: Holdings(requests=(held(FILLS, "computing"),)),
            DECODE: Holdings(
                requests=(
                    held(RUNS, "running", blocks=(0, 1)),
                    held(FILLS, "remote", blocks=(2,)),
                ),
                tickets=(HeldTicket(FILLS, 1, PREFILL, (2,)),),
                blocks=(
                    HeldBlock(0, BlockState.RESIDENT, 5, 1, 0),
                    HeldBlock(1, BlockState.RESIDENT, 1, 1, 0),
                    HeldBlock(2, BlockState.FILLING, 3, 1, 1),
                ),
            ),
        },
        arenas=(
            ArenaFile(
                path=ARENA,
                owner=DECODE,
                owned=True,
                holders=(PREFILL.incarnation, DECODE.incarnation),
                marks={
                    0: BlockMark(0, BlockState.RESIDENT, 5),
                    1: BlockMark(1, BlockState.RESIDENT, 1),
                    2: BlockMark(2, BlockState.FILLING, 3, 1, PREFILL.incarnation),
                },
            ),
        ),
        dead_sockets=(),
        dead_locks=(),
        supervised=dict.fromkeys((peer.worker_id for peer in ROLES), 300.0),
        dead=frozenset(),
        strays=(),
        unseen=(),
    )


def _ledger(sample: Sample, **changes: object) -> Sample:
    return replace(sample, ledger=replace(sample.ledger, **changes))  # type: ignore[arg-type]


def _holds(sample: Sample, peer: Peer, **changes: object) -> Sample:
    changed = msgspec.structs.replace(sample.holdings[peer], **changes)
    return replace(sample, holdings={**sample.holdings, peer: changed})


def _more(sample: Sample, peer: Peer, request: HeldRequest) -> Sample:
    return _holds(sample, peer, requests=(*sample.holdings[peer].requests, request))


def _less(sample: Sample, peer: Peer, request_id: str) -> Sample:
    rest = [each for each in sample.holdings[peer].requests if each.request_id != request_id]
    return _holds(sample, peer, requests=tuple(rest))


def _block(sample: Sample) -> Sample:
    """Nobody's block, by the worker's own table; the arena's record agrees with the table."""
    blocks = (*sample.holdings[DECODE].blocks, HeldBlock(7, BlockState.RESIDENT, 2, 1, 0))
    arena = sample.arenas[0]
    marks = {**arena.marks, 7: BlockMark(7, BlockState.RESIDENT, 2)}
    return replace(_holds(sample, DECODE, blocks=blocks), arenas=(replace(arena, marks=marks),))


def _mark(sample: Sample) -> Sample:
    arena = sample.arenas[0]
    marks = {**arena.marks, 9: BlockMark(9, BlockState.QUARANTINED, 4)}
    return replace(sample, arenas=(replace(arena, marks=marks),))


def _ticket(sample: Sample, request_id: str, *, revoked: bool) -> Sample:
    """A ticket that outlived its sequence; what it holds is counted, by both."""
    ticket = HeldTicket(request_id, 1, PREFILL, (2,), revoked=revoked)
    changed = _holds(_less(sample, DECODE, FILLS), DECODE, tickets=(ticket,))
    blocks = (*sample.holdings[DECODE].blocks[:2], HeldBlock(2, BlockState.QUARANTINED, 3, 0, 1))
    arena = sample.arenas[0]
    marks = {**arena.marks, 2: BlockMark(2, BlockState.QUARANTINED, 3)}
    changed = _holds(changed, DECODE, blocks=blocks)
    records = {**sample.ledger.records, FILLS: record(FILLS, RequestState.CANCELLED)}
    owners = frozenset(entry for entry in sample.ledger.owners if entry[1] != FILLS)
    for peer in (GATEWAY, ROUTER, PREFILL):
        changed = _less(changed, peer, FILLS)
    changed = _ledger(changed, records=records, owners=owners)
    return replace(changed, arenas=(replace(arena, marks=marks),))


def _orphan_record(sample: Sample) -> Sample:
    """Its prefill was replaced, and nobody placed the request again."""
    orphan = replace(record(FILLS, RequestState.PREFILLING), prefill=NOBODY)
    owners = sample.ledger.owners - {(PREFILL, FILLS)} | {(NOBODY, FILLS)}
    changed = _less(sample, PREFILL, FILLS)
    return _ledger(changed, records={**sample.ledger.records, FILLS: orphan}, owners=owners)


def _lost_record(sample: Sample) -> Sample:
    records = {name: each for name, each in sample.ledger.records.items() if name != RUNS}
    owners = frozenset(entry for entry in sample.ledger.owners if entry[1] != RUNS)
    return _ledger(sample, records=records, owners=owners)


def _unknown_to_worker(sample: Sample) -> Sample:
    """Decode forgot a sequence and gave its blocks back properly; its router still waits."""
    changed = _less(sample, DECODE, RUNS)
    changed = _holds(changed, DECODE, blocks=sample.holdings[DECODE].blocks[2:])
    arena = sample.arenas[0]
    return replace(changed, arenas=(replace(arena, marks={2: arena.marks[2]}),))


def _idle_session(sample: Sample) -> Sample:
    """Waiting at a router that has forgotten it."""
    waiting = replace(record("waits", RequestState.ADMITTED), decode=None, prefill=None)
    owners = sample.ledger.owners | {(GATEWAY, "waits"), (ROUTER, "waits")}
    changed = _more(sample, GATEWAY, held("waits", "submitted"))
    return _ledger(changed, records={**sample.ledger.records, "waits": waiting}, owners=owners)


def _dead_lease(sample: Sample) -> Sample:
    ghost = Member(NOBODY, Role.DECODE, "ipc://x", pid=4242, boot_id="b")
    changed = _ledger(
        sample,
        members={**sample.ledger.members, NOBODY: ghost},
        leases={**sample.ledger.leases, NOBODY: 900},
    )
    return replace(changed, dead=frozenset({NOBODY}))


def _unregistered(sample: Sample) -> Sample:
    return replace(sample, supervised={**sample.supervised, "prefill-1": 90.0})


PLANTS: dict[Kind, Callable[[Sample], Sample]] = {
    Kind.BLOCK_WITHOUT_HOLDER: _block,
    Kind.BLOCK_DIFFERS: _mark,
    Kind.QUARANTINE_OVERDUE: lambda s: _ticket(s, FILLS, revoked=True),
    Kind.TICKET_OF_ENDED: lambda s: _ticket(s, FILLS, revoked=False),
    Kind.SEQUENCE_OF_ENDED: lambda s: _more(s, DECODE, held(OVER, "running")),
    Kind.JOB_OF_ENDED: lambda s: _more(s, PREFILL, held(OVER, "computing")),
    Kind.ENTRY_OF_ENDED: lambda s: _more(s, ROUTER, held(OVER, "placed")),
    Kind.END_UNHEARD: lambda s: _more(s, DECODE, held(OVER, "finished")),
    Kind.RECORD_WITHOUT_OWNER: _orphan_record,
    Kind.RECORD_UNKNOWN_TO_WORKER: _unknown_to_worker,
    Kind.RECORD_WITHOUT_SESSION: lambda s: _less(s, GATEWAY, RUNS),
    Kind.OWNER_INDEX_DIFFERS: lambda s: _ledger(s, owners=s.ledger.owners | {(DECODE, OVER)}),
    Kind.SESSION_WITHOUT_RECORD: _lost_record,
    Kind.SESSION_WITHOUT_WORK: _idle_session,
    Kind.LEASE_OF_THE_DEAD: _dead_lease,
    Kind.MEMBER_WITHOUT_LEASE: lambda s: _ledger(s, leases={**s.ledger.leases, NOBODY: 5}),
    Kind.PROCESS_WITHOUT_LEASE: _unregistered,
    Kind.STRAY_PROCESS: lambda s: replace(s, strays=("pid 5 (python)",)),
    Kind.ARENA_WITHOUT_OWNER: lambda s: replace(
        s, arenas=(*s.arenas, ArenaFile("/dev/shm/x.arena", NOBODY, False, (), {}))
    ),
    Kind.ARENA_LOCK_OF_UNKNOWN: lambda s: replace(
        s, arenas=(replace(s.arenas[0], holders=(*s.arenas[0].holders, 77)),)
    ),
    Kind.SOCKET_OF_THE_DEAD: lambda s: replace(s, dead_sockets=("/run/x.sock",)),
    Kind.LOCK_FILE_OF_THE_DEAD: lambda s: replace(s, dead_locks=("/run/x.sock.lock",)),
}


class Time:
    """Looks at samples in turn; the last one stays."""

    def __init__(self, *samples: Sample) -> None:
        self.samples = list(samples)
        self.now = 100.0

    def look(self) -> Sample:
        sample = self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]
        return replace(sample, at=self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_nothing_is_wrong_where_nothing_is() -> None:
    """A busy cluster in order has no discrepancy, and one look says so."""
    assert discrepancies(clean()) == []
    time = Time(clean())
    verdict = watch(time.look, LIMITS, time.sleep)
    assert (verdict.code, verdict.looks, verdict.seconds) == (ExitCode.OK, 1, 0.0)


def test_every_kind_has_a_planted_leak() -> None:
    """No kind without a proof that it is found, nor without a bound."""
    assert set(PLANTS) == set(Kind) == set(KINDS)


@pytest.mark.parametrize("kind", Kind)
def test_a_planted_leak_is_found(kind: Kind) -> None:
    """It is named, after its bound and not before; what is planted is all that is found."""
    planted = PLANTS[kind](clean())
    found = discrepancies(planted)
    assert kind in {each.kind for each in found}
    time = Time(planted)
    verdict = watch(time.look, LIMITS, time.sleep)
    assert verdict.code == ExitCode.FAILED
    finding = next(each for each in verdict.findings if each.what.kind is kind)
    assert finding.seen_s > bound_ms(Discrepancy(kind, ""), LIMITS) / 1000
    assert {each.what.key for each in verdict.findings} == {each.key for each in found}


@pytest.mark.parametrize("kind", Kind)
def test_what_goes_away_within_its_bound_is_no_fault(kind: Kind) -> None:
    """Seen once and then no more: requests come and go."""
    time = Time(PLANTS[kind](clean()), clean())
    assert watch(time.look, LIMITS, time.sleep).code == ExitCode.OK


def test_another_of_the_same_kind_is_not_the_same() -> None:
    """A block that is in quarantine again, for another request, is no overdue one."""
    again = _ticket(clean(), FILLS, revoked=True)
    other = _holds(again, DECODE, tickets=(HeldTicket("next", 1, PREFILL, (2,), revoked=True),))
    time = Time(again, other)
    assert watch(time.look, LIMITS, time.sleep).code == ExitCode.OK


def test_what_cannot_be_seen_is_not_clean() -> None:
    """A process that does not answer is asked again, then told: exit code 2."""
    blind = replace(clean(), unseen=("decode-0/14: silent for 2 s",))
    assert watch(Time(blind).look, LIMITS, lambda _: None).code == UNSEEN
    time = Time(blind, blind, clean())
    assert watch(time.look, LIMITS, time.sleep).code == ExitCode.OK


def test_a_finding_is_told_although_something_else_is_silent() -> None:
    """Exit code 1 outweighs 2: what is wrong is wrong."""
    planted = PLANTS[Kind.BLOCK_DIFFERS](clean())
    blind = replace(planted, unseen=("prefill-0/13: silent",))
    time = Time(planted, planted, *[blind] * 9)
    slow = PLANTS[Kind.STRAY_PROCESS]
    time.samples = [slow(each) for each in time.samples]
    verdict = watch(time.look, LIMITS, time.sleep)
    assert verdict.code == ExitCode.FAILED
    assert verdict.unseen


def _without_gateway(sample: Sample, stage: str, window_ms: int) -> Sample:
    """Its gateway died, and its decode as well; its router waits for the client to come back."""
    orphan = replace(record("away", RequestState.DECODING), gateway=NOBODY, decode=NOBODY)
    owners = {(peer, "away") for peer in (NOBODY, ROUTER, PREFILL)} | set(sample.ledger.owners)
    changed = _more(sample, ROUTER, held("away", stage, window_ms=window_ms))
    records = {**sample.ledger.records, "away": orphan}
    return _ledger(changed, records=records, owners=frozenset(owners))


def test_a_request_that_waits_for_its_client_is_no_leak_within_its_window() -> None:
    """Its gateway is gone, and so may be its decode: its router keeps it until somebody resumes it,
    or ends it when the window is over. What nobody waits for is found at the usual bound."""
    waiting = _without_gateway(clean(), "fencing", window_ms=60_000)
    time = Time(waiting)
    verdict = watch(time.look, LIMITS, time.sleep)
    kinds = {each.what.kind for each in verdict.findings}
    assert kinds == {Kind.RECORD_WITHOUT_OWNER}
    assert all(each.seen_s > 60 + 11.5 for each in verdict.findings)
    time = Time(*[waiting] * 12, clean())
    verdict = watch(time.look, LIMITS, time.sleep)
    assert verdict.code == ExitCode.OK
    assert 55 < verdict.seconds < 61, "it looks again and again, and ends when all is well"
    time = Time(_without_gateway(clean(), "fencing", window_ms=0))
    assert all(each.seen_s < 12 for each in watch(time.look, LIMITS, time.sleep).findings)


def test_a_request_that_is_being_ended_keeps_its_bound() -> None:
    """Its router has just forgotten it, and the ledger was asked a moment before that."""
    waiting = _without_gateway(clean(), "fencing", window_ms=20_000)
    forgotten = _less(waiting, ROUTER, "away")
    time = Time(*[waiting] * 4, forgotten, clean())
    assert watch(time.look, LIMITS, time.sleep).code == ExitCode.OK


def test_a_finished_sequence_may_wait_for_its_client_as_long_as_its_window() -> None:
    """An answer that nobody has heard is an answer for who comes back."""
    waits = _more(clean(), DECODE, held(RUNS + "-2", "finished", window_ms=300_000))
    time = Time(waits)
    (finding,) = watch(time.look, LIMITS, time.sleep).findings
    assert finding.what.kind is Kind.END_UNHEARD and finding.seen_s > 360


@pytest.mark.parametrize("stage", ["fencing", "retrying"])
def test_an_attempt_that_its_router_has_given_up_is_nobodys(stage: str) -> None:
    """Decode dropped it and said so; its router waits until a gateway out of reach is fenced."""
    planted = _more(_less(_unknown_to_worker(clean()), ROUTER, RUNS), ROUTER, held(RUNS, stage))
    assert not list(discrepancies(planted))


def test_a_block_that_moved_while_its_owner_was_asked_says_nothing() -> None:
    """A cached block that one request after the other takes up differs in every look."""
    planted = PLANTS[Kind.BLOCK_DIFFERS](clean())
    arena = replace(planted.arenas[0], moving=frozenset({9}))
    assert not list(discrepancies(replace(planted, arenas=(arena,))))


def test_a_request_that_runs_without_its_record_is_not_over() -> None:
    """After the ledger was emptied its sequences and jobs are not called leaks at once."""
    kinds = {each.kind for each in discrepancies(_lost_record(clean()))}
    assert kinds == {Kind.SESSION_WITHOUT_RECORD}


def test_the_operator_finds_every_kind_and_bound() -> None:
    """docs/operations.md has a line for each, with the bound in seconds."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for kind, (meaning, bound) in KINDS.items():
        line = f"| `{kind}` | {meaning} | {bound(LIMITS) / 1000:g} |"
        assert line in page, line


def test_a_router_may_wait_for_a_client_that_came_back_elsewhere() -> None:
    """The gateway that it came back to knows nothing of that router: the former one is dead."""
    time = Time(_more(clean(), ROUTER, held(OVER, "placed", window_ms=60_000)))
    (finding,) = watch(time.look, LIMITS, time.sleep).findings
    assert finding.what.kind is Kind.ENTRY_OF_ENDED
    assert finding.seen_s > 60
    blocks = _more(clean(), DECODE, held(OVER, "running", window_ms=60_000))
    kinds = {each.kind: each.window_ms for each in discrepancies(blocks)}
    assert kinds == {Kind.SEQUENCE_OF_ENDED: 0}


def test_a_record_that_nobody_sees_to_is_no_workers_fault() -> None:
    """Its gateway is dead, its router too or has ended it (and the ledger did not hear), and decode
    has given the attempt up: the sweep ends it, within the bound of a record without an owner."""
    for router in (NOBODY, ROUTER):
        gone = replace(record("gone", RequestState.DECODING), gateway=NOBODY, router=router)
        owners = {(peer, "gone") for peer in (NOBODY, router, DECODE, PREFILL)}
        sample = _ledger(
            clean(),
            records={**clean().ledger.records, "gone": gone},
            owners=clean().ledger.owners | owners,
        )
        assert {each.kind for each in discrepancies(sample)} == {Kind.RECORD_WITHOUT_OWNER}
        cared = _more(sample, ROUTER, held("gone", "placed"))
        both = {Kind.RECORD_WITHOUT_OWNER, Kind.RECORD_UNKNOWN_TO_WORKER}
        if router == ROUTER:
            assert {each.kind for each in discrepancies(cared)} == both
