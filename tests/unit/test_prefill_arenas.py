"""Conversations with the prefill machine about arenas: mapped, lost, taken over, given up.

Numbers in brackets are entries of the failure list.
"""

from __future__ import annotations

import msgspec

from baton.core.ids import Peer, Role
from baton.core.outcomes import Reason
from baton.ports.driving import Send
from baton.prefill.io import ArenaOpened, MapArena, UnmapArena
from baton.wire.handover import (
    ArenaMapped,
    ArenaOffered,
    ArenaRef,
    PrefillFailed,
    TicketRevoked,
    WriterStopped,
)
from baton.wire.messages import WorkFailed
from support.machine_playbook import sent
from support.prefill_parts import CHUNK, HEIR, STARTED, D, E, Prefill, R, arena, spec, ticket


def test_work_for_a_lost_decode_ends_and_its_arena_stays_mapped() -> None:
    """(3) Unmapping lets the lock go, which is this worker's death to the owner: only if the owner
    is over for good, and only when no chunk stores there any more."""
    play = Prefill()
    play.start(spec("a", tokens=14))
    play.assign(spec("b"))
    play.ticket("c", 6)
    play.lose(D)
    assert list(play.machine.state.jobs) == ["a"] and not play.machine.state.early
    play.returned()
    assert not play.machine.state.jobs
    assert not any(isinstance(each, UnmapArena) for each in play.all)
    play.up(D, Role.DECODE)
    play.hear(D, TicketRevoked("a", 1), Send(D, WriterStopped("a", 1)))


def test_a_dead_decodes_arena_waits_for_its_successor_and_is_then_given_up() -> None:
    """(3) Its memory may be taken over as it is; nobody waits for that for ever."""
    play = Prefill(arena_kept_ms=10_000)
    play.start(spec("a", tokens=14))
    play.lose(D, gone=True)
    play.returned()
    assert play.wait(9.0) == []
    assert play.wait(2.0) == [UnmapArena(arena(D).file_id)]
    assert not play.machine.arenas.mapped and not play.machine.arenas.gone


def test_an_arena_is_not_unmapped_before_the_last_chunk_returned() -> None:
    """(3) Its owner is over, and so is the memory, but the engine still stores into it."""
    play = Prefill(arena_kept_ms=1_000)
    play.start(spec("a", tokens=14))
    play.lose(D, gone=True)
    assert play.wait(3.0) == []
    play.returned()
    assert play.wait(1.0) == [UnmapArena(arena(D).file_id)]


def test_a_decode_that_comes_back_in_mid_chunk_hears_when_it_returned() -> None:
    """(8, 14) The revocation of the second link waits for the chunk that began on the first."""
    play = Prefill()
    play.start(spec("r", tokens=14))
    play.lose(D)
    play.link(D)
    play.hear(D, TicketRevoked("r", 1))
    play.returned(Send(D, WriterStopped("r", 1)))


def test_the_arena_of_an_earlier_incarnation_is_unmapped() -> None:
    """Nobody reports the death of a decode that was out of reach: its successor shows it, and by
    what it offers, that it has not taken the memory over."""
    play = Prefill()
    play.lose(D)
    play.up(HEIR, Role.DECODE)
    assert play.wait(1.0) == []
    fresh = arena(HEIR)
    play.hear(HEIR, ArenaOffered(fresh), MapArena(fresh), UnmapArena(arena(D).file_id))
    play.feed(ArenaOpened(fresh), sent(HEIR, ArenaMapped, error=""))


def taken_over(owner: Peer = HEIR) -> ArenaRef:
    """Return the arena of ``D`` as its successor offers it."""
    return msgspec.structs.replace(arena(D), owner=owner)


