"""Streams for benchmarks that are blocking scripts: they sleep, kill processes and run commands.

Decides where the client runs: the load generator's own, in an event loop in a thread of its own. A
request is looked at (:class:`~baton.bench.load.answer.Answer`) while it fills.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from baton.bench.asker import Asker, hang_up, random_prompt
from baton.bench.cluster import BenchCluster, BenchError
from baton.bench.load.answer import Answer

#: For one answer; the longest ones take minutes on a busy machine.
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One streamed completion that was asked for."""

    answer: Answer
    """Fills in another thread."""
    ended: threading.Event

    def wait(self) -> Answer:
        """Return the answer when it has ended, with an error perhaps.

        Raises:
            BenchError: it did not end.
        """
        if not self.ended.wait(PATIENCE_S):
            raise BenchError(f"an answer did not end within {PATIENCE_S:g} s")
        return self.answer


class Streams:
    """Greedy completions of exact lengths, from one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, asker: Asker) -> None:
        self._loop = loop
        self._asker = asker
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, prompt: Sequence[int], max_tokens: int) -> Stream:
        """Ask, and return at once."""

        async def ask() -> Stream:
            return self._ask(prompt, max_tokens)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(PATIENCE_S)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Ask, and return the whole answer.

        Raises:
            BenchError: there was none.
        """
        answer = self.begin(prompt, max_tokens).wait()
        if answer.error:
            raise BenchError(answer.error)
        return answer

    def background(
        self, count: int, *, prompt_tokens: int, max_tokens: int, seed: int
    ) -> Background:
        """Keep ``count`` streams running; each starts anew when it ends."""

        stopped = threading.Event()

        async def client(number: int) -> list[Answer]:
            answers: list[Answer] = []
            while not stopped.is_set():
                prompt = random_prompt(prompt_tokens, seed + 1_000 * number + len(answers))
                answer, task = self._asker.send(prompt, max_tokens)
                await task
                answers.append(answer)
            return answers

        clients = [
            asyncio.run_coroutine_threadsafe(client(number), self._loop) for number in range(count)
        ]
        return Background(clients, stopped)

    async def close(self) -> None:
        """Hang up on what still runs."""
        await hang_up(list(self._tasks))
        self._asker.close()

    def _ask(self, prompt: Sequence[int], max_tokens: int) -> Stream:
        answer, task = self._asker.send(prompt, max_tokens)
        stream = Stream(answer, threading.Event())
        self._tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if done.cancelled() or done.exception():
                answer.error = answer.error or f"not answered: {done!r}"
            stream.ended.set()

        task.add_done_callback(over)
        return stream


class Background:
    """Streams that run until :meth:`stop`."""

    def __init__(self, clients: Sequence[Future[list[Answer]]], stopped: threading.Event) -> None:
        self._clients = clients
        self._stopped = stopped

    def stop(self) -> list[Answer]:
        """Let each finish its stream; return all."""
        self._stopped.set()
        return [answer for client in self._clients for answer in client.result(PATIENCE_S)]


@contextmanager
def streams(cluster: BenchCluster) -> Iterator[Streams]:
    """Give a client of the cluster; what still runs at the end is hung up on."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made = Streams(loop, Asker(cluster.port, cluster.model))
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(made.close(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
