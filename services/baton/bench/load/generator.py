"""Asks, on time, and writes down what came back and how late it was itself.

Decides when a request goes out and what belongs to the measured window. A request of an open loop
is *due* at its time, whatever became of those before it; what the generator adds to that is its
lateness, measured for each one. Its event loop is watched as well: a loop that stands still reads
its clock late, and every figure would be the server's and its own. Times are those of
``time.monotonic``: uvloop's own clock counts whole milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

from baton.bench.load.answer import Answer
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.asking import AskPlan, Conversation
from baton.bench.load.http import Client
from baton.bench.load.workload import Session, Turn

#: Requests at once; one more goes out late.
IN_FLIGHT_MAX = 4_096
LAG_EVERY_S = 0.01
START_IN_S = 0.1
AFTER_ERROR_S = 0.1
#: Sessions made ahead of their time, and how much of it must be left to make another one.
AHEAD = 128
SPARE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How long, and how many at once."""

    kind: Arrivals = Arrivals.CLOSED
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int = 1
    """Clients of a closed loop."""
    warmup_s: float = 5.0
    """Requests that come in it are answered, and counted nowhere."""
    duration_s: float = 30.0
    """Of the measured window."""
    requests: int = 0
    """The window ends earlier, when so many came in it; 0: only by time."""
    grace_s: float = 60.0
    """What runs when the window ends has so long; then it is cut off and counts as unfinished."""


@dataclass(slots=True)
class Asked:
    """One request."""

    session: int
    turn: int
    due_at: float
    prompt_tokens: int
    output_tokens: int
    intruder: bool
    answer: Answer | None = None

    @property
    def late_s(self) -> float:
        """How much later than due it went out; a timer may be a fraction of a millisecond early."""
        return max(0.0, self.answer.sent_at - self.due_at) if self.answer else 0.0


@dataclass(slots=True)
class Measured:
    """What a run brought; times are monotonic seconds."""

    began_at: float = 0.0
    """Of the measured window."""
    ended_at: float = 0.0
    over_at: float = 0.0
    """When the last answer was there, or was cut off."""
    asked: list[Asked] = field(default_factory=list)
    """All of them; those due before ``began_at`` are warm-up."""
    lags: list[float] = field(default_factory=list)
    """How late the event loop was, looked at every 10 ms of the window."""
    invented: int = 0
    aborted: bool = False
    in_flight: int = 0
    in_flight_peak: int = 0


WindowEdge = Callable[[], None]


