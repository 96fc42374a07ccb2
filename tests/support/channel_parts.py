"""Small layouts, peers and checks for tests of the KV channel."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from baton.channel.checksum import block_checksum, seed_of
from baton.core.ids import Compat, Peer
from baton.ports.channel import BlockCheck
from baton.ports.engine import KVLayout
from baton.wire.handover import ArenaRef

LAYOUT = KVLayout(layers=3, heads=2, head_dim=8, block_size=4, dtype="float32")
COMPAT = Compat(
    model="m" * 64, tokenizer="t" * 64, dtype="float32", block_size=4, layout="words", kernels="ref"
)
OWNER = Peer("decode-0", 1001)
WRITER = Peer("prefill-0", 2001)
CHAIN = bytes(range(16))
DEADLINE_S = 20.0

WRITER_SCRIPT = Path(__file__).with_name("channel_process.py")


def pattern(length: int, salt: int = 1) -> bytes:
    """Bytes that repeat with no period that fits a block, a token or a page."""
    return bytes((i * 131 + (i >> 8) * 17 + salt * 29) & 0xFF for i in range(length))


def check_of(
    memory: memoryview, block: int, *, logical: int = 0, chain: bytes = CHAIN, tokens: int = 4
) -> BlockCheck:
    """The check that holds for what is in ``memory`` now."""
    at = block * LAYOUT.block_bytes
    block_bytes = memory[at : at + LAYOUT.block_bytes]
    checksum = block_checksum(block_bytes, LAYOUT, tokens, seed_of(chain))
    return BlockCheck(logical, block, tokens, chain, checksum)


def until(condition: Callable[[], bool], what: str) -> None:
    """Look until it holds; the things looked for happen within milliseconds."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        os.sched_yield()


class Process:
    """A real process running ``channel_process.py``; a context that leaves nothing behind."""

    def __init__(self, mode: str, **arguments: object) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, str(WRITER_SCRIPT), mode, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
            text=True,
        )
        self.pid = self.popen.pid

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()

    def line(self) -> str:
        """The next line it says; empty if it ended."""
        assert self.popen.stdout is not None
        ready, _, _ = select.select([self.popen.stdout], [], [], DEADLINE_S)
        assert ready, "the process says nothing"
        return self.popen.stdout.readline().strip()

    def go(self) -> None:
        """Tell it to go on with what it is for."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def state(self) -> str:
        """R, S, T (stopped), Z (dead, not reaped), from /proc."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


def arguments_of(ref: ArenaRef, incarnation: int) -> dict[str, object]:
    """What a writer process needs to map ``ref``."""
    return {
        "ref": [ref.path, ref.device, ref.inode, ref.file_id, *_peer(ref.owner)],
        "me": incarnation,
    }


def _peer(peer: Peer) -> tuple[str, int]:
    return peer.worker_id, peer.incarnation