def test_an_arena_that_was_taken_over_is_answered_for_when_nothing_stores_there_any_more() -> None:
    """(3) The successor frees what it kept from us when it hears that: the chunk that runs for the
    dead owner has to be over. The mapping, and with it our lock, is the same all the time."""
    play = Prefill(arena_kept_ms=5_000)
    play.start(spec("a", tokens=14))
    play.assign(spec("b"))
    play.ticket("b", 6)
    play.lose(D, gone=True)
    play.up(HEIR, Role.DECODE)
    play.hear(HEIR, ArenaOffered(taken_over()), MapArena(taken_over()))
    assert play.wait(10.0) == [], "it is kept as long as the answer is not there"
    play.returned()
    play.feed(ArenaOpened(taken_over()), sent(HEIR, ArenaMapped, file_id="arena-4", error=""))
    assert not play.machine.state.jobs
    assert play.wait(120.0) == []
    assert play.machine.arenas.mapped == {"arena-4": taken_over()}


def test_a_successor_seen_before_the_death_is_told_ends_the_work_for_the_dead() -> None:
    """Whatever order the news come in: what runs for the former owner stops."""
    play = Prefill()
    play.start(spec("a", tokens=14))
    play.up(HEIR, Role.DECODE)
    assert play.machine.state.jobs["a"].stopping
    play.returned(Send(D, WriterStopped("a", 1)))


def test_tickets_of_a_former_owner_are_void() -> None:
    """(3) The file is mapped, but it is not that owner's any more."""
    play = Prefill()
    play.up(HEIR, Role.DECODE)
    play.hear(HEIR, ArenaOffered(taken_over()), MapArena(taken_over()))
    play.feed(ArenaOpened(taken_over()), sent(HEIR, ArenaMapped))
    play.assign(spec("r"), decode=HEIR)
    failed = sent(HEIR, PrefillFailed, reason=Reason.FENCED)
    play.hear(HEIR, ticket("r", 6), failed, sent(R, WorkFailed, reason=Reason.FENCED))
    play.assign(spec("s"), decode=HEIR)
    valid = msgspec.structs.replace(ticket("s", 6), arena=taken_over())
    play.hear(HEIR, valid, STARTED, CHUNK)


def test_an_arena_that_cannot_be_mapped_for_its_successor_is_unmapped() -> None:
    """Our lock's end says then that nothing of ours will be stored there."""
    play = Prefill()
    play.lose(D, gone=True)
    play.up(HEIR, Role.DECODE)
    play.hear(HEIR, ArenaOffered(taken_over()), MapArena(taken_over()))
    refused = sent(HEIR, ArenaMapped, error="no")
    play.feed(ArenaOpened(taken_over(), "no"), refused, UnmapArena("arena-4"))


def test_a_successor_that_dies_as_well_leaves_the_arena_to_the_next_one() -> None:
    """The answer to the first comes late, and is not taken for one to the second."""
    play = Prefill()
    third = Peer("decode-0", 10)
    play.lose(D, gone=True)
    play.up(HEIR, Role.DECODE)
    play.hear(HEIR, ArenaOffered(taken_over()), MapArena(taken_over()))
    play.lose(HEIR, gone=True)
    play.up(third, Role.DECODE)
    play.hear(third, ArenaOffered(taken_over(third)), MapArena(taken_over(third)))
    play.feed(ArenaOpened(taken_over(), "its owner is dead"))
    assert play.machine.arenas.mapped == {"arena-4": arena(D)}
    play.feed(ArenaOpened(taken_over(third)), sent(third, ArenaMapped, error=""))
    assert play.wait(120.0) == []


def test_an_arena_that_cannot_be_mapped_is_said_so() -> None:
    """Decode gives no tickets to such a pair."""
    play = Prefill()
    play.up(E, Role.DECODE)
    play.hear(E, ArenaOffered(arena(E)), MapArena(arena(E)))
    play.feed(ArenaOpened(arena(E), "layout differs"), sent(E, ArenaMapped, error="layout differs"))
    play.hear(E, ArenaOffered(arena(D)))
