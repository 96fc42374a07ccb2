"""Faults: what is done to whom, at which stage of a request, for how long.

Decides the plan from a seed, and how each fault is done and undone. A stage is seen to be reached
where the fake engine can be held there, or by the tokens that came. Where a request is queued, and
how far the real model's prefill is, is a matter of time: then the fault is about there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.processes import ProcessName, name_of
from baton.cli.reports import Registered
from chaos import links
from chaos.catalogue import Sizes
from chaos.heard import Heard
from chaos.place import Place

ROLES = ("prefill", "decode", "router", "gateway")
ACTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ROLES, ("kill", "freeze", "term", "restart")),
    "ledger": ("kill", "freeze", "wipe", "roll back", "stall", "cut"),
    "client": ("cut", "stall"),
    "links": ("cut", "swallow", "garble"),
}
STAGES = (
    "queued",
    "ticketed",
    "first chunk",
    "last chunk",
    "committed",
    "first step",
    "mid decode",
    "finishing",
)
SECONDS = (0.2, 0.5, 1.0, 2.5, 4.0, 6.0)
REACH_S = 6.0
_LOOK_S = 0.004
#: A process that was asked to end has ended by then, on any machine.
_ENDS_S = 60.0
#: How far into the time to the first token a stage of the real model's prefill lies.
_SHARES = {"queued": 0.0, "ticketed": 0.1, "first chunk": 0.3, "last chunk": 0.85}


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the plan."""

    number: int
    target: str
    action: str
    stage: str
    seconds: float
    """Of a freeze or stall; until the restart of a killed ledger."""
    instance: int
    """Which of two, where the request does not say."""

    @property
    def kind(self) -> str:
        return f"{self.action} {self.target}"


def plan(
    seed: int, only: frozenset[str] = frozenset(), skip: frozenset[str] = frozenset()
) -> Iterator[Fault]:
    """Yield faults without end: every kind at every stage once, in random order, and again.

    ``only`` and ``skip`` hold targets, actions, and kinds ("kill decode")."""
    chance = random.Random(f"faults {seed}")
    pairs = [(t, a, {t, a, f"{a} {t}"}) for t, actions in ACTIONS.items() for a in actions]
    wanted = [(t, a) for t, a, names in pairs if (not only or names & only) and not names & skip]
    cells = [(t, a, s) for t, a in wanted for s in STAGES]
    number = 0
    while True:
        chance.shuffle(cells)
        for target, action, stage in cells:
            number += 1
            yield Fault(number, target, action, stage, chance.choice(SECONDS), chance.randrange(2))


@dataclass(slots=True)
class Done:
    """A fault that was injected."""

    fault: Fault
    at: float
    """When it struck; until then, when it was planned to."""
    victim: str = ""
    """The process, as it is named everywhere."""
    reached: bool = True
    timed: bool = False
    """The stage was waited for by the clock, and not seen."""
    hit: frozenset[str] = frozenset()
    """Requests that the ledger's index gave to the victim at that moment."""
    mended_at: float = 0.0
    ready_at: float = 0.0
    trouble: str = ""
    held_s: float = 0.0
    """How long the engine was held for us: no fault of the cluster's."""


@dataclass(slots=True)
class Stop:
    """A stage that was reached: who stands there, and with which request."""

    pid: int = 0
    request_id: str = ""
    timed: bool = False
    marks: list[Path] = field(default_factory=list)

    def let_go(self) -> None:
        for mark in self.marks:
            mark.unlink(missing_ok=True)


def points_of(sizes: Sizes) -> dict[str, str]:
    """Return the fake engine's stop point of each stage that has one."""
    return {
        "ticketed": "P.before_write",
        "first chunk": "P.first_chunk",
        "last chunk": "P.last_chunk",
        "committed": "D.before_first_step",
        "first step": "D.step:2",
        "mid decode": f"D.step:{sizes.some // 2}",
        "finishing": f"D.step:{sizes.some - 1}",
    }


def set_trap(place: Place, point: str) -> None:
    """Hold the next one who reaches ``point``."""
    (place.stops / f"{point}.reached").unlink(missing_ok=True)
    fresh = place.stops / ".trap"
    fresh.write_text("hold")
    fresh.replace(place.stops / point)


async def trapped(place: Place, point: str) -> Stop | None:
    """Wait until somebody is held at ``point``; ``None``: nobody came in time."""
    mark = place.stops / f"{point}.reached"
    deadline = time.monotonic() + REACH_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid, request_id = mark.read_text().split()
            return Stop(int(pid), request_id, marks=[mark])
        await asyncio.sleep(_LOOK_S)
    (place.stops / point).unlink(missing_ok=True)
    mark.unlink(missing_ok=True)
    return None


async def come_to(stage: str, heard: Heard, sizes: Sizes, first_s: float) -> Stop | None:
    """Wait until the real model is at ``stage`` of that request, or about there."""
    share = _SHARES.get(stage)
    if share is not None:
        await asyncio.sleep(share * first_s)
        # With its first token there it is beyond all of these.
        return None if heard.answer.ids else Stop(request_id=heard.id, timed=True)
    wanted = {
        "committed": 1,
        "first step": 2,
        "mid decode": sizes.some // 2,
        "finishing": sizes.some - 1,
    }[stage]
    deadline = time.monotonic() + REACH_S
    while len(heard.answer.ids) < wanted:
        if time.monotonic() > deadline or heard.ended_at:
            return None
        await asyncio.sleep(_LOOK_S)
    return Stop(request_id=heard.id)


