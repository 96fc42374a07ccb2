"""Baton beside what a user would run instead: one client, one machine, one run.

Decides the method. The servers take turns, in another order each round, and every figure is the
median of the rounds; prompts are random and never the same twice. A server that takes long to start
is started once and frozen while others are measured; the rest start anew each round. The client
runs on the prefill side's core where the server is split, and anywhere where it is not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from baton.bench import peer_processes
from baton.bench.asker import Asker, Prompts, first_at, hang_up
from baton.bench.cluster import BenchError
from baton.bench.ends import undisturbed
from baton.bench.figures import gaps_within, table
from baton.bench.load.answer import Answer
from baton.bench.load.machine_load import others_cores, usage
from baton.bench.peer_figures import medians, rate, spread, tokens_per_piece, waited
from baton.bench.peer_servers import (
    CORES,
    Baton,
    Llama,
    PeerFiles,
    Server,
    Vllm,
    VllmSplit,
    make_files,
    programs,
    versions,
)

PROMPTS = (512, 1024, 2048)
STREAMS = (1, 4, 8, 16)
STEADY = 4
INTRUDER_TOKENS, EVERY_S = 2048, 3.0
_SHORT = 32
#: More than a steady stream gets in a window, within every server's context.
_ENDLESS = 4_000
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rounds: int
    prompts: int
    """Of each length."""
    tokens: int
    """Of each stream, where decoding is measured."""
    window_s: float
    """Of steady streams, alone and with intruders each."""


EFFORT = Effort(rounds=3, prompts=2, tokens=128, window_s=12.0)
QUICK = Effort(rounds=1, prompts=1, tokens=24, window_s=6.0)


def measure(effort: Effort) -> dict[str, object]:
    """Return every server's figures; a server that fails is left out with a reason."""
    seed = int.from_bytes(os.urandom(4)) << 16
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        llama = programs("PEERS_LLAMA_BIN", "llama-server", "llama-quantize")
        vllm = programs("PEERS_VLLM_BIN", "vllm", "vllm-router")
        servers, left_out = _servers(Path(folder), llama, vllm)
        runs: dict[str, list[dict[str, object]]] = {server.name: [] for server in servers}
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_rounds(servers, Prompts(seed), effort, runs, left_out))
        except KeyboardInterrupt:
            left_out["further rounds"] = "interrupted"
        finally:
            with undisturbed():
                for server in servers:
                    if server.running:
                        server.stop()
    return {
        "versions": versions(llama, vllm),
        "prompts_seed": seed,
        "left_out": left_out,
        "medians": {name: medians(found) for name, found in runs.items() if found},
        "runs": runs,
    }


def page(result: dict[str, object]) -> str:
    """Return both tables."""
    found, left_out, told = result["medians"], result["left_out"], result["versions"]
    assert isinstance(found, dict) and isinstance(left_out, dict) and isinstance(told, dict)
    speed, steady = [], []
    for name, figures in found.items():
        prefill, decode = figures["prefill"], figures["decode"]
        speed.append(
            (
                name,
                " / ".join(f"{prefill[str(length)]:,.0f}" for length in PROMPTS),
                " / ".join(f"{decode[str(count)]:.0f}" for count in STREAMS),
                f"{figures['start_s']:.1f}",
                f"{figures['memory_mb'] / 1024:.1f}",
                f"{figures['others_cores']:.2f}",
            )
        )
        alone, beside, ttft = figures["alone"], figures["with_intruders"], figures["intruders"]
        steady.append(
            (
                name,
                _gaps(alone["gap_ms"]),
                _gaps(beside["gap_ms"]),
                f"{beside['gap_ms']['p99'] / alone['gap_ms']['p99']:.2f}",
                f"{'>= ' if ttft['at_least'] else ''}{ttft['p50']:.2f}",
                f"{alone['tokens_per_s']:.0f} / {beside['tokens_per_s']:.0f}",
            )
        )
    lines = [
        table(
            (
                "server",
                f"prefill tok/s {' / '.join(map(str, PROMPTS))}",
                f"decode tok/s at {' / '.join(map(str, STREAMS))} streams",
                "start s",
                "memory GiB",
                "cores used by others",
            ),
            speed,
        ),
        "",
        f"{STEADY} steady streams, alone and with a {INTRUDER_TOKENS}-token prompt every "
        f"{EVERY_S:g} s:",
        "",
        table(
            (
                "server",
                "ITL alone p50/p99/p99.9/max ms",
                "ITL with intruders p50/p99/p99.9/max ms",
                "p99 ratio",
                "intruders' TTFT p50 s",
                "steady tok/s alone / with intruders",
            ),
            steady,
        ),
    ]
    if told:
        lines.append(f"\nPeers: {', '.join(f'{name} {told[name]}' for name in sorted(told))}.")
    lines += [f"\nLeft out: {name}: {why}." for name, why in left_out.items()]
    return "\n".join(lines)


