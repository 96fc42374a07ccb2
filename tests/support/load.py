"""Load on a real cluster whose every answer is known: what happens meanwhile must change none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from support.cluster_client import Answer, complete, get
from support.ops_cluster import OpsCluster

#: Long enough that a stream lives through several restarts.
TOKENS = 150
PROMPTS = [[(17 * number + place) % 90 + 1 for place in range(40)] for number in range(3)]


class Load:
    """Streams that start anew when they end, and short requests in between."""

    def __init__(self, cluster: OpsCluster) -> None:
        self.port = cluster.port
        self.model = json.loads(get(self.port, "/v1/models")[1])["data"][0]["id"]
        self.undisturbed = [self._ask(prompt).ids for prompt in PROMPTS]
        self.answers: list[tuple[int, Answer]] = []
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number, tokens))
            for number in range(len(PROMPTS))
            for tokens in (TOKENS, 4)
        ]

    def _ask(self, prompt: list[int], tokens: int = TOKENS) -> Answer:
        return complete(self.port, self.model, prompt, max_tokens=tokens, ignore_eos=True)

    def _run(self, number: int, tokens: int) -> None:
        while not self._stopped.is_set():
            answer = self._ask(PROMPTS[number], tokens)
            self.answers.append((number, answer))
            time.sleep(0.05 if answer.finish else 0.5)

    def wrong(self) -> list[str]:
        """Return what every answer was that is not the undisturbed one, or its beginning."""
        return [
            f"{answer.status} {answer.error or answer.broken} {len(answer.ids)} ids"
            for number, answer in self.answers
            if answer.finish != "length"
            or answer.ids != self.undisturbed[number][: len(answer.ids)]
            or len(answer.ids) not in (TOKENS, 4)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the streams, and let each end."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join()
