"""What prefill's thread does for its machine: fence, step, checksums; and mapping arenas.

Decides nothing; each function turns a command into the event that answers it. The process and the
simulator both call these, so what is simulated is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from baton.core.ids import Peer
from baton.ports.channel import ArenaGone, Channel, MappedArena
from baton.ports.clock import Clock
from baton.ports.engine import Engine, Sampled, StepFailed
from baton.prefill.io import (
    ArenaOpened,
    ChunkFinished,
    ChunkResult,
    ChunkRow,
    ChunkStored,
    MapArena,
    RunChunk,
    UnmapArena,
)


class ChunkWorker:
    """The engine thread's side: owns engine and mappings, so that none goes while it is used."""

    def __init__(self, engine: Engine, channel: Channel, me: Peer, clock: Clock) -> None:
        self.engine = engine
        self.channel = channel
        self.me = me
        self.clock = clock
        self.arenas: dict[str, MappedArena] = {}

    def map(self, command: MapArena) -> ArenaOpened:
        """Lock and map an arena and show it to the engine.

        If it is mapped already, for a former owner, every chunk that stored there for that one has
        returned: chunks and mappings share one thread.
        """
        ref = command.ref
        try:
            mapped = self.channel.map(ref, self.me)
        except ArenaGone as error:
            return ArenaOpened(ref, str(error))
        if self.arenas.get(ref.file_id) is not mapped:
            self.arenas[ref.file_id] = mapped
            self.engine.attach(ref.file_id, mapped.memory)
        return ArenaOpened(ref)

    def unmap(self, command: UnmapArena) -> None:
        """Drop the engine's views, then the mapping and with it the lock."""
        mapped = self.arenas.pop(command.file_id, None)
        if mapped is not None:
            self.engine.detach(command.file_id)
            mapped.close()

    def run(self, command: RunChunk, tell: Callable[[ChunkStored], None]) -> ChunkFinished:
        """Look at every fence, compute the rows that pass, checksum what they completed."""
        return self.complete(command, self.begin(command), self.clock.now(), tell)

    def begin(self, command: RunChunk) -> list[int]:
        """Return which rows may store: nothing is stored before this look at the metadata."""
        return [number for number, row in enumerate(command.rows) if self._passes(row)]

    def complete(
        self,
        command: RunChunk,
        live: list[int],
        began: float,
        tell: Callable[[ChunkStored], None],
    ) -> ChunkFinished:
        """Store K and V of the ``live`` rows, checksum the blocks they completed and ``tell``;
        then choose the first tokens of the prompts that are complete."""
        results = {
            number: ChunkResult(fenced=True)
            for number in range(len(command.rows))
            if number not in live
        }
        sums_seconds = 0.0

        def stored(left: list[int]) -> None:
            nonlocal sums_seconds
            event = self._stored(command, left)
            sums_seconds = event.sums_seconds
            tell(event)

        self._step(command.rows, live, results, stored)
        ended = self.clock.now()
        return ChunkFinished(
            step=command.step,
            results=tuple(results[number] for number in range(len(command.rows))),
            seconds=ended - began - sums_seconds,
            ended_ns=int(ended * 1e9),
            borrowed=self.engine.borrowed if live else 0.0,
        )

    def _stored(self, command: RunChunk, live: list[int]) -> ChunkStored:
        """K and V of these rows are in place: make their checksums."""
        last_write = self.clock.now()
        rows = enumerate(command.rows)
        sums = tuple(
            tuple(self.arenas[row.row.arena].checksums(row.checks)) if number in live else None
            for number, row in rows
        )
        seconds = self.clock.now() - last_write
        return ChunkStored(command.step, sums, int(last_write * 1e9), seconds)

    def _passes(self, row: ChunkRow) -> bool:
        mapped = self.arenas.get(row.row.arena)
        return mapped is not None and mapped.may_write(row.epoch, row.targets)

    def _step(
        self,
        rows: tuple[ChunkRow, ...],
        live: list[int],
        results: dict[int, ChunkResult],
        stored: Callable[[list[int]], None],
    ) -> None:
        """Run the rows, without those that the engine blames. The others are stepped again, unless
        all was stored: what may be announced by now is never stored into again."""
        left = list(live)
        while left:
            sampled: Sequence[Sampled | None]
            try:
                sampled = self.engine.step([rows[n].row for n in left], partial(stored, left))
            except StepFailed as error:
                blamed = [n for n in left if rows[n].row.request_id in error.request_ids]
                assert blamed, "the engine failed a step and blames nobody in it"
                for number in blamed:
                    results[number] = ChunkResult(failed=str(error), retryable=error.retryable)
                if not error.results:
                    left = [number for number in left if number not in blamed]
                    continue
                sampled = error.results
            for number, one in zip(left, sampled, strict=True):
                results.setdefault(number, ChunkResult(sampled=one))
            return