async def inject(place: Place, done: Done, stop: Stop) -> None:
    """Do it and undo it; returns when nothing is held, frozen or cut by us any more."""
    try:
        if done.fault.target in ROLES:
            await _to_worker(place, done, stop)
        elif done.fault.target == "ledger":
            await _to_ledger(place, done, stop)
        elif done.fault.target == "links":
            await _to_links(place, done, stop)
        else:
            await _to_clients(place, done, stop)
    finally:
        stop.let_go()
        done.mended_at = time.monotonic()


async def _to_worker(place: Place, done: Done, stop: Stop) -> None:
    fault, began = done.fault, time.monotonic()
    found, done.hit = await asyncio.to_thread(_victim, place, fault.target, fault.instance, stop)
    process = name_of(found.member.pid) if found is not None else None
    if process is None or found is None:
        done.reached = False
        return
    done.victim, name = str(found.member.peer), found.member.peer.worker_id
    done.at = time.monotonic()
    done.held_s = done.at - began if stop.marks else 0.0
    match fault.action:
        case "kill":
            process.send(signal.SIGKILL)
            stop.let_go()
        case "freeze":
            process.send(signal.SIGSTOP)
            stop.let_go()
            await asyncio.sleep(fault.seconds)
            process.send(signal.SIGCONT)
        case "term":
            process.send(signal.SIGTERM)
            stop.let_go()
            await _ended(process)
            await asyncio.to_thread(_start_again, place, name)
        case "restart":
            # As `baton restart` asks for it; whoever restarts ended processes starts the successor.
            process.send(signal.SIGUSR2)
            stop.let_go()
            await _ended(process)


def _victim(
    place: Place, role: str, instance: int, stop: Stop
) -> tuple[Registered | None, frozenset[str]]:
    """Return the one that has the held request, else the busier one, and all that it has."""
    registered, owned = place.registered(), place.owned()
    record = place.record(stop.request_id) if stop.request_id else None
    owner = record.owners.get(role) if record is not None else None
    both = [
        registered[n] for n in (f"{role}-{instance}", f"{role}-{1 - instance}") if n in registered
    ]
    if owner is not None:
        both = [each for each in both if each.member.peer.worker_id == owner.worker_id]
    if not both:
        return None, frozenset()
    found = max(both, key=lambda each: len(owned[str(each.member.peer)]))
    return found, frozenset(owned[str(found.member.peer)])


async def _ended(process: ProcessName) -> None:
    deadline = time.monotonic() + _ENDS_S
    while process.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _start_again(place: Place, name: str) -> None:
    deadline = time.monotonic() + _ENDS_S
    while place.state(name) not in {"EXITED", "STOPPED", "FATAL"}:
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    place.start(name)


async def _to_ledger(place: Place, done: Done, stop: Stop) -> None:
    if done.fault.action in {"stall", "cut"}:
        await _to_ledger_in_turn(place, done, stop)
        return
    # There is one server: while it is down, or its files are exchanged, it cannot be frozen too.
    async with place.server_turn:
        await _to_ledger_in_turn(place, done, stop)


async def _to_ledger_in_turn(place: Place, done: Done, stop: Stop) -> None:
    fault, done.at = done.fault, time.monotonic()
    match fault.action:
        case "kill":
            await asyncio.to_thread(place.server.kill)
            stop.let_go()
            await asyncio.sleep(min(fault.seconds, 2.5))
            await asyncio.to_thread(place.server.start)
        case "freeze":
            place.server.freeze()
            stop.let_go()
            await asyncio.sleep(fault.seconds)
            place.server.thaw()
        case "wipe":
            await asyncio.to_thread(place.wipe_ledger)
            stop.let_go()
        case "roll back":
            copy = await asyncio.to_thread(place.keep_ledger)
            stop.let_go()
            await asyncio.sleep(min(fault.seconds, 1.0))
            done.at = time.monotonic()
            await asyncio.to_thread(place.roll_back_ledger, copy)
        case "stall":
            place.ledger_proxy.hold()
            stop.let_go()
            await asyncio.sleep(fault.seconds)
            place.ledger_proxy.let_go()
        case "cut":
            place.ledger_proxy.cut()
            stop.let_go()


async def _to_links(place: Place, done: Done, stop: Stop) -> None:
    """To all connections of one process, whoever dialled them; the processes live on."""
    fault = done.fault
    role = ROLES[fault.number % len(ROLES)]
    found, done.hit = await asyncio.to_thread(_victim, place, role, fault.instance, stop)
    if found is None:
        done.reached = False
        return
    done.victim = str(found.member.peer)
    pids = {name: one.member.pid for name, one in place.registered().items()}
    with links.connections(place.cluster.run_dir, pids, found.member.peer.worker_id) as some:
        done.at = time.monotonic()
        match fault.action:
            case "cut":
                links.cut(some)
            case "swallow":
                stop.let_go()
                await asyncio.to_thread(links.swallow, some)
            case "garble":
                links.garble(some, random.Random(fault.number))
    stop.let_go()
    done.reached = done.reached and bool(some)


async def _to_clients(place: Place, done: Done, stop: Stop) -> None:
    fault, done.at = done.fault, time.monotonic()
    if fault.action == "cut":
        place.client_proxy.cut()
        stop.let_go()
        return
    place.client_proxy.hold()
    stop.let_go()
    await asyncio.sleep(fault.seconds)
    place.client_proxy.let_go()