class Generator:
    """One run."""

    def __init__(self, client: Client, ask: AskPlan, plan: LoadPlan) -> None:
        self._client = client
        self._ask = ask
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._aborted = asyncio.Event()
        self._places = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._counted = 0
        self.measured = Measured()

    def abort(self) -> None:
        """End now: what was measured so far is a partial result."""
        self.measured.aborted = True
        self._aborted.set()
        self._stop.set()

    async def run(
        self, sessions: Iterator[Session], at_begin: WindowEdge, at_end: WindowEdge
    ) -> Measured:
        """Ask until the window is over, then wait for the answers.

        ``at_begin`` and ``at_end`` are called at the window's edges.
        """
        plan, measured = self._plan, self.measured
        ahead = deque(islice(sessions, 0 if plan.kind is Arrivals.CLOSED else AHEAD))
        started_at = monotonic() + START_IN_S
        measured.began_at = started_at + plan.warmup_s
        end_at = measured.began_at + plan.duration_s
        edge = self._loop.call_later(measured.began_at - monotonic(), at_begin)
        over = self._loop.call_later(end_at - monotonic(), self._stop.set)
        lag = self._loop.create_task(self._watch_lag(measured.began_at))
        tasks: set[asyncio.Task[Any]] = set()
        try:
            if plan.kind is Arrivals.CLOSED:
                clients = [
                    self._one_after_the_other(sessions, started_at) for _ in range(plan.concurrency)
                ]
                tasks = {self._loop.create_task(each) for each in clients}
                await self._stop.wait()
            else:
                await self._as_they_come(sessions, ahead, started_at, tasks)
            measured.ended_at = monotonic()
            lag.cancel()
            at_end()
            await self._let_end(tasks)
        finally:
            for handle in (edge, over):
                handle.cancel()
            for task in (lag, *tasks):
                task.cancel()
            await asyncio.gather(lag, *tasks, return_exceptions=True)
        measured.over_at = monotonic()
        return measured

    async def _let_end(self, tasks: set[asyncio.Task[Any]]) -> None:
        left = {task for task in tasks if not task.done()}
        if left and not self.measured.aborted:
            # Ctrl-C ends the waiting as well.
            aborted = self._loop.create_task(self._aborted.wait())
            rest = self._loop.create_task(asyncio.wait(left, timeout=self._plan.grace_s))
            await asyncio.wait((aborted, rest), return_when=asyncio.FIRST_COMPLETED)
            aborted.cancel()
            rest.cancel()
            await asyncio.gather(aborted, rest, return_exceptions=True)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    async def _as_they_come(
        self,
        sessions: Iterator[Session],
        ahead: deque[Session],
        started_at: float,
        tasks: set[asyncio.Task[Any]],
    ) -> None:
        """Start each session at its time. Those to come are made ahead, while there is time:
        in a burst nothing is left to do but to send."""
        while True:
            session = ahead.popleft()
            due_at = started_at + session.at_s
            while len(ahead) < AHEAD and (not ahead or monotonic() < due_at - SPARE_S):
                ahead.append(next(sessions))
                await asyncio.sleep(0)
            if not await self._sleep_until(due_at):
                return
            tasks.add(self._loop.create_task(self._converse(session, due_at)))

    async def _one_after_the_other(self, sessions: Iterator[Session], begin_at: float) -> None:
        # What is asked before the run has begun would count nowhere, and take its time.
        await self._sleep_until(begin_at)
        while not self._stop.is_set():
            if not await self._converse(next(sessions), monotonic()):
                # A server that is away must not be asked ten thousand times a second.
                await asyncio.sleep(AFTER_ERROR_S)

    async def _sleep_until(self, at: float) -> bool:
        """Return whether the run still goes on at that time."""
        while (left := at - monotonic()) > 0 and not self._stop.is_set():
            try:
                async with asyncio.timeout(left):
                    await self._stop.wait()
            except TimeoutError:
                break
        return not self._stop.is_set()

    async def _converse(self, session: Session, due_at: float) -> bool:
        """Take a session's turns; return whether each was answered."""
        conversation = Conversation(self._ask)
        several = len(session.turns) > 1
        before = 0
        for number, turn in enumerate(session.turns):
            if number:
                due_at = monotonic() + turn.think_s
                if not await self._sleep_until(due_at):
                    break
            before += len(turn.new_ids)
            body = conversation.body(turn.new_ids, turn.output_tokens, wants_ids=several)
            asked = Asked(
                session.number, number, due_at, before, turn.output_tokens, session.intruder
            )
            answer = await self._request(asked, body)
            if not answer.ok:
                return False
            before += answer.tokens
            if number + 1 < len(session.turns):
                following: Turn = session.turns[number + 1]
                conversation.heard(answer, following.new_ids)
        self.measured.invented += conversation.invented
        return True

    async def _request(self, asked: Asked, body: bytes) -> Answer:
        measured = self.measured
        measured.asked.append(asked)
        if asked.due_at >= measured.began_at:
            self._counted += 1
            if self._plan.requests and self._counted >= self._plan.requests:
                self._stop.set()
        async with self._places:
            answer = asked.answer = Answer(monotonic())
            measured.in_flight += 1
            measured.in_flight_peak = max(measured.in_flight_peak, measured.in_flight)
            try:
                await self._client.request("POST", self._ask.path, body, answer)
            finally:
                measured.in_flight -= 1
        return answer

    async def _watch_lag(self, begin_at: float) -> None:
        await asyncio.sleep(max(0.0, begin_at - monotonic()))
        due = monotonic()
        while True:
            due += LAG_EVERY_S
            await asyncio.sleep(max(0.0, due - monotonic()))
            now = monotonic()
            self.measured.lags.append(max(0.0, now - due))
            due = max(due, now)