def _gaps(figures: dict[str, float]) -> str:
    return " / ".join(f"{figures[name]:.1f}" for name in ("p50", "p99", "p999", "max"))


def _servers(
    scratch: Path, llama: Path | None, vllm: Path | None
) -> tuple[list[Server], dict[str, str]]:
    """Return the servers that can be had here, and why others cannot."""
    files = make_files(llama)
    servers: list[Server] = [
        Baton(scratch, "baton", {}),
        Baton(scratch, "baton-full-weights", {"BATON_ENGINE_WEIGHTS": "full"}),
    ]
    left_out: dict[str, str] = {}
    if llama is None:
        left_out["llama.cpp"] = "not installed (PEERS_LLAMA_BIN)"
    else:
        servers += _llamas(scratch, llama, files)
    if vllm is None:
        left_out["vllm"] = "not installed (PEERS_VLLM_BIN)"
    else:
        servers += [
            Vllm(scratch, vllm, files.folder),
            VllmSplit(scratch, vllm, files.folder),
        ]
    wanted = os.environ.get("PEERS_ONLY", "").split(",")
    return [server for server in servers if wanted == [""] or server.name in wanted], left_out


def _llamas(scratch: Path, llama: Path, files: PeerFiles) -> Iterator[Server]:
    assert files.bf16 is not None
    yield Llama(scratch, llama, "llama.cpp-bf16", files.bf16)
    yield Llama(scratch, llama, "llama.cpp-q4_1", files.q4_1)


def _turns(servers: Sequence[Server], number: int) -> list[Server]:
    """Return the order of a round.

    Those that take longest to start come first, so that one that does not work here shows early;
    each further round begins with the next one.
    """
    turned = [*reversed(servers)]
    shift = number % len(servers)
    return [*turned[shift:], *turned[:shift]]


async def _rounds(
    servers: Sequence[Server],
    prompts: Prompts,
    effort: Effort,
    runs: dict[str, list[dict[str, object]]],
    left_out: dict[str, str],
) -> None:
    """Measure each once a round and add what was found."""
    for number in range(effort.rounds):
        for server in _turns(servers, number):
            if server.name in left_out:
                continue
            began = time.monotonic()
            try:
                runs[server.name].append(await _turn(server, prompts, effort))
            except (BenchError, OSError) as error:
                left_out[server.name] = str(error)
                server.stop()
            seconds = time.monotonic() - began
            sys.stdout.write(f"{server.name}: {seconds:.0f} s {left_out.get(server.name, '')}\n")
            sys.stdout.flush()


async def _turn(server: Server, prompts: Prompts, effort: Effort) -> dict[str, object]:
    """Measure one server once."""
    fresh = not server.running
    if fresh:
        server.prepare()
        await server.start(prompts)
    else:
        server.thaw()
    asker = Asker(server.port, server.model)
    try:
        if fresh:
            await _warm_up(asker, prompts)
        server.settle()
        with _on_core(server.client_core):
            figures = await _measured(server, asker, prompts, effort)
    finally:
        asker.close()
    if server.keep:
        server.freeze()
    else:
        server.stop()
    return figures


