"""Two links joined by a bad wire under a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from baton.core.limits import Limits
from baton.sim.clock import VirtualClock
from baton.wire.frames import Frame, Kind
from baton.wire.link import Link


@dataclass
class Weather:
    """What the wire does to each frame; a probability each, times in seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    refuse: float = 0.0
    delay_s: float = 0.001
    jitter_s: float = 0.0
    """More than the time between two frames reorders them."""


CALM = Weather()


class Side:
    """One link with the little shell it needs."""

    def __init__(self, pair: Pair, source: int, target: int, limits: Limits) -> None:
        self.pair = pair
        self.link = Link(source, target, limits, pair.clock.now())
        self.other: Side
        self.delivered: list[bytes] = []
        self.frames: list[Frame] = []
        """Every frame that was put, lost ones included."""
        self.running = True
        self._armed: float | None = None

    def send(self, body: bytes) -> None:
        self.link.send(body)
        self.flush()

    def flush(self) -> None:
        clock, random, weather = self.pair.clock, self.pair.random, self.pair.weather
        while (frame := self.link.next_frame(clock.now())) is not None:
            if random.random() < weather.refuse:
                self.link.refused(frame, clock.now())
                break
            self.frames.append(frame)
            copies = 0 if random.random() < weather.loss else 1
            copies += random.random() < weather.duplicate
            for _ in range(copies):
                delay = weather.delay_s + random.uniform(0, weather.jitter_s)
                clock.call_later(delay, partial(self.other.take, frame))
        self.link.check()
        self.arm()

    def take(self, frame: Frame) -> None:
        if not self.running:
            self.pair.clock.call_later(0.01, lambda: self.take(frame))
            return
        for seq, body in self.link.on_frame(frame, self.pair.clock.now()):
            self.delivered.append(body)
            self.link.handled(seq, self.pair.clock.now())
        self.flush()

    def arm(self) -> None:
        due = self.link.deadline()
        if due is not None and (self._armed is None or due < self._armed):
            self._armed = due
            self.pair.clock.call_at(due, lambda: self.wake(due))

    def wake(self, due: float) -> None:
        if self._armed != due:
            return
        if not self.running:
            self.pair.clock.call_later(0.01, lambda: self.wake(due))
            return
        self._armed = None
        self.link.tick(self.pair.clock.now())
        self.flush()


class Pair:
    """Both sides, the wire between them and the time they live in."""

    def __init__(self, seed: int = 0, limits: Limits | None = None) -> None:
        self.clock = VirtualClock(seed)
        self.random: Random = self.clock.random
        self.weather = CALM
        limits = limits or Limits()
        self.a = Side(self, 1, 2, limits)
        self.b = Side(self, 2, 1, limits)
        self.a.other, self.b.other = self.b, self.a
        self.a.flush()
        self.b.flush()

    def count(self, kind: Kind) -> int:
        return sum(frame.kind is kind for side in (self.a, self.b) for frame in side.frames)
