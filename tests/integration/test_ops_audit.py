"""`baton audit` and `baton explain` on real clusters: clean under load, leaks planted for real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import redis

from baton.channel.files import open_arena, read_header
from baton.channel.layout import RECORD_BYTES, pack_word
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import BlockState
from baton.ledger.keys import Keys, owner_entry
from baton.transport.host import boot_id
from support.cluster_client import Answer, complete
from support.ops_cluster import OpsCluster, ops_cluster

KEYS = Keys("default")
PROMPT = list(b"The quick brown fox jumps over the lazy dog. " * 4)


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    """One of each, slow enough to be looked at while it works."""
    with ops_cluster(
        BATON_MODEL_NAME="m", BATON_FAKE_STEP_MS="20", BATON_FAKE_PREFILL_MS="30", BATON_CHECK="1"
    ) as place:
        place.up()
        yield place


def _audit(cluster: OpsCluster) -> tuple[int, dict[str, set[str]]]:
    """Return the exit code, and the subjects found by kind."""
    done = cluster.baton("audit", "--json")
    assert done.stdout, done.stderr
    found: dict[str, set[str]] = {}
    for each in json.loads(done.stdout)["discrepancies"]:
        found.setdefault(each["kind"], set()).add(each["subject"])
    return done.returncode, found


def _arena(cluster: OpsCluster) -> Path:
    return Path(cluster.reports()["decode-0"]["arena"]["path"])


def _mark(path: Path, block: int, word: int) -> None:
    fd = open_arena(path)
    try:
        at = read_header(fd).records_offset + block * RECORD_BYTES
        os.pwrite(fd, word.to_bytes(8, sys.byteorder), at)
    finally:
        os.close(fd)


def test_a_busy_cluster_is_clean(cluster: OpsCluster) -> None:
    """Streams run, some are cancelled; the audit finds nothing, and explain tells the story."""
    answers: list[Answer] = []
    clients = [
        threading.Thread(
            target=lambda n=n: answers.append(
                complete(cluster.port, "m", [*b"busy", n, *PROMPT], max_tokens=80, ignore_eos=True)
            )
        )
        for n in range(4)
    ]
    for client in clients:
        client.start()
    code, found = _audit(cluster)
    for client in clients:
        client.join()
    assert (code, found) == (0, {}), cluster.logs()
    assert all(answer.done for answer in answers)
    name = answers[0].id
    told = cluster.baton("explain", name)
    assert told.returncode == 0, told.stderr
    for words in ("submitted", "takes decode-0", "a ticket", "stored", "verified", "complete"):
        assert words in told.stdout, told.stdout
    assert "completed, epoch 1, 1 attempt;" in told.stdout
    assert "quick brown" not in told.stdout
    assert cluster.baton("explain", "cmpl-never").returncode == 1


def test_a_record_that_somebody_else_wrote_is_found(cluster: OpsCluster) -> None:
    """An arena's record of a free block is made to say otherwise: found, then clean again."""
    path = _arena(cluster)
    _mark(path, 100, pack_word(1, BlockState.RESIDENT, 0))
    code, found = _audit(cluster)
    assert code == 1
    assert list(found) == ["block_differs"]
    (subject,) = found["block_differs"]
    assert subject.startswith(f"{path} block 100: RESIDENT generation 1, decode-0/")
    _mark(path, 100, pack_word(1, BlockState.FREE, 0))
    assert _audit(cluster) == (0, {})


@pytest.mark.slow
def test_planted_leaks_in_ledger_and_files_are_found(cluster: OpsCluster) -> None:
    """Everything that can be planted from outside a process, all at once."""
    ghost = Peer("decode-9", 424_242)
    member = Member(ghost, Role.DECODE, "ipc:///nowhere", pid=2**22 - 1, boot_id=boot_id())
    with redis.Redis(unix_socket_path=str(cluster.run_dir / "ledger.sock")) as ledger:
        ledger.hset(KEYS.members, str(ghost), msgspec.msgpack.encode(member))
        ledger.zadd(KEYS.leases, {str(ghost): 2**50})
        ledger.zadd(KEYS.owners, {owner_entry(ghost, "cmpl-nobody"): 2**50})
        ledger.hset(
            KEYS.request("cmpl-orphan"),
            mapping={
                "state": "decoding",
                "epoch": 1,
                "attempts": 1,
                "router": "router-9/1",
                "gateway": "gateway-9/1",
                "decode": "decode-9/1",
                "prefill": "",
                "expires_at": 2**50,
                "spec": b"",
            },
        )
        stray = _stray(cluster)
        with closing(socket.socket(socket.AF_UNIX)) as dead:
            dead.bind(str(cluster.run_dir / "decode-9.sock"))
        (cluster.run_dir / "decode-9.sock.lock").write_text("1")
        arena = _arena(cluster)
        copy = arena.with_name(arena.name.replace("decode-0", "decode-9"))
        copy.write_bytes(arena.read_bytes())
        try:
            code, found = _audit(cluster)
        finally:
            stray.kill()
            stray.wait()
            copy.unlink()
            for name in ("decode-9.sock", "decode-9.sock.lock"):
                (cluster.run_dir / name).unlink()
            ledger.hdel(KEYS.members, str(ghost))
            ledger.zrem(KEYS.leases, str(ghost))
            ledger.zrem(KEYS.owners, owner_entry(ghost, "cmpl-nobody"))
            ledger.delete(KEYS.request("cmpl-orphan"))
    assert code == 1
    assert set(found) == {
        "lease_of_the_dead",
        "owner_index_differs",
        "record_without_owner",
        "stray_process",
        "socket_of_the_dead",
        "lock_file_of_the_dead",
        "arena_without_owner",
    }
    assert _audit(cluster) == (0, {})


def _stray(cluster: OpsCluster) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "SV_RUN_DIR": str(cluster.run_dir)}
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], env=environ)


@pytest.mark.slow
def test_a_frozen_process_is_not_clean(cluster: OpsCluster) -> None:
    """What cannot be asked is told, with an exit code of its own (or named by what it leaves)."""
    process = cluster.process("prefill-0")
    # Its guard as well: it would have replaced the worker before a slow machine has started us.
    guard = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guard, signal.SIGSTOP)
    process.send(signal.SIGSTOP)
    try:
        done = cluster.baton("audit", "--json")
    finally:
        process.send(signal.SIGCONT)
        os.kill(guard, signal.SIGCONT)
    picture = json.loads(done.stdout)
    assert done.returncode in (1, 2)
    assert picture["unseen"] or picture["discrepancies"]
