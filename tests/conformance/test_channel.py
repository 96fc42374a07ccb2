"""What the machines rely on in a KV channel, of the real and of the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.ports.channel import ArenaGone, ArenaInUse, BlockMark, NamedBlock
from baton.wire.handover import TicketBlock
from support.channel_fixtures import shared_directory
from support.channel_hosts import FakeHost, RealHost
from support.channel_parts import CHAIN, COMPAT, LAYOUT, OWNER, WRITER, pattern
from support.device_parts import device_host

FILLING = BlockMark(3, BlockState.FILLING, 7, epoch=2, writer=WRITER.incarnation)
TICKET = (TicketBlock(logical=0, block=3, generation=7),)


@pytest.fixture(params=["real", "device", "simulated"])
def host(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "simulated":
        yield FakeHost()
        return
    if request.param == "device":
        with device_host() as found:
            yield found
        return
    with shared_directory() as directory:
        real = RealHost(directory)
        yield real
        real.close()


def test_a_new_arena_is_zero_and_all_its_blocks_are_free(host: Any) -> None:
    """Nothing of an earlier arena shows in a new one."""
    arena = host.create(blocks=8)
    assert arena.blocks_total == 8
    assert len(arena.memory) == 8 * LAYOUT.block_bytes
    assert not any(arena.memory)
    assert all(arena.marked(i) == BlockMark(i, BlockState.FREE, 0) for i in range(8))


def test_the_owner_sees_what_the_writer_stores_and_the_other_way_round(host: Any) -> None:
    """Both sides look at the same bytes: nothing is copied or sent."""
    arena = host.create()
    mapped = host.channel().map(arena.ref, WRITER)
    mapped.memory[:5] = b"write"
    arena.memory[-5:] = b"reply"
    assert bytes(arena.memory[:5]) == b"write"
    assert bytes(mapped.memory[-5:]) == b"reply"


def test_marks_reach_the_writer_as_they_were_stored(host: Any) -> None:
    """Every field of a mark is read back by the other side, in the order of the last store."""
    arena = host.create()
    mapped = host.channel().map(arena.ref, WRITER)
    mark = BlockMark(
        5,
        BlockState.CACHED,
        2**32 - 1,
        2**63,
        2**62 - 1,
        CHAIN,
        2**64 - 1,
        filled=65535,
        request_key=2**64 - 1,
    )
    arena.mark([replace(mark, generation=1), mark])
    assert mapped.marked(5) == mark
    assert mapped.marked(4) == BlockMark(4, BlockState.FREE, 0)


def test_a_writer_may_write_exactly_what_is_filling_for_it(host: Any) -> None:
    """Another state, generation, epoch, writer or block number forbids the whole chunk."""
    arena = host.create()
    mapped = host.channel().map(arena.ref, WRITER)
    assert not mapped.may_write(2, TICKET)
    arena.mark([FILLING])
    assert mapped.may_write(2, TICKET)
    assert not mapped.may_write(1, TICKET)
    assert not mapped.may_write(3, TICKET)
    assert not mapped.may_write(2, [TicketBlock(0, 3, 6)])
    assert not mapped.may_write(2, [*TICKET, TicketBlock(1, 4, 7)])
    for state in set(BlockState) - {BlockState.FILLING}:
        arena.mark([replace(FILLING, state=state)])
        assert not mapped.may_write(2, TICKET)
    arena.mark([replace(FILLING, writer=WRITER.incarnation + 1)])
    assert not mapped.may_write(2, TICKET)


@pytest.mark.parametrize("block", [-1, 8, 2**40])
def test_a_block_number_outside_the_arena_is_never_writable(host: Any, block: int) -> None:
    """A ticket's numbers are checked against the arena, not trusted."""
    arena = host.create(blocks=8)
    mapped = host.channel().map(arena.ref, WRITER)
    arena.mark([replace(FILLING, block=7), replace(FILLING, block=0)])
    assert not mapped.may_write(2, [TicketBlock(0, block, 7)])


def test_checksums_of_the_writer_verify_at_the_owner(host: Any) -> None:
    """Full and partial blocks written by one side are accepted by the other."""
    arena = host.create()
    mapped = host.channel().map(arena.ref, WRITER)
    mapped.memory[:] = pattern(len(mapped.memory))
    checks = [
        host.check(mapped, block, logical=block, tokens=tokens)
        for block, tokens in ((0, 4), (5, 4), (7, 1), (2, 3))
    ]
    sums = mapped.checksums([replace(check, checksum=0) for check in checks])
    assert sums == [check.checksum for check in checks]
    assert arena.verify(checks) == []
    assert arena.checksums(checks) == sums