async def _measured(
    server: Server, asker: Asker, prompts: Prompts, effort: Effort
) -> dict[str, object]:
    await asker.ask_all([prompts.fresh(_SHORT)], 8, _PATIENCE_S)
    pids = server.pids()
    began, before = time.monotonic(), usage(pids)
    prefill = {
        str(length): await _prefill(asker, prompts, length, effort.prompts) for length in PROMPTS
    }
    decode, pieces = {}, 1.0
    for count in STREAMS:
        asked = [prompts.fresh(_SHORT) for _ in range(count)]
        answers = await asker.ask_all(asked, effort.tokens, _PATIENCE_S)
        decode[str(count)] = round(rate(answers), 1)
        pieces = tokens_per_piece(answers)
    alone, _ = await _steady(asker, prompts, effort.window_s, pieces, intrude=False)
    beside, intruders = await _steady(asker, prompts, effort.window_s, pieces, intrude=True)
    others = others_cores(before, usage(pids), time.monotonic() - began)
    return {
        "prefill": prefill,
        "decode": decode,
        "tokens_per_piece": round(pieces, 3),
        "alone": alone,
        "with_intruders": beside,
        "intruders": intruders,
        "start_s": round(server.start_s, 2),
        "memory_mb": round(peer_processes.memory_mb(server.pids()), 1),
        "others_cores": round(others, 3),
        "niceness": peer_processes.niceness(server.pids()),
    }


async def _warm_up(asker: Asker, prompts: Prompts) -> None:
    """Let a server make what it makes when a shape comes for the first time."""
    for length in PROMPTS:
        await asker.ask_all([prompts.fresh(length)], 1, _PATIENCE_S)
    for count in STREAMS:
        await asker.ask_all([prompts.fresh(_SHORT) for _ in range(count)], 8, _PATIENCE_S)


async def _prefill(asker: Asker, prompts: Prompts, length: int, repeats: int) -> float:
    """Return tokens per second: all tokens by all waits for the first token, one by one."""
    seconds = 0.0
    for _ in range(repeats):
        (answer,) = await asker.ask_all([prompts.fresh(length)], 1, _PATIENCE_S)
        seconds += first_at(answer) - answer.sent_at
    return round(repeats * length / seconds, 1)


async def _steady(
    asker: Asker, prompts: Prompts, window_s: float, pieces: float, *, intrude: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """Return what steady streams saw in a window, and how intruders fared.

    Intruders come on time, whatever became of those before. Streams start anew for each window, so
    that their contexts grow alike with intruders and without.
    """
    steady = [asker.send(prompts.fresh(_SHORT), _ENDLESS) for _ in range(STEADY)]
    intruders: list[tuple[Answer, asyncio.Task[None]]] = []
    await _all_begun([answer for answer, _ in steady])
    await asyncio.sleep(1.0)
    begin = time.monotonic()
    end = begin + window_s
    while (now := time.monotonic()) < end:
        due = begin + len(intruders) * EVERY_S if intrude else end
        if now >= due:
            intruders.append(asker.send(prompts.fresh(INTRUDER_TOKENS), 1))
        else:
            await asyncio.sleep(min(due, end) - now)
    early = [answer for answer, task in steady if task.done()]
    await hang_up([task for _, task in (*steady, *intruders)])
    if early:
        raise BenchError(f"a steady stream ended early: {early[0].error}")
    if failed := [answer.error for answer, _ in intruders if answer.error]:
        raise BenchError(f"an intruder failed: {failed[0]}")
    await asyncio.sleep(1.0)  # the server notices that its clients went away
    arrivals = [answer.arrivals for answer, _ in steady]
    counted = sum(begin < at <= end for stream in arrivals for at in stream)
    waits = waited(
        [answer.sent_at for answer, _ in intruders],
        [first_at(answer) if answer.done else None for answer, _ in intruders],
        end,
    )
    figures: dict[str, object] = {
        "gap_ms": spread(gaps_within(arrivals, begin, end)),
        "tokens_per_s": round(counted * pieces / window_s, 1),
    }
    return figures, dict(waits)


async def _all_begun(answers: Sequence[Answer]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not all(answer.arrivals for answer in answers):
        if time.monotonic() > deadline or any(answer.error for answer in answers):
            raise BenchError(f"a steady stream did not begin: {answers[0].error}")
        await asyncio.sleep(0.05)


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Run this process, the client, on one core; afterwards on all again."""
    os.sched_setaffinity(0, CORES if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)
