"""Conversations with a decode worker that goes on with what another one computed."""

from __future__ import annotations

import pytest

from baton.core.events import DrainRequested
from baton.core.outcomes import Ending, Outcome, Reason
from baton.decode.io import BlocksImported, ImportBlocks, RunStep
from baton.ports.driving import CallLedger, Exit, Measure
from baton.wire.messages import (
    DecodeReserved,
    RequestEnded,
    TokenChunk,
    WorkerStatus,
    WorkFailed,
    WorkRefused,
)
from support.decode_parts import ADVANCED, SIZE, STEP, Decode, G, R, run, spec
from support.machine_playbook import Like, ids, sent

OUTPUT = ids(50, 51, 52)
#: Six ids of the prompt and three of the output: two full blocks, and one token to compute.
TOKENS = 9


def imports(play: Decode, *, tokens: int = 6, epoch: int = 2, name: str = "r") -> ImportBlocks:
    """Reserve a request whose KV is in another worker's arena; return the import it asks for."""
    wanted = Like(ImportBlocks, request_id=name, epoch=epoch, source="decode-1")
    spec_ = spec(name, tokens=tokens, max_tokens=9)
    play.reserve(spec_, None, wanted, epoch=epoch, output=OUTPUT, source="decode-1")
    return play.last(ImportBlocks)


def imported(
    play: Decode, command: ImportBlocks, good: int, *expected: object, why: str = ""
) -> None:
    """Answer ``command``: its first ``good`` blocks are here."""
    sums = tuple(range(100, 100 + good))
    event = BlocksImported(command.request_id, command.epoch, sums, 0.01, why)
    play.feed(event, *expected)


def test_an_import_brings_the_full_blocks_and_the_rest_is_computed() -> None:
    """The router hears of it when nobody else need keep the blocks; then the tokens go on."""
    play = Decode()
    command = imports(play)
    chains = play.machine.state.sequences["r"].chains
    assert [check.chain for check in command.targets] == chains[:2]
    assert [(check.logical, check.tokens) for check in command.targets] == [(0, SIZE), (1, SIZE)]
    reserved = sent(R, DecodeReserved, request_id="r", epoch=2, cached_tokens=8)
    imported(play, command, 2, reserved, STEP)
    (row,) = play.last(RunStep).rows
    assert (row.start, len(row.token_ids)) == (8, 1)
    assert row.sample is not None and row.sample.index == 3
    play.stepped((53,), ADVANCED, STEP, run(3, 53, epoch=2))
    measured = {
        one.name: (one.value, one.labels.get("way"))
        for one in play.all
        if isinstance(one, Measure) and one.name.endswith(("recoveries_total", "ed_tokens_total"))
    }
    assert measured == {
        "recoveries_total": (1, "import"),
        "recovered_tokens_total": (8, "import"),
        "recomputed_tokens_total": (1, "import"),
    }


def test_imported_blocks_are_found_by_others() -> None:
    """They have verified under their names: they are the prefix cache's like any other."""
    play = Decode(blocks=12)
    imported(play, imports(play), 2, sent(R, DecodeReserved), STEP)
    mark = play.machine.state.pool.blocks[play.machine.state.sequences["r"].blocks[0]]
    assert mark.checksum == 100 and mark.chain
    play.cancel("r", epoch=2)
    play.stepped((53,))
    assert play.states() == {"FREE": 10, "CACHED": 2}
    play.local(spec("s", tokens=6, max_tokens=2))
    assert play.machine.state.sequences["s"].cached_tokens == SIZE


def test_only_what_the_own_cache_lacks_is_imported() -> None:
    """A block that is here under its name is not copied again."""
    play = Decode(blocks=12)
    play.local(spec("a", tokens=6, max_tokens=1))
    play.stepped((60,), ADVANCED, sent(G, TokenChunk))
    command = imports(play)
    assert [check.logical for check in command.targets] == [1]
    imported(play, command, 1, sent(R, DecodeReserved, cached_tokens=8), STEP)


def test_with_everything_here_nothing_is_imported() -> None:
    """The worker has it already, whatever another one has."""
    play = Decode()
    play.local(spec("a", tokens=6, max_tokens=1))
    play.stepped((60,), ADVANCED, sent(G, TokenChunk))
    reserved = sent(R, DecodeReserved, cached_tokens=4)
    play.reserve(spec("r", tokens=6, max_tokens=2), None, reserved, STEP, source="decode-1")


def test_what_did_not_come_is_computed_if_it_is_little() -> None:
    """A gap ends the import: what lies behind it is computed again."""
    play = Decode()
    reserved = sent(R, DecodeReserved, cached_tokens=4)
    imported(play, imports(play), 1, reserved, STEP, why="block 1 does not match")
    (row,) = play.last(RunStep).rows
    assert (row.start, len(row.token_ids)) == (4, TOKENS - 4)


