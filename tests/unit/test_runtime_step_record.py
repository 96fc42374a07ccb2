"""The record of steps: what a successor reads, however its former self ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.core.ids import Peer
from baton.ports.driving import RecordStep
from baton.runtime.step_record import SLOT_BYTES, StepRecord, StepRecordInUse, record_path
from baton.wire.messages import AttemptId, LastStep

A, B = AttemptId("a" * 40, 1), AttemptId("b" * 40, 7)
FIRST, SECOND = Peer("decode-0", 5), Peer("decode-0", 6)

WRITER = """
import sys
from pathlib import Path
from baton.core.ids import Peer
from baton.ports.driving import RecordStep
from baton.runtime.step_record import StepRecord
from baton.wire.messages import AttemptId
record = StepRecord(Path(sys.argv[1]), Peer("decode-0", int(sys.argv[2])))
print("ready", flush=True)
number = 0
while True:
    number += 1
    record.write(RecordStep(tuple(AttemptId(f"r{n}", number) for n in range(32))))
"""


def reopened(path: Path, me: Peer = SECOND) -> LastStep | None:
    record = StepRecord(path, me)
    record.close()
    return record.left


def test_a_successor_reads_whose_step_was_left(tmp_path: Path) -> None:
    """The newest record counts; a first start finds nobody's."""
    path = record_path(tmp_path, "decode-0")
    record = StepRecord(path, FIRST)
    assert record.left is None
    for attempts in ((A,), (A, B), (B,)):
        record.write(RecordStep(attempts))
    record.close()
    assert reopened(path) == LastStep(FIRST, (B,))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_worker_that_dies_before_its_first_step_left_nobodys(tmp_path: Path) -> None:
    """What its own former self had left is not taken for its own."""
    path = record_path(tmp_path, "decode-0")
    record = StepRecord(path, FIRST)
    record.write(RecordStep((A,)))
    record.close()
    assert reopened(path, SECOND) == LastStep(FIRST, (A,))
    assert reopened(path, Peer("decode-0", 7)) == LastStep(SECOND, ())


@pytest.mark.parametrize("damage", ["newest", "both", "all"])
def test_a_damaged_slot_is_not_believed(tmp_path: Path, damage: str) -> None:
    """The other slot holds the step before; with none left nobody is named."""
    path = record_path(tmp_path, "decode-0")
    record = StepRecord(path, FIRST)
    record.write(RecordStep((A,)))
    record.write(RecordStep((B,)))
    record.close()
    raw = bytearray(path.read_bytes())
    if damage == "all":
        raw[:] = os.urandom(len(raw))
    else:
        newest = max((0, 1), key=lambda slot: raw[slot * SLOT_BYTES + 8])
        for slot in {newest} if damage == "newest" else {0, 1}:
            raw[slot * SLOT_BYTES + 30] ^= 4
    path.write_bytes(raw)
    assert reopened(path) == (LastStep(FIRST, (A,)) if damage == "newest" else None)


def test_more_than_a_slot_holds_names_nobody(tmp_path: Path) -> None:
    """Better nobody is blamed than some of those who were there."""
    path = record_path(tmp_path, "decode-0")
    record = StepRecord(path, FIRST)
    record.write(RecordStep(tuple(AttemptId("x" * 256, n) for n in range(200))))
    record.close()
    assert reopened(path) == LastStep(FIRST, ())


def test_two_processes_do_not_write_one_record(tmp_path: Path) -> None:
    """A second start under a living worker's name is refused before it stores anything."""
    path = record_path(tmp_path, "decode-0")
    record = StepRecord(path, FIRST)
    record.write(RecordStep((A,)))
    with pytest.raises(StepRecordInUse):
        StepRecord(path, SECOND)
    record.close()
    assert reopened(path) == LastStep(FIRST, (A,))


def test_a_kill_at_any_moment_leaves_a_whole_step(tmp_path: Path) -> None:
    """Killed while it does nothing but write: all rows that are read are of one step."""
    path = record_path(tmp_path, "decode-0")
    for round_number in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(round_number + 1)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.003 * round_number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        left = reopened(path, Peer("decode-0", 1_000 + round_number))
        assert left is not None and left.peer == Peer("decode-0", round_number + 1)
        assert len(left.attempts) in (0, 32)
        assert len({attempt.epoch for attempt in left.attempts}) <= 1


def test_it_costs_microseconds(tmp_path: Path) -> None:
    """32 rows, as large as a batch gets: far below what a step takes."""
    record = StepRecord(record_path(tmp_path, "decode-0"), FIRST)
    command = RecordStep(tuple(AttemptId(f"cmpl-{n:032x}", 1) for n in range(32)))
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(50):
            record.write(command)
        best = min(best, (time.perf_counter() - began) / 50)
    assert best < 100e-6, f"{best * 1e6:.0f} us"
    record.close()
