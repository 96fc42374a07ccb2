"""Imports: going on with what another decode worker of this host has computed (ADR 0012).

Decides which blocks are wanted from a foreign arena, and what is done with those that came: the
leading run that verified is this worker's own from then on, the rest is computed here. The copying
is a thread's (``work.py``); its targets are given to nobody before it says that it is done.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.decode.io import BlocksImported, ImportBlocks
from baton.decode.sequence import Sequence, Stage
from baton.decode.state import State
from baton.ports.channel import BlockCheck


class Imports:
    """All imports of one decode worker; at most one a sequence, and those of dropped ones."""

    def __init__(self, state: State) -> None:
        self.state = state
        #: What the thread may still store for, dropped sequences included.
        self.running: dict[tuple[str, int], Sequence] = {}

    def start(self, seq: Sequence, source: str) -> None:
        """Copy every full block of ``seq`` that the own cache lacks."""
        first, full = seq.computed // seq.block_size, (seq.length - 1) // seq.block_size
        targets = tuple(
            BlockCheck(logical, seq.blocks[logical], seq.block_size, seq.chains[logical])
            for logical in range(first, full)
        )
        seq.stage = Stage.IMPORTING
        self.running[seq.key] = seq
        self.state.emit(ImportBlocks(seq.spec.request_id, seq.epoch, source, targets))
        self.state.note("import_started", seq, source=source, blocks=len(targets))

    def finished(self, event: BlocksImported) -> Sequence | None:
        """The thread is done. Return the sequence, with what verified as its own; ``None`` if it
        was dropped meanwhile."""
        seq = self.running.pop((event.request_id, event.epoch))
        if self.state.sequences.get(event.request_id) is not seq:
            self.state.pool.release(seq.blocks)
            seq.blocks = []
            return None
        first = seq.computed // seq.block_size
        for logical, checksum in enumerate(event.sums, first):
            self.state.pool.seal(seq.blocks[logical], seq.chains[logical], checksum)
        bytes_copied = len(event.sums) * self.state.block_bytes
        self.state.measure("import_seconds", event.seconds)
        self.state.measure("imported_bytes_total", bytes_copied)
        self.state.note("imported", seq, blocks=len(event.sums), why=event.why)
        seq.computed += len(event.sums) * seq.block_size
        seq.cached_tokens = seq.computed
        return seq

    def dropped(self) -> Iterator[Sequence]:
        """Sequences that are over, whose blocks wait for the thread."""
        for seq in self.running.values():
            if self.state.sequences.get(seq.spec.request_id) is not seq:
                yield seq
