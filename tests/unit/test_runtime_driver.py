"""The driver: order of events and commands, one timer, one crash barrier."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import orjson
import pytest
import structlog

from baton.core.events import TimePassed
from baton.core.ids import Peer
from baton.ports.driving import CallLedger, Exit, LedgerAnswered, Measure, Note, Send
from baton.ports.ledger import LeaseLost, ReleaseLease, Unavailable
from baton.runtime import logs
from baton.runtime.driver import Driver
from baton.runtime.engine_thread import EngineThread
from baton.wire.messages import ReadReport
from support.runtime_fakes import (
    HandClock,
    HeldLedger,
    RecordedTransport,
    ScriptedMachine,
    metrics,
)

ME = Peer("decode-0", 7)
DEADLINE_S = 5.0


@dataclass
class Rig:
    """A driver and everything it touches."""

    machine: ScriptedMachine
    stream: io.BytesIO
    clock: HandClock = field(default_factory=HandClock)
    transport: RecordedTransport = field(default_factory=RecordedTransport)
    ledger: HeldLedger = field(default_factory=HeldLedger)
    ended: list[tuple[int, str]] = field(default_factory=list)
    crashed: list[tuple[BaseException, str]] = field(default_factory=list)
    done: list[object] = field(default_factory=list)

    def driver(self, check: bool = False) -> Driver:
        self.metrics = metrics()
        self.made = Driver(
            self.machine,
            transport=self.transport,
            ledger=self.ledger,
            metrics=self.metrics,
            log=logs.configure("info", stream=self.stream),
            clock=self.clock,
            executors={str: self.do},
            end=lambda code, reason: self.ended.append((code, reason)),
            crash=lambda error, during: self.crashed.append((error, during)),
            check=check,
        )
        return self.made

    def do(self, command: str) -> None:
        """Execute the service's own command: feeding from within is what executors do."""
        self.done.append(command)
        if command.startswith("feed "):
            self.made.feed(command.removeprefix("feed "))


Make = Callable[[Callable[[object], Sequence[object]]], Rig]


@pytest.fixture
def rig() -> Iterator[Make]:
    """Make rigs; logging is put back afterwards."""
    yield lambda script: Rig(ScriptedMachine(script), io.BytesIO())
    structlog.reset_defaults()


def test_commands_before_the_next_event(rig: Make) -> None:
    """An event fed while another is handled waits until all its commands are executed."""
    answers = {"one": ["feed two", "after"], "two": ["feed three"], "three": ["end"]}
    made = rig(lambda event: answers[str(event)])

    async def main() -> None:
        made.driver().feed("one")

    asyncio.run(main())
    assert made.machine.seen == ["one", "two", "three"]
    assert made.done == ["feed two", "after", "feed three", "end"]
    assert not made.crashed


def test_shared_commands(rig: Make) -> None:
    """Send, CallLedger, Note and Measure reach transport, ledger, log and metrics."""
    op = ReleaseLease(ME)
    message = ReadReport("status", 1)
    commands = [
        Send(ME, message),
        CallLedger(op),
        Note("sequence_joined", {"epoch": 2}, "warning"),
        Measure("preemptions_total", 3),
    ]
    made = rig(lambda event: commands if event == "go" else [])

    async def main() -> None:
        made.driver().feed("go")
        made.ledger.calls[0][1](LeaseLost("x"))
        made.ledger.calls[0][1](Unavailable("gone"))

    asyncio.run(main())
    assert made.transport.sent == [(ME, message)]
    assert made.machine.seen[1:] == [
        LedgerAnswered(op, LeaseLost("x")),
        LedgerAnswered(op, Unavailable("gone")),
    ]
    line = orjson.loads(made.stream.getvalue())
    assert (line["event"], line["epoch"], line["level"]) == ("sequence_joined", 2, "warning")
    text = made.metrics.render().decode()
    assert 'baton_preemptions_total{model_name="tiny",role="decode",worker="decode-0"} 3.0' in text
    assert 'baton_ledger_calls_total{model_name="tiny",op="ReleaseLease"' in text
    assert 'baton_ledger_unavailable_total{model_name="tiny",op="ReleaseLease"' in text


