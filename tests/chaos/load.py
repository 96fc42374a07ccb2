"""Clients that ask all the time, and the references they are judged by.

Decides who asks what next (from the seed) and keeps every answer with its judgement.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from chaos.catalogue import Item
from chaos.client import ask
from chaos.heard import Heard
from chaos.judge import Class, Judgement
from chaos.place import Place

#: After a refusal a client comes again later, as it was told to.
AFTER_REFUSAL_S = 0.5
#: Undisturbed answers are asked for so often: guards kill what gets no CPU on a loaded machine.
TRIES = 5


@dataclass(slots=True)
class Judged:
    """One answer with its class."""

    heard: Heard
    judgement: Judgement


class Load:
    """A number of clients, one loop each."""

    def __init__(
        self,
        place: Place,
        items: list[Item],
        seed: int,
        *,
        deadline_s: float,
        judge: Callable[[Heard], Judgement],
        on_bad: Callable[[Judged], None],
        in_turn: bool = False,
    ) -> None:
        self.judged: list[Judged] = []
        self.asking: dict[int, Heard] = {}
        """Those that wait for something just now."""
        self._place = place
        self._items = items
        self._seed = seed
        self._deadline_s = deadline_s
        self._judge = judge
        self._on_bad = on_bad
        self._turns = itertools.cycle(items) if in_turn else None
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, clients: int) -> None:
        self._stopping = False
        self._tasks = [
            asyncio.get_running_loop().create_task(self._client(number))
            for number in range(clients)
        ]

    async def stop(self) -> None:
        """Every client ends with the answer it waits for."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        chance = random.Random(f"client {self._seed} {number}")
        weights = [item.weight for item in self._items]
        while not self._stopping:
            if self._turns is not None:
                item = next(self._turns)
            else:
                (item,) = chance.choices(self._items, weights)
            judged = await self.one(item, through_proxy=chance.random() < 0.4)
            refused = judged.judgement.what is Class.REFUSED
            await asyncio.sleep(AFTER_REFUSAL_S if refused else chance.random() * 0.05)

    async def one(
        self, item: Item, *, through_proxy: bool = False, heard: Heard | None = None
    ) -> Judged:
        """Ask once and judge."""
        heard = heard if heard is not None else Heard(item)
        heard.through_proxy = through_proxy
        port = self._place.client_port if through_proxy else self._place.port
        self.asking[id(heard)] = heard
        await ask(heard, port, self._deadline_s)
        del self.asking[id(heard)]
        judged = Judged(heard, self._judge(heard))
        self.judged.append(judged)
        self._on_bad(judged)
        return judged


async def references(place: Place, items: list[Item], deadline_s: float, at_once: int = 4) -> None:
    """Ask every item of an undisturbed cluster; raise if one is not answered."""
    first = [item for item in items if not item.stop_of]
    await _ask_all(place, first, deadline_s, at_once)
    by_name = {item.name: item for item in items}
    second = [item for item in items if item.stop_of]
    for item in second:
        source = by_name[item.stop_of].reference
        assert source is not None
        at = len(source.text) * 3 // 5
        item.body["stop"] = [source.text[at : at + 3]]
    await _ask_all(place, second, deadline_s, at_once)


async def _ask_all(place: Place, items: list[Item], deadline_s: float, at_once: int) -> None:
    waiting = list(items)

    async def worker() -> None:
        while waiting:
            item = waiting.pop()
            leaves, item.leaves_after = item.leaves_after, None
            for _ in range(TRIES):
                heard = await ask(Heard(item), place.port, deadline_s)
                if heard.done:
                    break
                await asyncio.sleep(AFTER_REFUSAL_S)
            item.leaves_after = leaves
            if not heard.done:
                raise RuntimeError(f"no reference for {item.name}: {heard}")
            set_reference(item, heard)

    await asyncio.gather(*(worker() for _ in range(at_once)))


def set_reference(item: Item, heard: Heard) -> None:
    """What was heard undisturbed is what every other answer must be."""
    answer = heard.answer
    answer.first_s = heard.arrivals[0] - heard.sent_at
    gaps = [b - a for a, b in zip(heard.arrivals, heard.arrivals[1:], strict=False)]
    answer.gap_s = statistics.median(gaps) if gaps else 0.0
    item.reference = answer
