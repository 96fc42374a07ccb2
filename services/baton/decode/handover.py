"""The receiving side of the hand-over: tickets, verification, commit, quarantine.

Decides when a block that a remote writer filled may be read, and when memory that a writer might
still touch may be used again. A token is computed from a block only after its checksum verified
against the ids it must stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.ids import Peer
from baton.decode.io import ProbeWriter, VerifyBlocks
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.ports.channel import BlockCheck
from baton.wire.handover import (
    ArenaMapped,
    ArenaOffered,
    BlockSum,
    ChunkAnnounced,
    PrefillCommitted,
    Ticket,
    TicketBlock,
    TicketRevoked,
)

Key = tuple[str, int]


@dataclass(slots=True)
class TicketRecord:
    """A ticket that is out: what its writer may touch. Outlives the sequence."""

    writer: Peer
    held: tuple[int, ...]
    """Blocks pinned on the writer's behalf, read or written."""
    writes: dict[int, int]
    """Logical -> block, to be filled."""
    generations: dict[int, int]
    announced: set[int] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    verified_at: float = 0.0
    """When the last of them was."""
    commit: PrefillCommitted | None = None
    stopped: bool = False
    """The writer said that it stores no more: it committed, failed or stopped."""
    revoked: bool = False
    """Its sequence is over; the record waits for the writer, or for the proof of its death."""


