"""vLLM as columns of a comparison of modes: its servers, each started the way that is measured.

Decides which of its ways are tried: colocated on all cores with its default chunk and shorter ones,
and its own split. Figures and times are the comparison's (:mod:`baton.bench.load.modes`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from baton.bench.asker import Asker, Prompts
from baton.bench.ends import undisturbed
from baton.bench.load.modes import Foreign, Place, Way
from baton.bench.load.running import Target
from baton.bench.peer_servers import (
    CONTEXT,
    CORES,
    Server,
    Vllm,
    VllmSplit,
    make_files,
    programs,
    versions,
)

VLLM_CHUNKS = (0, 512, 256, 128, 64, 32)
"""0: its default."""
_START_S, _PATIENCE_S = 100.0, 240.0
#: Lengths and numbers of prompts at once, so that whatever is compiled for a shape has been.
_WARM_UP = ((1, 1_024), (4, 64), (8, 64))


def vllm_columns(scratch: Path, chunks: Iterable[int] = VLLM_CHUNKS) -> tuple[Foreign, ...]:
    """Return its columns; none where ``PEERS_VLLM_BIN`` names no folder with its programs."""
    found = programs("PEERS_VLLM_BIN", "vllm", "vllm-router")
    if found is None:
        return ()
    told = versions(None, found)
    folder = make_files(None).folder
    colocated = tuple(
        _way(
            "vllm",
            f"chunk {chunk}" if chunk else "its default chunk",
            partial(_served, Vllm(scratch, found, folder, chunk), told),
        )
        for chunk in chunks
    )
    split = _way(
        "vllm-split",
        "1 prefill, 1 decode, repaired",
        partial(_served, VllmSplit(scratch, found, folder), told),
    )
    return (Foreign("vllm", colocated), Foreign("vllm-split", (split,)))


def _way(mode: str, words: str, place: Place) -> Way:
    return Way(mode, words, {}, place=place, start_s=_START_S)


@contextmanager
def _served(server: Server, told: dict[str, str]) -> Iterator[Target]:
    """Start it, warm it up, and stop it afterwards."""
    try:
        asyncio.run(_started(server))
        server.settle()
        yield Target(
            url=f"http://127.0.0.1:{server.port}",
            model=server.model,
            roots=tuple(server.pids()),
            cores=float(len(CORES)),
            told={
                "dtype": "bfloat16",
                "limits": {"server": server.name, "max_model_len": CONTEXT},
                "cache_state": "started for these runs; texts of a rate come once",
                "versions": told,
            },
        )
    finally:
        with undisturbed():
            server.stop()


async def _started(server: Server) -> None:
    prompts = Prompts(int.from_bytes(os.urandom(4)) << 16)
    await server.start(prompts)
    asker = Asker(server.port, server.model)
    try:
        for count, tokens in _WARM_UP:
            asked = [prompts.fresh(tokens) for _ in range(count)]
            await asker.ask_all(asked, 8, _PATIENCE_S)
    finally:
        asker.close()
