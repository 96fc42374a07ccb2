"""``python -m chaos.run``: faults by the hundred on a cluster of real processes (``make chaos``).

Decides when the next fault comes (when the cluster is as before: mode ``one``; while others last:
mode ``many``), when it is enough, and the exit code: 1 for anything wrong, silent or leaked, and in
mode ``one`` for any failed request as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from baton.bench.conditions import conditions
from baton.cli.explain import time_line, told
from chaos import faults, report
from chaos.catalogue import FAKE, REAL, Item, Sizes, catalogue, probe
from chaos.client import Heard
from chaos.faults import Done, Fault, Stop
from chaos.judge import NEVER, Class, judge
from chaos.load import Judged, Load, references
from chaos.place import Place, place

AUDIT_EVERY = 10
READY_S = 40.0
CLIENTS = 5
#: Overlapping faults come this far apart, at most.
APART_S = 1.5

FAKE_SETTINGS = {
    "BATON_ENGINE_KIND": "fake",
    "BATON_FAKE_STEP_MS": "15",
    "BATON_FAKE_PREFILL_MS": "20",
    "BATON_LIMITS_PREFILL_CHUNK_TOKENS": "64",
    "BATON_LIMITS_PREFILL_AHEAD_MAX": "2",
    "BATON_ARENA_SIZE_MB": "1",
    "BATON_CHECK": "1",
}
REAL_SETTINGS = {
    "BATON_ENGINE_KIND": "torch",
    "BATON_LIMITS_PREFILL_CHUNK_TOKENS": "128",
    "BATON_ARENA_SIZE_MB": "220",
}


class Run:
    """One run of one mode on one cluster."""

    def __init__(self, there: Place, options: argparse.Namespace, out: Path) -> None:
        self.place = there
        self.options = options
        self.real: bool = options.real
        self.sizes: Sizes = REAL if self.real else FAKE
        self.points = {} if self.real else faults.points_of(self.sizes)
        self.done: list[Done] = []
        self.leaks: list[str] = []
        self.audits = 0
        self.evidence = out
        self.probes: list[Item] = []
        self._loose: set[asyncio.Task[Judged]] = set()
        """Clients of probes that are not waited for."""
        self.deadline_s = 120.0 if self.real else 60.0
        self.items = catalogue("m", self.sizes, options.seed)
        self.load = Load(
            there,
            self.items,
            options.seed,
            deadline_s=self.deadline_s,
            excuse=self._excuse,
            on_bad=self._on_bad,
        )
        self.began = time.monotonic()

    # --- the run --------------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        """References, faults, calm, last checks."""
        await self._ready(READY_S)
        say(f"asking {len(self.items)} items undisturbed")
        await references(self.place, self.items, self.deadline_s)
        self.began = time.monotonic()
        self.load.start(CLIENTS)
        only, skip = frozenset(self.options.only), frozenset(self.options.skip)
        planned = faults.plan(self.options.seed, only, skip)
        if self.options.mode == "one":
            await self._one_at_a_time(planned)
        else:
            await self._overlapping(planned)
        minutes = (time.monotonic() - self.began) / 60
        await self.load.stop()
        await self._ready(READY_S)
        await self._judge_probes()
        await self._audit()
        await self._nothing_held()
        return report.result(
            self.done,
            self.load.judged,
            self.leaks,
            {
                "title": f"{self._engine()}, mode {self.options.mode}",
                "mode": self.options.mode,
                "engine": "torch" if self.real else "fake",
                "seed": self.options.seed,
                "minutes": round(minutes, 1),
                "audits": self.audits,
                "clients": CLIENTS,
            },
        )

    def _engine(self) -> str:
        return "real model" if self.real else "fake engine"

    def _enough(self) -> bool:
        spent = (time.monotonic() - self.began) / 60
        return len(self.done) >= self.options.faults or spent >= self.options.minutes

    async def _one_at_a_time(self, planned: Iterator[Fault]) -> None:
        for fault in planned:
            if self._enough():
                return
            done = await self._strike(fault)
            words = await self._ready(READY_S)
            done.ready_at = time.monotonic()
            if words:
                done.trouble = f"not ready again: {words}"
            self._tell(done)
            if len(self.done) % AUDIT_EVERY == 0:
                await self._audit()

    async def _overlapping(self, planned: Iterator[Fault]) -> None:
        chance = random.Random(f"overlap {self.options.seed}")
        strikes: set[asyncio.Task[Done]] = set()
        for fault in planned:
            if self._enough():
                break
            task = asyncio.get_running_loop().create_task(self._strike(fault))
            strikes.add(task)
            await asyncio.sleep(chance.uniform(0.1, APART_S))
            if len(strikes) >= 4:
                ended, strikes = await asyncio.wait(strikes, return_when=asyncio.FIRST_COMPLETED)
                for each in ended:
                    self._tell(each.result())
            if len(self.done) % (3 * AUDIT_EVERY) == 0 and self.done:
                # A breath: what is left behind after all is told from what is under way.
                for each in await asyncio.gather(*strikes):
                    self._tell(each)
                strikes = set()
                await self._ready(READY_S)
                await self._audit()
        for each in await asyncio.gather(*strikes):
            self._tell(each)

    async def _strike(self, fault: Fault) -> Done:
        """Bring a request to the stage, inject the fault there, wait for the request's end."""
        item = probe("m", self.sizes, fault.number, self.options.seed)
        self.probes.append(item)
        stop, clients = await self._reach(fault, item)
        # On the list before it strikes: who breaks because of it is judged at once.
        done = Done(fault, time.monotonic(), reached=stop is not None)
        self.done.append(done)
        await faults.inject(self.place, done, stop or Stop())
        if self.options.mode == "one":
            await asyncio.gather(*clients)
        else:
            self._loose.update(clients)
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
        if self.real and fault.stage != "queued":
            heard, task = send(item)
            usual = self._usual_first_s()
            return await faults.come_to(fault.stage, heard, self.sizes, usual), [task]
        # Queued: more at once than prefill takes.
        crowd = [item, *self.items[:8]]
        tasks = [send(each)[1] for each in crowd]
        await asyncio.sleep(0.002 * (1 + fault.number % 8))
        return Stop(), tasks

    def _usual_first_s(self) -> float:
        firsts = [i.reference.first_s for i in self.items if i.reference and "seeded" in i.name]
        return sum(firsts) / len(firsts)

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
        """Nobody asks any more: nothing is held by anybody."""
        deadline = time.monotonic() + 10
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
                judged.judgement = judge(judged.heard, excused=self._excuse(judged.heard))
                if judged.judgement.what in (Class.WRONG, Class.GAP):
                    self._on_bad(judged)

    # --- judging --------------------------------------------------------------------------------

    def _excuse(self, heard: Heard) -> str:
        """Return why this connection could break through no fault of the cluster's, if it could."""
        now = time.monotonic()
        for done in self.done:
            over = done.ready_at or (done.mended_at + READY_S if done.mended_at else now)
            if done.at > (heard.ended_at or now) or over < heard.sent_at:
                continue
            if done.fault.kind in ("kill gateway", "freeze gateway"):
                return "its gateway died"
            if heard.through_proxy and done.fault.kind == "cut client":
                return "its line was cut"
        return ""

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
        self.evidence.mkdir(parents=True, exist_ok=True)
        record = self.place.record(heard.id) if heard.id else None
        lines = [
            f"{judged.judgement.what}: {judged.judgement.why}",
            f"item {heard.item.name}, sent {heard.sent_at:.3f}, ended {heard.ended_at:.3f}, "
            f"{len(heard.answer.ids)} tokens, error {heard.error}, broken {heard.broken}",
            *(
                f"fault {done.at:.3f}..{done.mended_at:.3f} {done.fault} on {done.victim}"
                for done in self.done[-8:]
            ),
        ]
        if heard.id:
            lines += told(heard.id, record, time_line(self.place.logs, heard.id))
        path = self.evidence / f"{len(list(self.evidence.glob('*.txt'))):03}-{heard.item.name}.txt"
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


