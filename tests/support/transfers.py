"""Bad transfers by the million, against what runs in production: none may be accepted.

Both sides stand in one process on a real arena in shared memory: decode's machine with its
hand-over and verification, prefill's mapping with its fence and checksums. Between them sits an
adversary. A *transfer* is one block of one announcement (or one block that an outdated ticket would
allow to be written, or one that is imported). It is accepted if decode calls a block verified whose
bytes are not what its request needs, or if a writer's fence lets it store where it may not.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from baton.channel.arena import SharedArena
from baton.channel.shm import ShmArena, ShmChannel
from baton.channel.sources import ShmSources
from baton.core.events import LeaseChanged
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import BlockState, LeaseState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Outcome, Reason
from baton.core.prefix import block_names, chain_root
from baton.core.sampling import SamplingParams
from baton.decode.io import BlocksImported, ImportBlocks, MarkBlocks, ProbeWriter, VerifyBlocks
from baton.decode.machine import DecodeMachine
from baton.decode.work import bring, probe, verify
from baton.ports.channel import BlockCheck, BlockMark
from baton.ports.driving import Send
from baton.ports.transport import PeerUp, Received
from baton.wire.handover import (
    ArenaMapped,
    BlockSum,
    ChunkAnnounced,
    PrefillCommitted,
    Ticket,
    WriterStopped,
)
from baton.wire.messages import RequestEnded, RequestSpec, ReserveDecode
from support.channel_parts import COMPAT, LAYOUT, OWNER

ROUTER, GATEWAY, WRITER = Peer("router-0", 11), Peer("gateway-0", 12), Peer("prefill-0", 13)
OTHER = Peer("decode-1", 14)
FULL = 24
"""Full blocks of a prompt; one more is partly filled."""
TAIL = 2
BLOCKS = 4 * FULL
KINDS = (
    "stale epoch",
    "stale generation",
    "torn",
    "reordered",
    "duplicated",
    "bit flipped",
    "bad at the source",
)


class Clock:
    """Stands still."""

    def now(self) -> float:
        return 1_000.0


class Accepted(AssertionError):
    """A bad transfer was taken for a good one."""


class Transfers:
    """One decode worker, one writer, one adversary."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        self.root = chain_root(repr(COMPAT))
        self.arena = SharedArena.create(directory, "t", OWNER, LAYOUT, COMPAT, blocks=BLOCKS)
        self.source = SharedArena.create(directory, "t", OTHER, LAYOUT, COMPAT, blocks=FULL)
        self.sources = ShmSources(directory, "t", LAYOUT, COMPAT)
        self.mapped: ShmArena = ShmChannel(LAYOUT, COMPAT).map(self.arena.ref, WRITER)
        self.machine = DecodeMachine(
            OWNER,
            Limits(),
            self.arena.ref,
            blocks_total=BLOCKS,
            block_size=LAYOUT.block_size,
            block_bytes=LAYOUT.block_bytes,
            root=self.root,
        )
        self.sent: list[Any] = []
        self.verified: list[Any] = []
        self.injected: Counter[str] = Counter()
        self.good = 0
        """Blocks that were what they should be, and were taken."""
        self.rounds = self.requests = 0
        self._introduce()

    def close(self) -> None:
        self.mapped.close()
        self.arena.close(unlink=True)
        self.source.close(unlink=True)

    @property
    def total(self) -> int:
        return sum(self.injected.values())

    def run(self, transfers: int) -> None:
        """Inject at least so many bad transfers."""
        ways = (*[self._bad_bytes] * 8, self._outdated, self._bad_source)
        while self.total < transfers:
            ways[self.rounds % len(ways)]()
            self.rounds += 1
            if self.rounds % 200 == 0:
                self.machine.check()

    # --- decode's side --------------------------------------------------------------------------

    def _introduce(self) -> None:
        self._feed(LeaseChanged(LeaseState.HELD))
        for peer, role in (
            (ROUTER, Role.ROUTER),
            (GATEWAY, Role.GATEWAY),
            (WRITER, Role.PREFILL),
        ):
            self._feed(PeerUp(Member(peer, role, "", 1, "b")))
        self._feed(Received(WRITER, ArenaMapped(self.arena.ref.file_id)))

    def _feed(self, event: Any) -> None:
        """Handle an event and do what it asks for, as the process does."""
        events = [event]
        while events:
            for command in self.machine.handle(events.pop(0), 1_000.0):
                match command:
                    case MarkBlocks(marks):
                        self.arena.mark(marks)
                    case VerifyBlocks():
                        answer = verify(self.arena, command, Clock())
                        self.verified.append(answer)
                        events.append(answer)
                    case ProbeWriter():
                        events.append(probe(self.arena, command))
                    case Send(_, message):
                        self.sent.append(message)

    def _hear(self, peer: Peer, message: Any) -> None:
        self._feed(Received(peer, message))

    def _reserve(self, spec: RequestSpec, epoch: int = 1) -> Ticket:
        self.sent.clear()
        self._hear(ROUTER, ReserveDecode(spec, epoch, WRITER))
        (ticket,) = [message for message in self.sent if isinstance(message, Ticket)]
        return ticket

    def _end(self, spec: RequestSpec) -> None:
        """The request is over for everybody: nothing of it is held any more."""
        outcome = Outcome(Ending.CANCELLED, reason=Reason.CLIENT_CANCELLED)
        self._hear(GATEWAY, RequestEnded(spec.request_id, 99, outcome))
        for request_id, epoch in list(self.machine.handover.tickets):
            self._hear(WRITER, WriterStopped(request_id, epoch))
        assert not self.machine.state.sequences
        assert not self.machine.handover.tickets

    # --- the writer's side ----------------------------------------------------------------------

    def _request(self) -> tuple[RequestSpec, list[bytes]]:
        tokens = FULL * LAYOUT.block_size + TAIL
        ids = self.bytes.integers(1, 2**20, tokens, dtype="<u4").tobytes()
        self.requests += 1
        spec = RequestSpec(
            request_id=f"r{self.requests}",
            gateway=GATEWAY,
            prompt=ids,
            sampling=SamplingParams(seed=1, temperature=0.0),
            max_tokens=1,
            deadline_ms=1_000,
        )
        return spec, block_names(self.root, ids, LAYOUT.block_size)

    def _write(self, ticket: Ticket, names: list[bytes]) -> list[BlockSum]:
        """Store what this request needs into the ticket's blocks; return the sums to announce."""
        size = LAYOUT.block_bytes
        fresh = self.bytes.bytes(size * len(ticket.blocks))
        for number, pair in enumerate(ticket.blocks):
            self.mapped.memory[pair.block * size : (pair.block + 1) * size] = fresh[
                number * size : (number + 1) * size
            ]
        checks = [
            BlockCheck(pair.logical, pair.block, self._filled(pair.logical), names[pair.logical])
            for pair in ticket.blocks
        ]
        sums = self.mapped.checksums(checks)
        return [
            BlockSum(pair.logical, pair.generation, check.tokens, checksum)
            for pair, check, checksum in zip(ticket.blocks, checks, sums, strict=True)
        ]

    def _filled(self, logical: int) -> int:
        return LAYOUT.block_size if logical < FULL else TAIL

    def _block(self, number: int) -> memoryview:
        size = LAYOUT.block_bytes
        return self.mapped.memory[number * size : (number + 1) * size]

    # --- bytes that are not what was announced --------------------------------------------------

    def _bad_bytes(self) -> None:
        """Torn, reordered, duplicated or flipped between the store and the verification."""
        spec, names = self._request()
        ticket = self._reserve(spec)
        before = [bytes(self._block(pair.block)) for pair in ticket.blocks]
        sums = self._write(ticket, names)
        spoilt = self._spoil(ticket, before)
        self.verified.clear()
        self._hear(WRITER, ChunkAnnounced(spec.request_id, 1, tuple(sums)))
        (answer,) = self.verified
        if set(answer.bad) != spoilt:
            raise Accepted(f"spoilt {sorted(spoilt)}, found {sorted(answer.bad)}")
        self._refused(spec, names, min(spoilt))
        self.good += len(ticket.blocks) - len(spoilt)
        self._end(spec)

    def _spoil(self, ticket: Ticket, before: list[bytes]) -> set[int]:
        numbers = list(range(len(ticket.blocks)))
        self.random.shuffle(numbers)
        chosen = numbers[: self.random.randint(2, len(numbers))]
        spoilt = set()
        while chosen:
            number = chosen.pop()
            block = self._block(ticket.blocks[number].block)
            covered = self._covered(number)
            match self.random.choice(("torn", "torn", "flip", "flip", "reordered", "duplicated")):
                case "torn":
                    # A prefix of the store arrived; behind it lies what was there before.
                    cut = self.random.choice(covered)
                    block[cut:] = before[number][cut:]
                    kind, hit = "torn", {number}
                case "flip":
                    at = self.random.choice(covered)
                    block[at] ^= 1 << self.random.randrange(8)
                    kind, hit = "bit flipped", {number}
                case _ as way:
                    if not chosen:
                        continue
                    other = chosen.pop()
                    theirs = self._block(ticket.blocks[other].block)
                    mine, other_bytes = bytes(block), bytes(theirs)
                    block[:] = other_bytes
                    if way == "reordered":
                        theirs[:] = mine
                        kind, hit = "reordered", {number, other}
                    else:
                        kind, hit = "duplicated", {number}
            self.injected[kind] += len(hit)
            spoilt |= hit
        return spoilt or self._spoil(ticket, before)

    def _covered(self, number: int) -> range:
        """Bytes of a block's first run that the checksum covers (the tail is not full)."""
        return range(self._filled(number) * LAYOUT.token_bytes_per_axis)

    def _refused(self, spec: RequestSpec, names: list[bytes], first_bad: int) -> None:
        """The attempt is over; of its blocks only those before the first bad one are of use."""
        state = self.machine.state
        if spec.request_id in state.sequences:
            raise Accepted(f"{spec.request_id} goes on with bad blocks")
        found = state.pool.match(names[:FULL])
        if len(found) > first_bad:
            raise Accepted(f"{spec.request_id}: block {first_bad} is offered to others")

    # --- messages and tickets of the past -------------------------------------------------------

    def _outdated(self) -> None:
        """Older epochs and generations: announcements, commits, and stores that wait to be made."""
        spec, names = self._request()
        old = self._reserve(spec)
        old_sums = self._write(old, names)
        ticket = self._reserve(spec, epoch=2)  # its router has placed it again
        self._nothing("stale epoch", ChunkAnnounced(spec.request_id, 1, tuple(old_sums)))
        self._nothing("stale epoch", PrefillCommitted(spec.request_id, 1, 5))
        self._fenced("stale epoch", 1, old)
        sums = self._write(ticket, names)
        half = len(sums) // 2
        self._hear(WRITER, ChunkAnnounced(spec.request_id, 2, tuple(sums[:half])))
        self._hear(WRITER, ChunkAnnounced(spec.request_id, 2, tuple(sums[half:])))
        self._hear(WRITER, PrefillCommitted(spec.request_id, 2, 5))
        sequence = self.machine.state.sequences[spec.request_id]
        assert sequence.output == [5], "good transfers complete a request"
        self.good += len(sums)
        self._nothing("duplicated", ChunkAnnounced(spec.request_id, 2, tuple(sums)))
        self._nothing("duplicated", PrefillCommitted(spec.request_id, 2, 6))
        assert self.machine.state.sequences[spec.request_id].output == [5]
        self._end(spec)
        self._stale_generation(ticket)

    def _nothing(self, kind: str, message: ChunkAnnounced | PrefillCommitted) -> None:
        """Say something that must have no effect at all."""
        pool = self.machine.state.pool
        before = [(block.state, block.generation) for block in pool.blocks]
        self.verified.clear()
        self._hear(WRITER, message)
        released = [
            number
            for number, block in enumerate(pool.blocks)
            if (block.state, block.generation) != before[number]
            # A commit of the past says that its writer has stopped, which is true.
            and before[number][0] is not BlockState.QUARANTINED
        ]
        if self.verified or released:
            raise Accepted(f"{kind}: {message.request_id} epoch {message.epoch} had an effect")
        self.injected[kind] += len(message.sums) if isinstance(message, ChunkAnnounced) else 1

    def _fenced(self, kind: str, epoch: int, ticket: Ticket) -> None:
        """No block of an outdated ticket may be stored into."""
        for pair in ticket.blocks:
            if self.mapped.may_write(epoch, [pair]):
                raise Accepted(f"{kind}: block {pair.block} may still be written")
        self.injected[kind] += len(ticket.blocks)

    def _stale_generation(self, past: Ticket) -> None:
        """The blocks are another request's by now; the old ones' numbers and generations come."""
        spec, names = self._request()
        ticket = self._reserve(spec)
        sums = self._write(ticket, names)
        now = {pair.block: pair.generation for pair in ticket.blocks}
        stale = [pair for pair in past.blocks if now.get(pair.block) != pair.generation]
        for pair in stale:
            if self.mapped.may_write(1, [pair]):
                raise Accepted(f"generation {pair.generation} of block {pair.block} may be written")
        self.injected["stale generation"] += len(stale)
        one = self.random.choice(sums)
        older = BlockSum(one.logical, one.generation - 1, one.tokens, one.checksum)
        self.verified.clear()
        self._hear(WRITER, ChunkAnnounced(spec.request_id, 1, (older,)))
        if self.verified:
            raise Accepted("an older generation was looked at")
        self.injected["stale generation"] += 1
        self._refused(spec, names, 0)
        self._end(spec)

    # --- imports --------------------------------------------------------------------------------

    def _bad_source(self) -> None:
        """Blocks of another arena, spoilt after they were sealed and before they are copied."""
        spec, names = self._request()
        size = LAYOUT.block_bytes
        self.source.memory[:] = self.bytes.bytes(size * FULL)
        checks = [BlockCheck(n, n, LAYOUT.block_size, names[n]) for n in range(FULL)]
        sums = self.source.checksums(checks)
        marks = [
            BlockMark(n, BlockState.CACHED, 1, chain=names[n], checksum=sums[n])
            for n in range(FULL)
        ]
        self.source.mark(marks)
        self.source.memory[self.random.randrange(size)] ^= 1 << self.random.randrange(8)
        for number in range(1, FULL):
            at = number * size + self.random.randrange(size)
            self.source.memory[at] ^= 1 << self.random.randrange(8)
        for check in checks:
            command = ImportBlocks(spec.request_id, 1, OTHER.worker_id, (check,))
            *_, answer = bring(self.arena, self.sources, command, Clock())
            assert isinstance(answer, BlocksImported)
            if answer.sums:
                raise Accepted(f"an import of block {check.logical}: {answer}")
            assert "checksum" in answer.why, answer.why
            self.injected["bad at the source"] += 1