def test_only_the_damaged_block_is_named(host: Any) -> None:
    """One flipped bit costs one block."""
    arena = host.create()
    arena.memory[:] = pattern(len(arena.memory))
    checks = [host.check(arena, block, logical=10 + block) for block in range(4)]
    host.flip(arena, 2, LAYOUT.block_bytes - 1)
    assert arena.verify(checks) == [12]
    host.flip(arena, 2, LAYOUT.block_bytes - 1)
    assert arena.verify(checks) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 3},
        {"tokens": 0},
        {"tokens": 5},
        {"tokens": -1},
        {"block": 1},
        {"block": 8},
        {"block": -8},
        {"chain": bytes(16)},
        {"chain": b""},
        {"checksum": -1},
        {"checksum": 2**64},
    ],
)
def test_a_true_checksum_for_something_else_is_a_mismatch(host: Any, wrong: dict[str, Any]) -> None:
    """The sum binds bytes to length and prefix, and so to position; nonsense never raises."""
    arena = host.create()
    arena.memory[:] = pattern(len(arena.memory))
    check = replace(host.check(arena, 0), **wrong)
    assert arena.verify([check]) == [check.logical]


def test_a_writer_is_alive_from_its_mapping_to_its_death_and_never_again(host: Any) -> None:
    """Once seen gone, that incarnation is dead for ever; another one of the same name lives."""
    arena = host.create()
    assert not arena.writer_alive(WRITER.incarnation)
    mapped = host.channel().map(arena.ref, WRITER)
    assert arena.writer_alive(WRITER.incarnation)
    host.die(mapped, WRITER.incarnation)
    assert not arena.writer_alive(WRITER.incarnation)
    successor = Peer(WRITER.worker_id, WRITER.incarnation + 1)
    host.channel().map(arena.ref, successor)
    assert arena.writer_alive(successor.incarnation)
    assert not arena.writer_alive(WRITER.incarnation)


def test_an_incarnation_seen_dead_stays_dead_even_if_somebody_uses_its_number(host: Any) -> None:
    """What was concluded from its death cannot be taken back."""
    arena = host.create()
    mapped = host.channel().map(arena.ref, WRITER)
    assert arena.writer_alive(WRITER.incarnation)
    mapped.close()
    assert not arena.writer_alive(WRITER.incarnation)
    host.channel().map(arena.ref, WRITER)
    assert not arena.writer_alive(WRITER.incarnation)


def test_the_owner_itself_is_alive(host: Any) -> None:
    """Asking for one's own incarnation is not a question to the kernel."""
    assert host.create().writer_alive(OWNER.incarnation)


def test_one_process_writes_in_several_arenas(host: Any) -> None:
    """Locks in different arenas have nothing to do with each other."""
    first, second = host.create(), host.create(Peer("decode-1", 1002))
    channel = host.channel()
    mapped = channel.map(first.ref, WRITER)
    other = channel.map(second.ref, WRITER)
    other.memory[0] = 9
    assert (first.memory[0], second.memory[0]) == (0, 9)
    mapped.close()
    assert not first.writer_alive(WRITER.incarnation)
    assert second.writer_alive(WRITER.incarnation)


def test_mapping_twice_gives_the_same_mapping(host: Any) -> None:
    """A second ticket of the same arena costs no second mapping."""
    arena, channel = host.create(), host.channel()
    assert channel.map(arena.ref, WRITER) is channel.map(arena.ref, WRITER)


def test_an_incarnation_that_closed_an_arena_never_maps_it_again(host: Any) -> None:
    """The owner took the lock's end for death, so it must have been for good."""
    arena, channel = host.create(), host.channel()
    channel.map(arena.ref, WRITER).close()
    with pytest.raises(ArenaGone, match="closed"):
        channel.map(arena.ref, WRITER)


def test_two_processes_of_one_incarnation_are_refused(host: Any) -> None:
    """An incarnation's byte has one holder."""
    arena = host.create()
    host.channel().map(arena.ref, WRITER)
    with pytest.raises(ArenaGone, match="another process"):
        host.channel().map(arena.ref, WRITER)


def test_a_second_owner_is_refused_while_the_first_lives(host: Any) -> None:
    """The error names who holds the arena, and the first owner notices nothing."""
    arena = host.create()
    with pytest.raises(ArenaInUse, match="decode-0/1001"):
        host.create(Peer("decode-0", 1003))
    host.channel().map(arena.ref, WRITER).memory[0] = 1
    assert arena.memory[0] == 1