def test_what_did_not_come_is_prefills_if_it_is_much() -> None:
    """Nothing is held for it then, except what did come, which the next attempt finds."""
    play = Decode(local_rest_tokens=4)
    command = imports(play)
    imported(play, command, 1, sent(R, WorkRefused, reason=Reason.KV_MISSING, epoch=2))
    assert play.used() == 0 and play.states() == {"FREE": 7, "CACHED": 1}
    command = imports(play, epoch=3)
    imported(play, command, 0, sent(R, WorkRefused, reason=Reason.KV_MISSING, epoch=3))


def test_targets_are_given_to_nobody_before_the_thread_is_done() -> None:
    """A cancel ends the request at once, and the import's memory with the import."""
    play = Decode(blocks=4)
    command = imports(play)
    play.cancel("r", epoch=2)
    assert play.used() == 3
    refused = sent(R, WorkRefused, reason=Reason.NO_BLOCKS)
    play.reserve(spec("b", tokens=6, first=30, max_tokens=2), None, refused)
    imported(play, command, 2)
    assert play.states() == {"FREE": 4}, "what was copied for nobody is nobody's"
    play.local(spec("b", tokens=6, first=30, max_tokens=2), epoch=2)


def test_a_higher_epoch_does_not_take_over_the_targets_of_a_lower_one() -> None:
    """Two imports of one request run at a time: each stores into its own blocks."""
    play = Decode(blocks=8)
    first = imports(play, epoch=2)
    second = imports(play, epoch=3)
    assert not {one.block for one in first.targets} & {one.block for one in second.targets}
    imported(play, first, 2)
    assert "r" in play.machine.state.sequences
    imported(play, second, 2, sent(R, DecodeReserved, epoch=3), STEP)


@pytest.mark.parametrize("how", ["lost", "gone", "ended"])
def test_an_import_whose_client_is_over_leaves_nothing(how: str) -> None:
    """Its gateway is out of reach, or dead, or says how it ended."""
    play = Decode()
    command = imports(play)
    if how == "ended":
        play.hear(G, RequestEnded("r", 2, Outcome(Ending.COMPLETED)))
    elif how == "gone":
        play.lose(G, Like(CallLedger), gone=True)
    else:
        play.lose(G, sent(R, WorkFailed, reason=Reason.NO_LINK))
    imported(play, command, 2)
    assert play.used() == 0 and not play.machine.state.sequences


def test_an_older_sequence_waits_for_memory_that_an_import_has() -> None:
    """The thread's blocks cannot be taken; when it is done the younger one gives way as usual."""
    play = Decode(blocks=5, growth_tokens=0)
    play.local(spec("a", tokens=7, first=30, max_tokens=9))
    play.stepped((60,), ADVANCED, STEP, sent(G, TokenChunk))
    command = imports(play)
    play.stepped((61,), sent(G, TokenChunk))
    assert play.machine.scheduler.preemptions == 0
    imported(play, command, 2, sent(R, DecodeReserved), STEP)
    assert [row.request_id for row in play.last(RunStep).rows] == ["a"]
    assert play.machine.scheduler.preemptions == 1


def test_a_drain_waits_for_the_thread() -> None:
    """A request that is being imported goes on, and is then offered like any other."""
    play = Decode()
    command = imports(play)
    play.feed(DrainRequested())
    play.cancel("r", epoch=2)
    assert not any(isinstance(each, Exit) for each in play.all)
    imported(play, command, 2, Exit(0, "drained"))


def test_the_drains_end_gives_an_import_back() -> None:
    """Time is up: the router places it elsewhere; the process waits for its thread by itself."""
    play = Decode(drain_ms=1_000)
    imports(play)
    play.feed(DrainRequested())
    said = play.wait(1.1)
    assert sent(R, WorkFailed, request_id="r", epoch=2, reason=Reason.DRAINING).matches(said[0])
    assert said[-1] == Exit(0, "drained")


def test_an_import_counts_as_waiting() -> None:
    """Routers see the load before the first step."""
    play = Decode()
    imports(play)
    play.wait(0.1)
    assert play.messages(WorkerStatus)[-1].waiting == 1


def test_without_a_router_everything_is_computed_here() -> None:
    """There is nobody who would place it again: late is better than never."""
    play = Decode(local_rest_tokens=4)
    command = imports(play)
    play.lose(R, gone=True)
    imported(play, command, 0, STEP)


def test_an_attempt_whose_import_still_runs_is_not_begun_again() -> None:
    """A ledger that lost its last writes has one attempt placed twice: the thread's answer is for
    the first time."""
    play = Decode()
    command = imports(play)
    play.cancel("r", epoch=2)
    refused = sent(R, WorkRefused, epoch=2, reason=Reason.STALE_EPOCH)
    play.reserve(spec(max_tokens=9), None, refused, epoch=2, output=OUTPUT, source="decode-1")
    imported(play, command, 2)
    assert play.used() == 0
