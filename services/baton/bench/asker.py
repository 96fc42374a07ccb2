"""What benchmarks ask a server: random prompts, exact lengths, one client.

Decides the requests. The client and what counts as a token are the load generator's
(:mod:`baton.bench.load`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from baton.bench.cluster import BenchError
from baton.bench.load.answer import Answer
from baton.bench.load.asking import AskPlan, Conversation
from baton.bench.load.http import Client

#: Ids of ordinary words in any tokenizer of a few thousand entries; special ids lie below.
ID_MIN, ID_MAX = 300, 4_000


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Return a prompt that no cache has seen: random ids."""
    chance = random.Random(seed)
    return [chance.randrange(ID_MIN, ID_MAX) for _ in range(tokens)]


class Prompts:
    """Prompts that no cache has seen."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fresh(self, tokens: int) -> list[int]:
        """Return so many random ids."""
        self._seed += 1
        return random_prompt(tokens, self._seed)


class Asker:
    """Requests to one server at 127.0.0.1. Its connections belong to one event loop."""

    def __init__(self, port: int, model: str) -> None:
        self._client = Client(f"http://127.0.0.1:{port}")
        self._plan = AskPlan(model=model)

    def send(self, prompt: Sequence[int], max_tokens: int) -> tuple[Answer, asyncio.Task[None]]:
        """Ask for exactly ``max_tokens`` greedy tokens; cancelling the task hangs up."""
        body = Conversation(self._plan).body(list(prompt), max_tokens, wants_ids=False)
        answer = Answer(time.monotonic())
        request = self._client.request("POST", self._plan.path, body, answer)
        return answer, asyncio.get_running_loop().create_task(request)

    async def ask_all(
        self, prompts: Sequence[list[int]], max_tokens: int, patience_s: float
    ) -> list[Answer]:
        """Ask all at once and return the whole answers.

        Raises:
            BenchError: one did not come within ``patience_s``, or is an error.
        """
        sent = [self.send(prompt, max_tokens) for prompt in prompts]
        _, late = await asyncio.wait([task for _, task in sent], timeout=patience_s)
        await hang_up(list(late))
        if late:
            raise BenchError(f"no answer within {patience_s:g} s")
        answers = [answer for answer, _ in sent]
        for answer in answers:
            if answer.error or not answer.done:
                raise BenchError(answer.error or "no whole answer")
        return answers

    def close(self) -> None:
        """Close the connections that are kept."""
        self._client.close()


def first_at(answer: Answer) -> float:
    """Return when a whole answer's first token came: one without text came with the end."""
    return answer.arrivals[0] if answer.arrivals else answer.ended_at


async def hang_up(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Close these requests' connections; servers take that for clients that went away."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