def test_a_dead_owners_arena_is_replaced_and_its_old_name_leads_nowhere(host: Any) -> None:
    """A ticket of the old incarnation opens nothing, and old mappings do not reach the new one."""
    old = host.create()
    mapped = host.channel().map(old.ref, WRITER)
    host.die(old, OWNER.incarnation)
    new = host.create(Peer("decode-0", 1003))
    assert new.ref.path == old.ref.path
    mapped.memory[0] = 0x55
    assert new.memory[0] == 0
    with pytest.raises(ArenaGone):
        host.channel().map(old.ref, Peer("prefill-1", 2002))
    assert host.channel().map(new.ref, WRITER).memory[0] == 0


# --- taking over ----------------------------------------------------------------------------------

HEIR = Peer(OWNER.worker_id, 1003)


def test_a_successor_takes_the_arena_over_as_it_was_left(host: Any) -> None:
    """The same file with the same bytes and the same metadata, and another owner."""
    old = host.create()
    old.memory[:5] = b"worth"
    mark = BlockMark(3, BlockState.CACHED, 7, chain=CHAIN, checksum=11)
    old.mark([mark])
    assert old.former is None
    host.die(old, OWNER.incarnation)
    new = host.open(HEIR)
    assert new.former == OWNER
    assert new.ref == msgspec.structs.replace(old.ref, owner=HEIR)
    assert bytes(new.memory[:5]) == b"worth"
    assert new.marked(3) == mark
    assert new.blocks_total == old.blocks_total


def test_without_an_arena_a_new_one_is_made(host: Any) -> None:
    """The first start, and the one after an orderly end, find nothing."""
    for owner in (OWNER, HEIR):
        arena = host.open(owner, blocks=8)
        assert arena.former is None
        assert not any(arena.memory)
        arena.memory[0] = 1
        arena.close(unlink=True)


def test_a_living_owners_arena_is_not_taken_over(host: Any) -> None:
    """Neither the first owner's nor its successor's; the error names who it is."""
    first = host.create()
    with pytest.raises(ArenaInUse, match="decode-0/1001"):
        host.open(HEIR)
    assert host.channel().map(first.ref, WRITER).ref == first.ref
    host.die(first, OWNER.incarnation)
    host.open(HEIR)
    with pytest.raises(ArenaInUse, match="decode-0/1003"):
        host.open(Peer("decode-0", 1004))


@pytest.mark.parametrize(
    "other",
    [
        {"blocks": 9},
        {"compat": msgspec.structs.replace(COMPAT, model="other")},
        {"layout": msgspec.structs.replace(LAYOUT, heads=LAYOUT.head_dim, head_dim=LAYOUT.heads)},
    ],
)
def test_an_arena_that_does_not_fit_is_replaced(host: Any, other: dict[str, Any]) -> None:
    """Another size asked for, another model, another layout: a new file, all zero."""
    old = host.create()
    old.memory[0] = 1
    host.die(old, OWNER.incarnation)
    new = host.open(HEIR, **other)
    assert new.former is None
    assert new.ref.file_id != old.ref.file_id
    assert not any(new.memory)


def test_an_arena_of_the_size_asked_for_is_taken_over(host: Any) -> None:
    """A worker that starts again with its old settings gets its old memory."""
    old = host.create(blocks=9)
    host.die(old, OWNER.incarnation)
    assert host.open(HEIR, blocks=9).former == OWNER


def test_take_overs_that_fail_again_and_again_end_with_a_new_arena(host: Any) -> None:
    """What kills its owners is not tried for ever; a completed take-over counts from the start."""
    arena = host.create()
    owners = iter(range(2001, 2100))
    former = OWNER

    def next_one(*, completed: bool) -> Any:
        nonlocal arena, former
        host.die(arena, former.incarnation)
        former = Peer(OWNER.worker_id, next(owners))
        arena = host.open(former)
        if completed:
            arena.complete()
        return arena.former

    assert next_one(completed=True) == OWNER
    assert next_one(completed=False) is not None
    assert next_one(completed=True) is not None
    assert next_one(completed=False) is not None
    assert next_one(completed=False) is not None
    assert next_one(completed=False) is None, "two have failed"
    assert next_one(completed=False) is not None, "the new one has failed nobody"


def test_a_living_writer_keeps_its_mapping_when_the_owner_changes(host: Any) -> None:
    """The successor sees its lock and its stores; mapped again, it is the same mapping."""
    old = host.create()
    channel = host.channel()
    mapped = channel.map(old.ref, WRITER)
    host.die(old, OWNER.incarnation)
    mapped.memory[0] = 7
    new = host.open(HEIR)
    assert new.memory[0] == 7
    assert new.writer_alive(WRITER.incarnation)
    assert channel.map(new.ref, WRITER) is mapped
    assert mapped.ref == new.ref
    mapped.memory[1] = 8
    assert new.memory[1] == 8
    new.mark([FILLING])
    assert mapped.may_write(2, TICKET)
    host.die(mapped, WRITER.incarnation)
    assert not new.writer_alive(WRITER.incarnation)


