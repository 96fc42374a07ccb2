"""One cluster's share of a part: references, faults under load, calm, last checks.

Decides when the next fault comes (when the cluster is as before; while others last, if they may
overlap) and when it is enough.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cli.explain import time_line, told
from chaos import faults, report
from chaos.catalogue import Item, catalogue, probe, uncached
from chaos.excuse import excuse
from chaos.faults import Done, Fault, Stop
from chaos.heard import Heard
from chaos.judge import NEVER, Class, Judgement, judge
from chaos.load import Judged, Load, references
from chaos.parts import Part
from chaos.place import Place

AUDIT_EVERY = 25
READY_S = 90.0
#: Overlapping faults come this far apart, at most.
APART_S = 1.5
#: The longest window of a client that may come back, and the look for those that are over.
WINDOW_S = 25.0
KILLS = ("prefill", "decode", "router")
#: Requests in the hands of those that were killed, of each kind, until it is enough.
KILLS_HIT = 330
FULL_CLIENTS = 16
CALM_S = 15.0
UNCACHED = 90
#: What the ledger no longer knows, nobody can resume.
FORGETS = frozenset({"wipe ledger", "roll back ledger"})


@dataclass(frozen=True, slots=True)
class Share:
    """What one cluster does of a part."""

    part: Part
    mode: str
    seed: int
    number: int
    of: int
    faults: int
    minutes: float
    only: frozenset[str]
    skip: frozenset[str]
    evidence: Path


class Run:
    """One share on one cluster."""

    def __init__(self, there: Place, share: Share) -> None:
        self.place = there
        self.share = share
        self.part = share.part
        self.sizes = share.part.sizes
        self.points = {} if self.part.real else faults.points_of(self.sizes)
        self.done: list[Done] = []
        self.leaks: list[str] = []
        self.audits = 0
        self.note = ""
        self.over = False
        """Nobody asks any more."""
        self.probes: list[Item] = []
        self._loose: set[asyncio.Task[Judged]] = set()
        """Clients of probes that are not waited for."""
        self.deadline_s = 120.0 if self.part.real else 60.0
        seed = share.seed * 100 + share.number
        self.seed = seed
        kills = self.part.name == "kills"
        self.items = (
            uncached("m", self.sizes, UNCACHED, seed) if kills else catalogue("m", self.sizes, seed)
        )
        self.load = Load(
            there,
            self.items,
            seed,
            deadline_s=self.deadline_s,
            judge=self._judge,
            on_bad=self._on_bad,
            in_turn=kills,
        )
        self.began = time.monotonic()

    # --- the run --------------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        """Do all of it; return what was found."""
        await self._ready(READY_S)
        say(f"asking {len(self.items)} items undisturbed")
        await references(self.place, self.items, self.deadline_s)
        self.began = time.monotonic()
        match self.part.name:
            case "kills":
                await self._kills()
            case "overlapping":
                self.load.start(self.part.clients)
                await self._overlapping(self._plan())
            case _:
                self.load.start(self.part.clients)
                await self._one_at_a_time(self._plan())
        minutes = (time.monotonic() - self.began) / 60
        await self.load.stop()
        await self._ready(READY_S)
        await self._judge_probes()
        self._judge_broken()
        await self._audit()
        await self._nothing_held()
        facts = {
            "part": self.part.name,
            "title": self.part.title,
            "seed": self.share.seed,
            "minutes": round(minutes, 1),
            "audits": self.audits,
            "clients": self.part.clients,
            "note": self.note,
        }
        return report.slice_of(self.done, self.load.judged, self.leaks, facts)

    def _plan(self) -> Iterator[Fault]:
        """Yield this cluster's share of the faults: every so many-th."""
        share = self.share
        for fault in faults.plan(share.seed, share.only, share.skip):
            if fault.number % share.of == share.number:
                yield fault

    def _enough(self) -> bool:
        spent = (time.monotonic() - self.began) / 60
        return len(self.done) >= self.share.faults or spent >= self.share.minutes

    async def _one_at_a_time(self, planned: Iterator[Fault]) -> None:
        for fault in planned:
            if self._enough():
                return
            await self._ready_after(await self._strike(fault))

    async def _ready_after(self, done: Done) -> None:
        words = await self._ready(READY_S)
        done.ready_at = time.monotonic()
        if words:
            done.trouble = f"not ready again: {words}"
        self._tell(done)
        if len(self.done) % AUDIT_EVERY == 0:
            await self._audit()

    async def _overlapping(self, planned: Iterator[Fault]) -> None:
        chance = random.Random(f"overlap {self.seed}")
        strikes: set[asyncio.Task[Done]] = set()
        for fault in planned:
            if self._enough():
                break
            task = asyncio.get_running_loop().create_task(self._strike(fault))
            strikes.add(task)
            await asyncio.sleep(chance.uniform(0.1, APART_S))
            if len(strikes) >= 4:
                ended, strikes = await asyncio.wait(strikes, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    self._tell(task.result())
            if len(self.done) % AUDIT_EVERY == 0 and self.done:
                # A breath: what is left behind after all is told from what is under way.
                for done in await asyncio.gather(*strikes):
                    self._tell(done)
                strikes = set()
                await self._ready(READY_S)
                await self._audit()
        for done in await asyncio.gather(*strikes):
            self._tell(done)

    async def _strike(self, fault: Fault) -> Done:
        """Bring a request to the stage, inject the fault there, wait for the request's end."""
        item = probe("m", self.sizes, fault.number, self.seed)
        self.probes.append(item)
        stop, clients = await self._reach(fault, item)
        # On the list before it strikes: what is judged meanwhile may be its doing.
        done = Done(fault, time.monotonic(), reached=stop is not None)
        done.timed = stop is not None and stop.timed
        self.done.append(done)
        await faults.inject(self.place, done, stop or Stop())
        if self.part.name == "overlapping":
            self._loose.update(clients)
        else:
            await asyncio.gather(*clients)
        return done

    async def _reach(
        self, fault: Fault, item: Item
    ) -> tuple[Stop | None, list[asyncio.Task[Judged]]]:
        loop = asyncio.get_running_loop()
        proxied = fault.target == "client" or fault.number % 2 == 0

        def send(what: Item) -> tuple[Heard, asyncio.Task[Judged]]:
            heard = Heard(what)
            task = self.load.one(what, through_proxy=proxied, heard=heard)
            return heard, loop.create_task(task)

        point = self.points.get(fault.stage)
        if point is not None:
            faults.set_trap(self.place, point)
            _, task = send(item)
            return await faults.trapped(self.place, point), [task]
        if self.part.real and fault.stage != "queued":
            heard, task = send(item)
            usual = self._usual_first_s()
            return await faults.come_to(fault.stage, heard, self.sizes, usual), [task]
        # Queued: more at once than prefill takes.
        crowd = [item, *self.items[:8]]
        tasks = [send(each)[1] for each in crowd]
        await asyncio.sleep(0.002 * (1 + fault.number % 8))
        return Stop(timed=True), tasks

    def _usual_first_s(self) -> float:
        firsts = [i.reference.first_s for i in self.items if i.reference and "seeded" in i.name]
        return sum(firsts) / len(firsts)

    # --- kills under half load ------------------------------------------------------------------

    async def _kills(self) -> None:
        """Kill whoever has something in hand, each kind until enough of its clients felt it."""
        full = await self._calm(FULL_CLIENTS)
        half = await self._calm(self.part.clients)
        self.note = (
            f"{half:.0f} tokens/s with the {self.part.clients} clients of this part, undisturbed; "
            f"{full:.0f} with {FULL_CLIENTS}"
        )
        say(self.note)
        self.load.start(self.part.clients)
        self.began = time.monotonic()
        chance = random.Random(f"kills {self.seed}")
        number, hits = 0, dict.fromkeys(KILLS, 0)
        while not self._enough() and min(hits.values()) < KILLS_HIT:
            number += 1
            role = min(KILLS, key=lambda each: hits[each])
            await asyncio.sleep(chance.uniform(0.2, 1.0))
            if role == "prefill":
                await self._prefill_works()
            done = Done(Fault(number, role, "kill", "any", 0.0, number % 2), time.monotonic())
            self.done.append(done)
            await faults.inject(self.place, done, Stop())
            hits[role] += len(done.hit)
            await self._ready_after(done)
            await self._heard_since(done.at)

    async def _heard_since(self, at: float) -> None:
        """Wait until everybody who waited then has something new: no gap has two faults in it."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            latest = [max([one.sent_at, *one.arrivals[-1:]]) for one in self.load.asking.values()]
            if min(latest, default=deadline) > at:
                return
            await asyncio.sleep(0.02)

    async def _prefill_works(self) -> None:
        """Wait until one of them has two requests in hand (at most a second)."""
        for _ in range(100):
            owned = await asyncio.to_thread(self.place.owned)
            if any(peer.startswith("prefill") and len(had) > 1 for peer, had in owned.items()):
                return
            await asyncio.sleep(0.01)

    async def _calm(self, clients: int) -> float:
        """Let so many clients ask, undisturbed; their times are the usual ones; return tokens/s."""
        first, began = len(self.load.judged), time.monotonic()
        self.load.start(clients)
        await asyncio.sleep(CALM_S)
        await self.load.stop()
        heard = [judged.heard for judged in self.load.judged[first:]]
        tokens = sum(len(each.answer.ids) for each in heard)
        firsts = [each.arrivals[0] - each.sent_at for each in heard]
        gaps = [(each.arrivals[-1] - each.arrivals[0]) / (len(each.arrivals) - 1) for each in heard]
        for item in self.items:
            assert item.reference is not None
            item.reference.first_s = statistics.median(firsts)
            item.reference.gap_s = statistics.median(gaps)
        return tokens / (time.monotonic() - began)

    # --- between faults -------------------------------------------------------------------------

    async def _ready(self, limit_s: float) -> str:
        """Wait until the cluster is as at the start; return what is missing after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while words := await asyncio.to_thread(self.place.unready):
            if time.monotonic() > deadline:
                return words
            await asyncio.sleep(0.15)
        return ""

    async def _audit(self) -> None:
        self.audits += 1
        verdict = await asyncio.to_thread(self.place.audit)
        for finding in verdict.findings:
            what = finding.what
            self._leak(f"{what.kind}: {what.subject} ({what.text})")
        for words in verdict.unseen:
            self._leak(f"could not be looked at: {words}")

    async def _nothing_held(self) -> None:
        """Nobody asks any more: nothing is held by anybody, once the last window is over."""
        deadline = time.monotonic() + WINDOW_S + 10
        while True:
            sample = await asyncio.to_thread(self.place.sample)
            held = [
                f"{peer} holds {[each.request_id for each in found.requests]}, "
                f"{len(found.blocks)} blocks, {len(found.tickets)} tickets"
                for peer, found in sample.holdings.items()
                if found.requests or found.blocks or found.tickets or found.early or found.ends
            ]
            if not held or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.3)
        for words in held:
            self._leak(f"after the end: {words}")

    def _leak(self, words: str) -> None:
        """Note it, once: what stays is found by every audit."""
        if words not in self.leaks:
            self.leaks.append(words)
            say(f"LEAK {words}")

    async def _judge_probes(self) -> None:
        """Ask every probe again, undisturbed, and judge what was heard of it during the run."""
        if self._loose:
            await asyncio.gather(*self._loose)
        say(f"asking {len(self.probes)} probes again, undisturbed")
        await references(self.place, self.probes, self.deadline_s, at_once=8)
        mine = {id(item) for item in self.probes}
        for judged in self.load.judged:
            if id(judged.heard.item) in mine:
                judged.judgement = self._judge(judged.heard)
                if judged.judgement.what in (Class.WRONG, Class.GAP):
                    self._on_bad(judged)

    def _judge_broken(self) -> None:
        """Judge broken connections: whose they were is in logs, which are all written by now."""
        self.over = True
        for judged in self.load.judged:
            if judged.judgement.what is Class.BROKEN:
                judged.judgement = self._judge(judged.heard)
                self._on_bad(judged)

    # --- judging --------------------------------------------------------------------------------

    def _judge(self, heard: Heard) -> Judgement:
        during = self._during(heard)
        may_forget = any(done.fault.kind in FORGETS for done in during)
        if heard.broken and not self.over:
            excused = "to be judged when all is over"
        else:
            gateway = self.place.gateway_of(heard.id) if heard.broken and heard.id else ""
            excused = excuse(heard, during, gateway)
        return judge(heard, excused=excused, may_forget=may_forget)

    def _during(self, heard: Heard) -> list[Done]:
        """Return the faults that this client could notice."""
        now = time.monotonic()
        found = []
        for done in self.done:
            over = done.ready_at or (done.mended_at + READY_S if done.mended_at else now)
            if done.at <= (heard.ended_at or now) and over >= heard.sent_at:
                found.append(done)
        return found

    def _on_bad(self, judged: Judged) -> None:
        what = judged.judgement.what
        if what not in NEVER and what is not Class.FAILED:
            return
        heard = judged.heard
        say(f"{what.upper()} {heard.item.name} {heard.id}: {judged.judgement.why}")
        self._keep(judged)

    def _keep(self, judged: Judged) -> None:
        """Write down all that is known of a bad answer."""
        heard = judged.heard
        folder = self.share.evidence
        folder.mkdir(parents=True, exist_ok=True)
        record = self.place.record(heard.id) if heard.id else None
        lines = [
            f"{judged.judgement.what}: {judged.judgement.why}",
            f"item {heard.item.name}, sent {heard.sent_at:.3f}, ended {heard.ended_at:.3f}, "
            f"{len(heard.answer.ids)} tokens, status {heard.status}, error {heard.error}, "
            f"broken {heard.broken} {heard.trouble}, came back {heard.comebacks} times",
            *(
                f"fault {done.at:.3f}..{done.mended_at:.3f} {done.fault} on {done.victim}"
                for done in self.done[-8:]
            ),
        ]
        if heard.id:
            lines += told(heard.id, record, time_line(self.place.logs, heard.id))
        path = folder / f"{len(list(folder.glob('*.txt'))):03}-{heard.item.name}.txt"
        path.write_text("\n".join(lines) + "\n")

    def _tell(self, done: Done) -> None:
        fault = done.fault
        ready = f"{done.ready_at - done.mended_at:.1f} s" if done.ready_at else "-"
        say(
            f"{len(self.done):4} {fault.kind:14} {fault.stage:12} {done.victim:32} "
            f"{'' if done.reached else 'MISSED '}ready after {ready} {done.trouble}"
        )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