def test_what_is_told_comes_after_what_is_done(rig: Make) -> None:
    """No message or event waits for a log line; the lines keep their order, with the metrics'."""
    answers = {
        "one": [Note("first", {}), "feed two", Measure("preemptions_total", 1), "after"],
        "two": [Note("second", {}), "end"],
    }
    made = rig(lambda event: answers[str(event)])
    lines: list[int] = []

    async def main() -> None:
        driver = made.driver()
        done = made.do
        driver._executors[str] = lambda command: (
            lines.append(made.stream.getvalue().count(b"\n")),
            done(command),
        )
        driver.feed("one")

    asyncio.run(main())
    assert made.done == ["feed two", "after", "end"] and lines == [0, 0, 0]
    told = [orjson.loads(line)["event"] for line in made.stream.getvalue().splitlines()]
    assert told == ["first", "second"]
    assert "baton_preemptions_total" in made.metrics.render().decode()


def test_a_bug_does_not_swallow_what_led_to_it(rig: Make) -> None:
    """Log lines of what was done before come out before the process ends."""
    made = rig(lambda event: [Note("first", {}), object()])

    async def main() -> None:
        made.driver().feed("go")

    asyncio.run(main())
    assert len(made.crashed) == 1
    assert orjson.loads(made.stream.getvalue())["event"] == "first"


def test_what_cannot_be_told_is_named_and_hides_nothing(rig: Make) -> None:
    """A bug may be in what is told itself: the lines after it come out, and the trace of the error
    says what is missing."""
    lines = [
        Note("first", {}),
        Measure("no_such_metric", 1),
        Note("second", {}, "no_such_level"),
        Note("third", {}),
    ]
    made = rig(lambda event: [*lines, object()])

    async def main() -> None:
        made.driver().feed("go")

    asyncio.run(main())
    told = [orjson.loads(line)["event"] for line in made.stream.getvalue().splitlines()]
    assert told == ["first", "third"]
    ((error, _),) = made.crashed
    assert isinstance(error, AssertionError) and "nobody executes" in str(error)
    assert [note.split(": ")[1:3] for note in error.__notes__] == [
        ["no_such_metric", "AssertionError"],
        ["second", "AttributeError"],
    ]


def test_a_line_that_cannot_be_told_is_a_bug_and_the_rest_is_told(rig: Make) -> None:
    """It ends the process as every bug does; what was done after it is told first."""
    made = rig(lambda event: [Measure("no_such_metric", 1), Note("after", {})])

    async def main() -> None:
        made.driver().feed("go")

    asyncio.run(main())
    ((error, _),) = made.crashed
    assert "no_such_metric" in str(error)
    assert orjson.loads(made.stream.getvalue())["event"] == "after"


def test_a_log_that_is_gone_does_not_hide_the_bug(rig: Make) -> None:
    """Nobody reads it: the process ends all the same, for the reason it has."""
    made = rig(lambda event: [Note("first", {}), object()])
    made.stream.close()

    async def main() -> None:
        made.driver().feed("go")

    asyncio.run(main())
    ((error, _),) = made.crashed
    assert isinstance(error, AssertionError)
    (note,) = error.__notes__
    assert note.startswith("not told before: first: ValueError")


def test_exit_is_the_last_event(rig: Make) -> None:
    """After Exit the commands beside it are executed, and no further event is handled."""
    made = rig(lambda event: ["feed late", Exit(0, "drained"), "beside"])

    async def main() -> None:
        driver = made.driver()
        driver.feed("go")
        driver.feed("later")

    asyncio.run(main())
    assert made.ended == [(0, "drained")]
    assert made.machine.seen == ["go"]
    assert made.done == ["feed late", "beside"]


@pytest.mark.parametrize("kind", ["raise", "unknown command", "broken invariant"])
def test_a_bug_ends_the_process(rig: Make, kind: str) -> None:
    """Whatever raises in machine, executor or check goes to the crash barrier, once."""

    def script(event: object) -> Sequence[object]:
        if kind == "raise":
            raise KeyError("nothing")
        return [object()] if kind == "unknown command" else []

    made = rig(script)
    made.machine.broken = kind == "broken invariant"

    async def main() -> None:
        driver = made.driver(check=True)
        driver.feed("go")
        driver.feed("again")

    asyncio.run(main())
    ((error, during),) = made.crashed
    assert isinstance(error, KeyError if kind == "raise" else AssertionError)
    assert during == "str"
    assert made.machine.seen == ["go"]