def test_a_writer_that_died_with_the_owner_is_not_alive_to_the_successor(host: Any) -> None:
    """Nobody saw its lock go, and nobody needs to have."""
    old = host.create()
    mapped = host.channel().map(old.ref, WRITER)
    host.die(old, OWNER.incarnation)
    host.die(mapped, WRITER.incarnation)
    assert not host.open(HEIR).writer_alive(WRITER.incarnation)


def test_the_former_owners_reference_leads_nowhere(host: Any) -> None:
    """A ticket of the dead owner opens nothing, though the file is the same."""
    old = host.create()
    host.die(old, OWNER.incarnation)
    new = host.open(HEIR)
    with pytest.raises(ArenaGone):
        host.channel().map(old.ref, WRITER)
    assert not new.writer_alive(WRITER.incarnation)
    assert host.channel().map(new.ref, WRITER)


def test_a_mapping_does_not_follow_to_an_owner_that_died_as_well(host: Any) -> None:
    """What it has stays; the reference of the dead successor is refused."""
    old = host.create()
    channel = host.channel()
    mapped = channel.map(old.ref, WRITER)
    host.die(old, OWNER.incarnation)
    heir = host.open(HEIR)
    host.die(heir, HEIR.incarnation)
    with pytest.raises(ArenaGone, match="dead"):
        channel.map(heir.ref, WRITER)
    assert not mapped.closed


def test_a_writer_that_let_go_of_a_dead_owners_arena_maps_it_for_the_successor(host: Any) -> None:
    """Its lock went with everything it could have stored; the new owner concluded nothing yet."""
    old = host.create()
    channel = host.channel()
    mapped = channel.map(old.ref, WRITER)
    host.die(old, OWNER.incarnation)
    mapped.close()
    new = host.open(HEIR)
    assert not new.writer_alive(WRITER.incarnation)
    again = channel.map(new.ref, WRITER)
    assert again is not mapped
    assert new.writer_alive(WRITER.incarnation)


# --- what is not mapped ---------------------------------------------------------------------------


def test_an_arena_whose_owner_is_dead_is_not_mapped(host: Any) -> None:
    """A ticket that outlived its issuer is refused at once."""
    arena = host.create()
    host.die(arena, OWNER.incarnation)
    with pytest.raises(ArenaGone, match="dead"):
        host.channel().map(arena.ref, WRITER)


def test_a_missing_arena_is_gone(host: Any) -> None:
    """Unlinked at its owner's orderly end."""
    arena = host.create()
    arena.close(unlink=True)
    with pytest.raises(ArenaGone):
        host.channel().map(arena.ref, WRITER)


@pytest.mark.parametrize(
    "change", [{"inode": 1 << 40}, {"device": 1 << 40}, {"file_id": "0" * 32}, {"owner": WRITER}]
)
def test_a_reference_to_another_file_is_refused(host: Any, change: dict[str, Any]) -> None:
    """Path, device, inode, file id and owner must all be the file's own."""
    arena = host.create()
    with pytest.raises(ArenaGone):
        host.channel().map(msgspec.structs.replace(arena.ref, **change), WRITER)
    assert not arena.writer_alive(WRITER.incarnation)


def test_another_layout_is_refused_with_both_in_the_message(host: Any) -> None:
    """Equal sizes in another order would read as fluent nonsense."""
    arena = host.create()
    permuted = msgspec.structs.replace(LAYOUT, heads=LAYOUT.head_dim, head_dim=LAYOUT.heads)
    assert permuted.block_bytes == LAYOUT.block_bytes
    with pytest.raises(ArenaGone) as caught:
        host.channel(layout=permuted).map(arena.ref, WRITER)
    assert LAYOUT.describe() in str(caught.value)
    assert permuted.describe() in str(caught.value)


def test_another_model_is_refused_with_both_in_the_message(host: Any) -> None:
    """KV of other weights has the right shape and the wrong meaning."""
    arena = host.create()
    other = msgspec.structs.replace(COMPAT, model="other")
    with pytest.raises(ArenaGone, match=r"model: 'mmm.*' != 'other'"):
        host.channel(compat=other).map(arena.ref, WRITER)


