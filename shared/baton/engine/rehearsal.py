"""What an engine runs before its first request; the same for every kind of kernel."""

from __future__ import annotations

from time import thread_time

import numpy as np

from baton.core.sampling import SamplingParams
from baton.core.step_times import Rehearsed, Step
from baton.ports.engine import Engine, Row, SampleSpec

#: Tokens of the rehearsed chunks of a prompt.
_CHUNKS = (16, 64, 256)


def rehearse(engine: Engine) -> Rehearsed:
    """Run a prompt's chunks and decode steps in memory of their own; return what they took but for
    the first ones, which pay for what the others find. It is the thread's own time that is taken:
    a whole cluster starts on few cores."""
    info, layout = engine.info, engine.layout
    length = min(sum(_CHUNKS), info.context_max - 1)
    count = -(-(length + 1) // layout.block_size)
    blocks = np.arange(count, dtype=np.int32)
    engine.attach("", memoryview(bytearray(count * layout.block_bytes)))
    ids = np.full(length + 1, info.vocab_size // 2, dtype=np.int32)
    spec = SampleSpec(SamplingParams(seed=0), 0, ids[:length], ())

    def timed(start: int, tokens: int, sample: SampleSpec | None = None) -> tuple[Step, float]:
        began = thread_time()
        engine.step([Row("", ids[start : start + tokens], start, blocks, "", sample)])
        return Step.of([(start, tokens)]), thread_time() - began

    try:
        at = min(_CHUNKS[0], length)
        timed(0, at)
        timed(at, 1, spec)
        found = []
        for tokens in _CHUNKS[1:]:
            if chunk := min(tokens, length - at):
                found.append(timed(at, chunk))
                at += chunk
        found.append(timed(length, 1, spec))
        return tuple(found)
    finally:
        engine.detach("")
