"""What an engine runs before its first request; the same for every kind of kernel."""

from __future__ import annotations

import numpy as np

from baton.core.sampling import SamplingParams
from baton.ports.engine import Engine, Row, SampleSpec

#: Tokens of the rehearsed prompt chunk.
_LENGTH = 257


def rehearse(engine: Engine) -> None:
    """Run one prompt chunk and one decode step in memory of their own."""
    info, layout = engine.info, engine.layout
    length = min(_LENGTH, info.context_max - 1)
    count = -(-(length + 1) // layout.block_size)
    blocks = np.arange(count, dtype=np.int32)
    engine.attach("", memoryview(bytearray(count * layout.block_bytes)))
    ids = np.full(length, info.vocab_size // 2, dtype=np.int32)
    spec = SampleSpec(SamplingParams(seed=0), 0, ids, ())
    try:
        engine.step([Row("", ids, 0, blocks, "")])
        engine.step([Row("", ids[:1], length, blocks, "", spec)])
    finally:
        engine.detach("")