def test_only_files_that_nobody_locks_are_reclaimed(host: Any) -> None:
    """A living writer protects a dead owner's file; another cluster's files are not touched."""
    host.create(Peer("decode-1", 1002))
    dead = host.create()
    mapped = host.channel().map(dead.ref, WRITER)
    host.die(dead, OWNER.incarnation)
    longer = host.create(Peer("decode-2", 1004), cluster="test-two")
    host.die(longer, 1004)
    assert host.reclaim("test") == []
    host.die(mapped, WRITER.incarnation)
    assert host.reclaim("test") == [dead.ref.path]
    assert host.reclaim("test-two") == [longer.ref.path]


def test_closing_without_unlinking_leaves_the_memory_to_a_successor(host: Any) -> None:
    """Closing twice does nothing; the name stays until somebody reclaims it."""
    arena = host.create()
    arena.close(unlink=False)
    arena.close(unlink=False)
    assert host.reclaim("test") == [arena.ref.path]


# --- imports --------------------------------------------------------------------------------------


def named(block: int, name: bytes, checksum: int = 7) -> BlockMark:
    return BlockMark(block, BlockState.CACHED, 1, chain=name, checksum=checksum)


NAMES = [bytes([number]) * 16 for number in range(1, 9)]


def test_a_foreign_arena_is_found_by_its_workers_name_and_its_blocks_by_theirs(host: Any) -> None:
    """Whatever block they lie in; a name that is not there is nowhere."""
    arena = host.create(blocks=8)
    arena.mark([named(5, NAMES[0], 2**64 - 1), named(0, NAMES[1]), named(7, NAMES[2])])
    source = host.sources().open(OWNER.worker_id)
    found = source.find([NAMES[1], NAMES[3], NAMES[0], NAMES[2]])
    assert found == [NamedBlock(0, 7), None, NamedBlock(5, 2**64 - 1), NamedBlock(7, 7)]
    source.close()


def test_names_are_compared_to_their_end(host: Any) -> None:
    """Two that begin alike are two."""
    arena = host.create(blocks=2)
    arena.mark([named(0, NAMES[0])])
    source = host.sources().open(OWNER.worker_id)
    assert source.find([NAMES[0][:15] + b"\0"]) == [None]
    source.close()


def test_a_block_is_copied_whole(host: Any) -> None:
    """What the owner stored is what the copy has; the source stays what it is."""
    arena = host.create(blocks=8)
    arena.memory[:] = pattern(len(arena.memory))
    size = LAYOUT.block_bytes
    source = host.sources().open(OWNER.worker_id)
    assert host.copied(source, 7) == bytes(arena.memory[7 * size :])
    assert host.copied(source, 8) is None, "behind the arena's end is nothing"
    source.close()


@pytest.mark.parametrize("fate", ["alive", "dead", "replaced", "closed"])
def test_what_becomes_of_its_owner_does_not_matter_to_a_source(host: Any, fate: str) -> None:
    """Once open it is read to its end, also when its name is gone: copies are verified anyway."""
    arena = host.create()
    arena.memory[:] = pattern(len(arena.memory))
    wanted = bytes(arena.memory[: LAYOUT.block_bytes])
    arena.mark([named(0, NAMES[0])])
    if fate == "dead":
        host.die(arena, OWNER.incarnation)
    source = host.sources().open(OWNER.worker_id)
    if fate == "closed":
        arena.close(unlink=True)
    elif fate == "replaced":
        host.die(arena, OWNER.incarnation)
        host.create(Peer(OWNER.worker_id, OWNER.incarnation + 1))
    assert source.find([NAMES[0]]) == [NamedBlock(0, 7)]
    assert host.copied(source, 0) == wanted
    source.close()


def test_an_arena_that_is_not_there_cannot_be_imported_from(host: Any) -> None:
    """No such worker, another cluster's, or a name that is no file name."""
    host.create(cluster="other")
    for name in (OWNER.worker_id, "decode-9", "../../etc/passwd", ""):
        with pytest.raises(ArenaGone, match="cannot be opened"):
            host.sources().open(name)


@pytest.mark.parametrize("differs", ["layout", "kernels"])
def test_kv_of_another_kind_is_not_imported(host: Any, differs: str) -> None:
    """The same bytes would mean something else: refused with both values."""
    host.create()
    layout = msgspec.structs.replace(LAYOUT, heads=3) if differs == "layout" else LAYOUT
    compat = COMPAT if differs == "layout" else msgspec.structs.replace(COMPAT, kernels="other")
    with pytest.raises(ArenaGone, match="does not fit"):
        host.sources(layout, compat).open(OWNER.worker_id)
