"""The compiled step on borrowed cores: whose word counts; no bit depends on it."""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.engine.native import binding
from baton.ports.engine import CORE_LINE_BYTES, SharedCores
from support.engine_compiled import LEVELS, step_engine
from support.engine_steps import Arena, Sequel, ids_of

CORES = sorted(os.sched_getaffinity(0))
OWN, LENT = CORES[0], CORES[-1]
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="there is no other core to borrow")
IDLE, COMPUTING = 1, 2**64 - 1


class Board:
    """A core board in plain memory."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray((CORES[-1] + 1) * CORE_LINE_BYTES))

    def cores(self) -> SharedCores:
        return SharedCores(self.memory, (OWN,), (LENT,))

    def word(self, core: int) -> int:
        return int(struct.unpack_from("<Q", self.memory, core * CORE_LINE_BYTES)[0])

    def say(self, value: int, core: int = LENT) -> None:
        struct.pack_into("<Q", self.memory, core * CORE_LINE_BYTES, value)

    @contextmanager
    def restless(self, seed: int) -> Iterator[None]:
        """The core's owner computes now and then, for times between nothing and some chunks."""
        over, chance = threading.Event(), random.Random(seed)

        def change() -> None:
            while not over.wait(chance.choice((0, 0, 1e-5, 1e-4, 1e-3))):
                later = time.monotonic_ns() + 10**5
                self.say(chance.choice((IDLE, IDLE, COMPUTING, later)))

        owner = threading.Thread(target=change)
        owner.start()
        try:
            yield
        finally:
            over.set()
            owner.join()


def answer(engine: Any, chunks: tuple[int, ...]) -> tuple[list[int], bytes]:
    """What comes of a prompt and eight steps, and all K and V."""
    arena = Arena(engine, 20)
    prompt = ids_of((17 * n + 3) % engine.info.vocab_size for n in range(300))
    one = Sequel(engine, prompt, ids_of(range(20)))
    one.prefill(chunks)
    one.decode(9)
    engine.detach("arena")
    return one.output, bytes(arena.memory)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_do_not_depend_on_who_takes_part(level: binding.Level, dtype: str) -> None:
    """With one and two threads of its own, while the core is given and taken back at any moment."""
    engine = step_engine("llama", dtype, level=level)
    wanted = answer(engine, (64, 128))
    board = Board()
    for threads in (1, 2):
        engine.use_threads(threads, board.cores())
        with board.restless(threads):
            for chunks in ((64, 128), (), (7, 200)):
                assert answer(engine, chunks) == wanted
        board.say(IDLE)
        assert answer(engine, (64,)) == wanted


def engine_and_row() -> tuple[Any, Board, Any]:
    """An engine that may borrow, and a prompt of one step."""
    engine, board = step_engine("llama", "float32"), Board()
    engine.use_threads(1, board.cores())
    Arena(engine, 20)
    sequel = Sequel(engine, ids_of(range(1, 201)), ids_of(range(20)))
    return engine, board, sequel.prompt_row(0, 200)


@two_cores
def test_a_core_is_borrowed_only_while_its_owner_says_that_it_computes_nothing() -> None:
    """Not while it computes, nor before the time it has named, nor if nobody has said anything."""
    engine, board, row = engine_and_row()
    for says in (0, COMPUTING, 2**62, IDLE, COMPUTING):
        board.say(says)
        engine.step([row])
        # On a busy machine the core is left alone for a part of the step.
        assert (engine.borrowed > 0) == (says == IDLE), says


@two_cores
def test_an_engine_that_is_to_borrow_nothing_does_not() -> None:
    """However idle the core is; and it does again when it may."""
    engine, board, row = engine_and_row()
    board.say(IDLE)
    for borrows in (True, False, True):
        engine.borrows = borrows
        engine.step([row])
        assert (engine.borrowed > 0) == borrows


def test_a_step_takes_its_own_cores_and_gives_them_up_a_little_later() -> None:
    """Also one that fails; the next step comes so soon that lending would not pay."""
    engine, board, row = engine_and_row()
    seen: list[int] = []
    before = time.monotonic_ns()
    engine.step([row], lambda: seen.append(board.word(OWN)))
    after = time.monotonic_ns()
    assert seen == [COMPUTING]
    assert before < board.word(OWN) - 5_000_000 < after

    def fail() -> None:
        raise RuntimeError("as if a checksum could not be made")

    board.say(IDLE, OWN)
    with pytest.raises(RuntimeError):
        engine.step([row], fail)
    assert after < board.word(OWN) < COMPUTING


def test_an_engine_of_others_cores_is_made_anew_without_them() -> None:
    """A change of threads ends what looked at the board."""
    engine, board, row = engine_and_row()
    board.say(IDLE)
    engine.step([row])
    engine.use_threads(1)
    engine.step([row])
    assert engine.borrowed == 0.0
