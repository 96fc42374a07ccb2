"""Clients that stream completions over HTTP and write down when each piece arrived.

Decides how a gap is measured: between the arrivals of two pieces at the client's socket, on the
client's clock. A piece is what the gateway sent at once, one token unless it lagged.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection

from baton.bench.cluster import BenchCluster

#: Ids of ordinary words in any tokenizer of a few thousand entries; special ids lie below.
ID_MIN, ID_MAX = 300, 4_000


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Return a prompt that no cache has seen: random ids."""
    chance = random.Random(seed)
    return [chance.randrange(ID_MIN, ID_MAX) for _ in range(tokens)]


@dataclass(slots=True)
class Stream:
    """One streamed completion."""

    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    error: str = ""
    text: str = ""
    tokens: int = 0
    """As the server counted them."""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent_at


def complete(
    cluster: BenchCluster,
    prompt: Sequence[int],
    max_tokens: int,
    stream: Stream | None = None,
) -> Stream:
    """Stream one greedy completion of exactly ``max_tokens`` tokens; ``stream`` fills meanwhile."""
    stream = Stream() if stream is None else stream
    body = {
        "model": cluster.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = HTTPConnection("127.0.0.1", cluster.port, timeout=600)
    stream.sent_at = time.monotonic()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        stream.error = answer.read().decode()[:200]
        connection.close()
        return stream
    while line := answer.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                stream.error = str(event["error"])[:200]
                break
            if usage := event.get("usage"):
                stream.tokens = int(usage["completion_tokens"])
            for choice in event["choices"]:
                stream.text += choice["text"]
                if choice.get("finish_reason") is None:
                    stream.arrivals.append(time.monotonic())
    connection.close()
    return stream


class Background:
    """Streams that run until :meth:`stop`, one thread each, each starting anew when it ends."""

    def __init__(
        self, cluster: BenchCluster, count: int, *, prompt_tokens: int, max_tokens: int, seed: int
    ) -> None:
        self.streams: list[Stream] = []
        self._cluster = cluster
        self._shape = (prompt_tokens, max_tokens)
        self._seed = seed
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        rounds = 0
        while not self._stopped.is_set():
            prompt = random_prompt(self._shape[0], self._seed + 1_000 * number + rounds)
            stream = complete(self._cluster, prompt, self._shape[1])
            with self._lock:
                self.streams.append(stream)
            rounds += 1

    def stop(self) -> list[Stream]:
        """Let each finish its stream; return all."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        return self.streams


def gaps_between(streams: Sequence[Stream], begin: float, end: float) -> list[float]:
    """Return the gaps in seconds between pieces that arrived within ``begin..end``."""
    gaps: list[float] = []
    for stream in streams:
        for before, after in zip(stream.arrivals, stream.arrivals[1:], strict=False):
            if begin <= before and after <= end:
                gaps.append(after - before)
    return gaps
