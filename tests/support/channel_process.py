"""The other process in tests of the KV channel: ``channel_process.py MODE JSON``.

Says ``ready ...`` when it did what the mode is about, then goes on until it is killed or its
standard input ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any, NoReturn

import numpy as np
import structlog

from baton.channel.arena import SharedArena
from baton.channel.shm import ShmArena, ShmChannel
from baton.core.ids import Peer
from baton.core.lifecycles import BlockState
from baton.ports.channel import ArenaInUse, BlockMark
from baton.wire.handover import ArenaRef
from support.channel_parts import COMPAT, LAYOUT

TOGGLED = (
    BlockMark(0, BlockState.RESERVED, 0x01010101, epoch=1, writer=1, filled=0x0101),
    BlockMark(0, BlockState.QUARANTINED, 0xFEFEFEFE, epoch=2, writer=2, filled=0xFEFE),
)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def wait_for_end() -> None:
    sys.stdin.read()


def open_arena(given: dict[str, Any]) -> ShmArena:
    path, device, inode, file_id, worker_id, incarnation = given["ref"]
    ref = ArenaRef(path, device, inode, file_id, Peer(worker_id, incarnation))
    return ShmChannel(LAYOUT, COMPAT).map(ref, Peer("prefill-x", given["me"]))


def store(given: dict[str, Any]) -> None:
    """Once told to, store into blocks ``first .. last`` from some threads for ever."""
    view = open_arena(given).memory
    part = view[given["first"] * LAYOUT.block_bytes : given["last"] * LAYOUT.block_bytes]
    say("mapped")
    sys.stdin.readline()
    slices = np.array_split(np.frombuffer(part, dtype=np.uint8), given["threads"])
    started = threading.Barrier(len(slices) + 1)

    def run(target: np.ndarray) -> NoReturn:
        source = np.zeros(len(target), dtype=np.uint8)
        started.wait()
        while True:
            source += 1
            np.copyto(target, source)  # releases the interpreter lock: really in parallel

    for each in slices:
        threading.Thread(target=run, args=(each,), daemon=True).start()
    started.wait()
    say("ready")
    wait_for_end()


def fork(given: dict[str, Any]) -> None:
    """Map, then leave one forked child and one started program behind."""
    arena = open_arena(given)
    assert arena.memory[0] == 0
    quiet, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told, b"x")
        while True:
            os.read(quiet, 0) or threading.Event().wait()
    os.read(quiet, 1)
    program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    say(f"ready {child} {program.pid}")
    wait_for_end()


def own(given: dict[str, Any]) -> None:
    """Own an arena."""
    try:
        arena = SharedArena.create(
            given["dir"], "test", Peer("decode-0", given["me"]), LAYOUT, COMPAT, blocks=4
        )
    except ArenaInUse:
        say("in use")
        return
    say(f"ready {arena.ref.inode} {arena.ref.file_id}")
    wait_for_end()


def toggle(given: dict[str, Any]) -> None:
    """Own an arena and change one record between two values, for ever."""
    me = Peer("decode-0", given["me"])
    arena = SharedArena.create(given["dir"], "test", me, LAYOUT, COMPAT, blocks=4)
    arena.mark(TOGGLED)
    ref = arena.ref
    say(json.dumps([ref.path, ref.device, ref.inode, ref.file_id]))
    while True:
        arena.mark(TOGGLED)


MODES = {mode.__name__: mode for mode in (store, fork, own, toggle)}

if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    MODES[sys.argv[1]](json.loads(sys.argv[2]))