def test_one_timer_follows_the_deadline(rig: Make) -> None:
    """The machine hears TimePassed when its deadline is reached, and not before."""
    made = rig(lambda event: [])

    async def main() -> None:
        reached = asyncio.Event()

        def script(event: object) -> Sequence[object]:
            if isinstance(event, TimePassed):
                made.machine.due = None
                reached.set()
            elif event == "later":
                made.machine.due = made.clock.time + 1000.0
            elif event == "soon":
                made.machine.due = made.clock.time
            return []

        made.machine.script = script
        driver = made.driver()
        driver.feed("later")
        driver.feed("soon")
        await asyncio.wait_for(reached.wait(), DEADLINE_S)
        driver.stop()

    asyncio.run(main())
    assert made.machine.seen == ["later", "soon", TimePassed()]


def test_a_deadline_left_in_the_past_does_not_spin(rig: Make) -> None:
    """A machine that does not move its deadline is asked again at a bounded pace."""
    made = rig(lambda event: [])
    made.machine.due = 0.0

    async def main() -> float:
        enough = asyncio.Event()
        loop = asyncio.get_running_loop()

        def script(event: object) -> Sequence[object]:
            if len(made.machine.seen) == 20:
                enough.set()
            return []

        made.machine.script = script
        driver = made.driver()
        started = loop.time()
        driver.feed("go")
        await asyncio.wait_for(enough.wait(), DEADLINE_S)
        driver.stop()
        return loop.time() - started

    assert asyncio.run(main()) >= 0.015


def test_engine_thread_feeds_results_in_order() -> None:
    """Work runs one after the other off the loop, and its results arrive in order."""
    crashed: list[BaseException] = []

    async def main() -> list[object]:
        got: list[object] = []
        last = asyncio.Event()

        def feed(event: object) -> None:
            got.append(event)
            if event == 3:
                last.set()

        thread = EngineThread(feed, lambda error, _: crashed.append(error), HandClock())
        for number in (1, 2, 3):
            thread.submit(lambda number=number: number)  # type: ignore[misc]
        await asyncio.wait_for(last.wait(), DEADLINE_S)
        assert thread.in_flight() is None
        assert await thread.stop(DEADLINE_S)
        return got

    assert asyncio.run(main()) == [1, 2, 3]
    assert not crashed


def test_engine_thread_tells_while_the_work_goes_on() -> None:
    """An event of work that is not over arrives while it runs."""

    async def main() -> list[object]:
        got: list[object] = []
        last, heard = asyncio.Event(), threading.Event()

        def feed(event: object) -> None:
            got.append(event)
            (heard if event == "stored" else last).set()

        thread = EngineThread(feed, lambda error, _: None, HandClock())

        def work() -> bool:
            thread.tell("stored")
            return heard.wait(DEADLINE_S)

        thread.submit(work)
        await asyncio.wait_for(last.wait(), DEADLINE_S)
        assert await thread.stop(DEADLINE_S)
        return got

    assert asyncio.run(main()) == ["stored", True]


def test_engine_thread_hands_errors_to_the_barrier() -> None:
    """An error that the service did not turn into an event is a bug of this process."""

    async def main() -> BaseException:
        crash: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        thread = EngineThread(lambda _: None, lambda error, _: crash.set_result(error), HandClock())
        thread.submit(lambda: 1 // 0)
        return await asyncio.wait_for(crash, DEADLINE_S)

    assert isinstance(asyncio.run(main()), ZeroDivisionError)


def test_age_of_the_step_in_flight() -> None:
    """Number and age of the work that runs now can be asked for while it runs."""

    async def main() -> tuple[int, float] | None:
        release, running = threading.Event(), threading.Event()

        def step() -> None:
            running.set()
            release.wait(DEADLINE_S)

        clock = HandClock()
        thread = EngineThread(lambda _: None, lambda error, _: None, clock)
        thread.submit(step)
        assert await asyncio.to_thread(running.wait, DEADLINE_S)
        clock.time += 3.0
        flight = thread.in_flight()
        release.set()
        assert await thread.stop(DEADLINE_S)
        return flight

    assert asyncio.run(main()) == (1, 3.0)