def is_bad(run: dict[str, Any]) -> bool:
    """Whether anything happened that must not."""
    classes = run["classes"]
    never = sum(classes[str(each)] for each in NEVER) + len(run["leaked"])
    failed = classes["failed"] + len(run["never_ready"]) if run["mode"] == "one" else 0
    return bool(never + failed)


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    settings = REAL_SETTINGS if options.real else FAKE_SETTINGS
    evidence = options.evidence
    shutil.rmtree(evidence, ignore_errors=True)
    async with place(settings) as there:
        run = Run(there, options, evidence)
        try:
            found = await run.run()
            bad = is_bad(found)
        except BaseException:
            bad = True
            raise
        finally:
            if bad:
                evidence.mkdir(parents=True, exist_ok=True)
                shutil.copytree(there.logs, evidence / "logs", dirs_exist_ok=True)
    return found


def _keep_result(out: Path, found: dict[str, Any]) -> None:
    """The newest run of each engine and mode counts."""
    path = out / "chaos.json"
    runs = orjson.loads(path.read_bytes())["runs"] if path.exists() else {}
    runs[f"{found['engine']} {found['mode']}"] = found
    record = {"benchmark": "chaos", "runs": dict(sorted(runs.items()))}
    path.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    parts = ["# chaos"]
    for name, run in record["runs"].items():
        lines = "\n".join(f"- {key}: {value}" for key, value in run["conditions"].items())
        parts.append(f"## {name}\n\n{report.page([run])}\n\nConditions:\n\n{lines}")
    (out / "chaos.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def main() -> int:
    """Run, print, and put the result beside those of other runs in ``chaos.md`` and ``.json``."""
    parser = argparse.ArgumentParser(prog="chaos.run", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=("one", "many"), default="one")
    parser.add_argument("--real", action="store_true", help="the real model, not the fake engine")
    parser.add_argument("--only", nargs="*", default=[], help="targets or actions: decode, kill")
    parser.add_argument("--skip", nargs="*", default=[], help="targets or actions to leave out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="where results go")
    parser.add_argument("--evidence", type=Path, default=Path("build/chaos-evidence"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    places = ("out", "evidence")
    asked = {key: value for key, value in vars(options).items() if key not in places}
    facts = conditions() | {"asked_for": asked}
    found = asyncio.run(_run(options))
    facts["load_average_at_end"] = os.getloadavg()
    _keep_result(options.out, found | {"conditions": facts})
    text = report.page([found])
    say(f"\n{text}\n")
    for each in found["leaked"]:
        say(f"leaked: {each}")
    for each in found["never_ready"]:
        say(f"never ready: {each}")
    for each in found["bad"]:
        say(f"bad: {each}")
    return 1 if is_bad(found) else 0


if __name__ == "__main__":
    sys.exit(main())