class Handover:
    """All tickets of one decode worker; at most ``reservations_max`` live plus those revoked."""

    def __init__(self, state: State, former: Mapping[int, tuple[int, ...]]) -> None:
        self.state = state
        self.tickets: dict[Key, TicketRecord] = {}
        #: Writers whose lock was seen: only they get tickets.
        self.writers: set[Peer] = set()
        #: Offered, answered "mapped", lock not yet seen.
        self.claims: dict[int, Peer] = {}
        #: Incarnations that are gone from the links but not yet proven dead.
        self.condemned: dict[int, Peer] = {}
        #: Writers of this arena's former owner -> the blocks that each may still store into.
        self.former = dict(former)
        self.probe_at: float | None = 0.0 if former else None

    # --- writers ------------------------------------------------------------------------------

    def offer(self, peer: Peer) -> None:
        """A prefill worker is there: let it map the arena before its first ticket."""
        self.state.send(peer, ArenaOffered(self.state.arena))
        for request_id, epoch in self._still_writing(peer):
            # It was away, and may not have heard: a revocation is asked for until it is answered.
            self.state.send(peer, TicketRevoked(request_id, epoch))

    def mapped(self, peer: Peer, message: ArenaMapped) -> None:
        """It says it locked and mapped; believe the kernel, not the message."""
        if message.file_id != self.state.arena.file_id:
            return
        if message.error:
            self.state.note("writer_refused", writer=str(peer), error=message.error)
            return
        # It maps the arena for its owner of now: nothing of it stores for the former one any more.
        self._release_former(peer.incarnation)
        self.claims[peer.incarnation] = peer
        self.state.emit(ProbeWriter(peer.incarnation))

    def writer_lost(self, peer: Peer, now: float) -> list[Sequence]:
        """Its link is over. Return the sequences that waited for it; their blocks stay held."""
        self.writers.discard(peer)
        self.claims.pop(peer.incarnation, None)
        keys = self._still_writing(peer)
        if keys:
            self.condemned[peer.incarnation] = peer
            self.probe_at = now
        waiting = []
        for request_id, epoch in keys:
            seq = self.state.sequences.get(request_id)
            if seq is not None and seq.epoch == epoch and seq.stage is Stage.REMOTE:
                waiting.append(seq)
        return waiting

    def _still_writing(self, peer: Peer) -> list[Key]:
        return [
            key
            for key, record in self.tickets.items()
            if record.writer == peer and not record.stopped
        ]

    def probed(self, incarnation: int, alive: bool) -> None:
        """The kernel's word on a writer."""
        claim = self.claims.pop(incarnation, None)
        if claim is not None and alive:
            self.writers.add(claim)
            self.state.note("writer_ready", writer=str(claim))
        if not alive:
            self._release_former(incarnation)
        peer = self.condemned.get(incarnation)
        if peer is None or alive:
            return
        del self.condemned[incarnation]
        for key in self._still_writing(peer):
            if self.tickets[key].revoked:
                self._release(key, by="the kernel: its writer is dead")
            # Else it came back, got this ticket and died: its lost link ends the attempt.
        self.state.note("writer_dead", writer=str(peer))

    def tick(self, now: float) -> None:
        """Look again at the locks of those that are gone and still hold something."""
        if self.probe_at is None or now < self.probe_at:
            return
        for incarnation, peer in list(self.condemned.items()):
            if not any(self.tickets[key].revoked for key in self._still_writing(peer)):
                del self.condemned[incarnation]  # it came back, and stopped
        awaited = dict.fromkeys([*self.condemned, *self.former])
        for incarnation in awaited:
            self.state.emit(ProbeWriter(incarnation))
        again = now + self.state.limits.reader_probe_ms / 1000
        self.probe_at = again if awaited else None

    def _release_former(self, incarnation: int) -> None:
        """That writer of the former owner's stores nothing of its any more."""
        held = self.former.pop(incarnation, ())
        if held:
            self.state.pool.unhold(held)
            self.state.note("former_writer_stopped", incarnation=incarnation, blocks=len(held))

    # --- one ticket ---------------------------------------------------------------------------

    def issue(self, seq: Sequence, writer: Peer, cached: list[int], fresh: list[int]) -> None:
        """Mark FILLING, then send the ticket: the metadata is there before the message."""
        pool = self.state.pool
        pool.fill(fresh)
        pool.hold([*cached, *fresh])
        first = len(cached)
        entries = [
            TicketBlock(logical, number, pool.blocks[number].generation)
            for logical, number in enumerate([*cached, *fresh])
        ]
        self.tickets[seq.key] = TicketRecord(
            writer=writer,
            held=(*cached, *fresh),
            writes={entry.logical: entry.block for entry in entries[first:]},
            generations={entry.logical: entry.generation for entry in entries[first:]},
        )
        seq.stage = Stage.REMOTE
        self.state.send(
            writer,
            Ticket(
                request_id=seq.spec.request_id,
                epoch=seq.epoch,
                arena=self.state.arena,
                blocks=tuple(entries[first:]),
                prefix=tuple(entries[:first]),
                cached_tokens=seq.cached_tokens,
            ),
        )
        self.state.note(
            "ticket_sent",
            seq,
            writer=str(writer),
            blocks=len(fresh),
            cached_tokens=seq.cached_tokens,
        )

    def decline(self, seq: Sequence, writer: Peer) -> None:
        """Nearly all of it is here: ``writer`` has nothing to do for it."""
        self.state.send(writer, Ticket(*seq.key, self.state.arena, ()))

    def announced(self, peer: Peer, message: ChunkAnnounced) -> str | None:
        """A chunk is filled: verify it at once. Return what is wrong with the message, if so."""
        return self._verify(peer, message.request_id, message.epoch, message.sums)

    def committed(self, peer: Peer, message: PrefillCommitted) -> str | None:
        """The prompt is complete. Says too that the writer stopped."""
        key = (message.request_id, message.epoch)
        record = self.tickets.get(key)
        if record is None or record.writer != peer:
            return None
        record.stopped = True
        if record.revoked:
            self._release(key)
            return None
        record.commit = message
        if record.announced != set(record.writes):
            return "the commit leaves blocks that were never announced"
        return None

    def _verify(
        self, peer: Peer, request_id: str, epoch: int, sums: tuple[BlockSum, ...]
    ) -> str | None:
        record = self.tickets.get((request_id, epoch))
        seq = self.state.sequences.get(request_id)
        if record is None or record.writer != peer or record.revoked:
            return None
        if seq is None or seq.epoch != epoch or seq.stage is not Stage.REMOTE:
            return None
        checks = []
        for item in sums:
            block = record.writes.get(item.logical)
            if block is None or record.generations[item.logical] != item.generation:
                return f"block {item.logical} is not in the ticket"
            if item.logical in record.announced:
                return f"block {item.logical} was announced twice"
            if item.tokens != seq.filled_in(item.logical):
                return f"block {item.logical} has {item.tokens} tokens"
            record.announced.add(item.logical)
            checks.append(
                BlockCheck(
                    logical=item.logical,
                    block=block,
                    tokens=item.tokens,
                    chain=seq.name_of(self.state.root, item.logical),
                    checksum=item.checksum,
                )
            )
        if checks:
            self.state.emit(VerifyBlocks(request_id, epoch, tuple(checks)))
        return None

    def verified(self, request_id: str, epoch: int, good: list[BlockCheck], now: float) -> None:
        """These bytes are what they must be."""
        record = self.tickets.get((request_id, epoch))
        if record is None or record.revoked:
            return
        for check in good:
            full = check.tokens == self.state.block_size
            name = (check.chain, check.checksum) if full else ()
            self.state.pool.announce(check.block, *name)
            record.verified.add(check.logical)
        record.verified_at = now

    def complete(self, seq: Sequence) -> PrefillCommitted | None:
        """Return the commit if every block of the ticket verified."""
        record = self.tickets.get(seq.key)
        if record is None or record.commit is None or len(record.verified) < len(record.writes):
            return None
        return record.commit

    def check_seconds(self, seq: Sequence, commit: PrefillCommitted) -> float:
        """Return how long after the last store the last block had verified."""
        return self.tickets[seq.key].verified_at - commit.last_write_ns / 1e9

    def adopt(self, seq: Sequence) -> None:
        """The hand-over is over: the blocks are the owner's alone."""
        record = self.tickets[seq.key]
        for logical in sorted(record.writes):
            self.state.pool.settle(record.writes[logical])
        self._release(seq.key)

    # --- ends ---------------------------------------------------------------------------------

    def drop(self, seq: Sequence) -> None:
        """The attempt is over: keep what verified in the cache, quarantine the rest."""
        record = self.tickets[seq.key]
        pool = self.state.pool
        full = seq.length // self.state.block_size
        leading = seq.cached_tokens // self.state.block_size
        while leading < full and leading in record.verified:
            pool.settle(record.writes[leading])
            leading += 1
        pool.release(seq.blocks[:leading])
        pool.abandon(seq.blocks[leading:])
        seq.blocks = []
        if record.stopped:
            self._release(seq.key)
            return
        record.revoked = True
        self.state.note(
            "ticket_revoked", seq, writer=str(record.writer), quarantined=len(record.held)
        )
        self.state.send(record.writer, TicketRevoked(seq.spec.request_id, seq.epoch))

    def stopped(self, peer: Peer, key: Key) -> Sequence | None:
        """The writer says that nothing of it touches that ticket's blocks any more.

        Return the sequence that waited for it, if it stopped unasked: that attempt is over.
        """
        record = self.tickets.get(key)
        if record is None or record.writer != peer or record.commit is not None:
            return None
        record.stopped = True
        if record.revoked:
            self._release(key)
            return None
        return self.state.sequences[key[0]]

    def revoking(self) -> bool:
        """Whether blocks will come back soon: a writer that can be reached was told to stop."""
        linked = self.state.peers
        return any(r.revoked and r.writer in linked for r in self.tickets.values()) or any(
            peer.incarnation in self.former for peer in linked
        )

    def _release(self, key: Key, by: str = "its writer, who stopped") -> None:
        """The writer is done with it, or dead."""
        record = self.tickets.pop(key)
        self.state.pool.unhold(record.held)
        if record.revoked:
            self.state.note(
                "quarantine_over", request_id=key[0], epoch=key[1], blocks=len(record.held), by=by
            )

    def check(self) -> None:
        """Assert that a ticket belongs to a sequence or is revoked, and that a sequence that
        waits has a ticket."""
        for waiting in self.state.live(Stage.REMOTE):
            assert waiting.key in self.tickets, f"{waiting.key} waits for nobody"
        for (request_id, epoch), record in self.tickets.items():
            seq = self.state.sequences.get(request_id)
            owned = seq is not None and seq.epoch == epoch and seq.stage is Stage.REMOTE
            assert owned != record.revoked, f"ticket {request_id}/{epoch} has no owner"
