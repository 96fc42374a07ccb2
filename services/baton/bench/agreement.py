"""Whether `baton bench` sees what an independent client sees: `vllm bench serve`, on one cluster.

Decides the method. Both put the same closed loop on the same running cluster, in turn, round after
round, another one first each time. Prompts come from one generator and are never the same twice,
but for each client's first one: the other client warms up with it, so ours asks it before as well.
Figures are the medians of the rounds. Both count from the first sending to the last answer's end,
and both take an ITL between two events of a stream. Both go before who computes on their core, and
their core is the gateway's: on decode's, one that needs less would take its steps' time.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import orjson

from baton.bench.cluster import BenchCluster, BenchError, bench_cluster
from baton.bench.figures import table
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.asking import AskPlan, Conversation, PromptForm
from baton.bench.load.baton_target import conditions_of
from baton.bench.load.generator import LoadPlan
from baton.bench.load.running import RunPlan, Target, run_blocking
from baton.bench.load.workload import Workload, WorkloadPlan
from baton.runtime.config import load
from baton.runtime.dirs import cache_dir
from baton.runtime.model import model_folder
from baton.runtime.slices import wake_first

#: Of both figures of a row, so far apart they may be.
BOUNDS = {"requests/s": 0.03, "output tokens/s": 0.03, "TTFT": 0.05, "ITL": 0.05}
NAMES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "TPOT p50", "end to end p50")


@dataclass(frozen=True, slots=True)
class Load:
    """What both clients ask for."""

    prompt_tokens: int = 256
    output_tokens: int = 64
    streams: int = 2
    requests: int = 100
    """A hundred, so that both ways of telling a p99 (nearest rank, interpolated) mean the same."""


#: The fake engine paces its steps by the clock, so that a busy machine blurs less. Its tokens are
#: bytes: a prompt of so many words fits one chunk.
PACED = Load(prompt_tokens=24, output_tokens=32)
#: The other client sends text: both have it tokenized.
ASK = AskPlan(form=PromptForm.TEXT)
#: Of one run of the other client: its start takes half a minute.
PATIENCE_S = 900.0


def measure(*, rounds: int, requests: int) -> dict[str, object]:
    """Return both clients' figures of every round.

    Raises:
        BenchError: there is no vLLM, or it failed.
    """
    program = Path(os.environ.get("PEERS_VLLM_BIN", "/nowhere")) / "vllm"
    if not program.exists():
        raise BenchError("PEERS_VLLM_BIN names no folder with `vllm` in it")
    paced = load(None, os.environ).engine.kind == "fake"
    wanted = replace(PACED if paced else Load(), requests=requests)
    found: dict[str, list[dict[str, float]]] = {"baton bench": [], "vllm bench serve": []}
    with bench_cluster(BATON_CLUSTER_MODE="split") as cluster, _beside_the_gateway(cluster):
        _ours(cluster, replace(wanted, requests=4), 0)
        for number in range(rounds):
            salt = int.from_bytes(os.urandom(6))
            turns = [
                ("baton bench", lambda salt=salt: _ours_warm(cluster, wanted, salt)),
                ("vllm bench serve", lambda salt=salt: _vllm(cluster, wanted, salt, program)),
            ]
            for name, run in turns if number % 2 == 0 else reversed(turns):
                found[name].append(run())
    return {"load": asdict(wanted), "rounds": found}


@contextmanager
def _beside_the_gateway(cluster: BenchCluster) -> Iterator[None]:
    """This thread, and what it starts, on the gateway's cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(cluster.processes()["gateway-0"]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _ours_warm(cluster: BenchCluster, wanted: Load, salt: int) -> dict[str, float]:
    _ours(cluster, replace(wanted, requests=1, streams=1), salt)
    return _ours(cluster, wanted, salt)


def _ours(cluster: BenchCluster, wanted: Load, salt: int) -> dict[str, float]:
    config = load(None, cluster.environ)
    told = {**conditions_of(config), "cache_state": "new contents"}
    done = run_blocking(
        RunPlan(
            target=Target(
                url=f"http://127.0.0.1:{cluster.port}",
                roots=(cluster.supervisor_pid(),),
                told=told,
            ),
            workload=_workload(wanted, salt),
            load=LoadPlan(
                kind=Arrivals.CLOSED,
                concurrency=wanted.streams,
                warmup_s=0.0,
                duration_s=3_600.0,
                requests=wanted.requests,
            ),
            ask=ASK,
            slos=(),
            quiet=True,
        )
    )
    figures, rows = done.run.figures, done.run.rows
    if figures.ok != figures.requests:
        raise BenchError(f"not every request was answered: {figures.errors}")
    # As the other client does: until the last answer has ended, not until the last was asked for.
    seconds = max(row.at_s + row.e2e_ms / 1e3 for row in rows)
    return {
        "requests": len(rows),
        "prompt tokens": sum(row.prompt_tokens for row in rows) / len(rows),
        "output tokens": sum(row.output_tokens for row in rows) / len(rows),
        "requests/s": len(rows) / seconds,
        "output tokens/s": sum(row.output_tokens for row in rows) / seconds,
        "TTFT p50": figures.ttft.p50,
        "TTFT p99": figures.ttft.p99,
        "ITL p50": figures.itl.p50,
        "ITL p99": figures.itl.p99,
        "TPOT p50": figures.tpot.p50,
        "end to end p50": figures.e2e.p50,
        "client cores": figures.generator.cpu_cores,
        "others cores": done.run.others_cores,
    }


def _workload(wanted: Load, salt: int) -> WorkloadPlan:
    return WorkloadPlan(
        prompt_tokens=wanted.prompt_tokens, output_tokens=wanted.output_tokens, salt=salt
    )


def _prompts(wanted: Load, salt: int) -> list[str]:
    """Return what `baton bench` would ask with this salt."""
    asked = Workload(_workload(wanted, salt), Arrivals.CLOSED, None).sessions()
    bodies = (
        Conversation(ASK).body(next(asked).turns[0].new_ids, wanted.output_tokens, wants_ids=False)
        for _ in range(wanted.requests)
    )
    return [orjson.loads(body)["prompt"] for body in bodies]


def _vllm(cluster: BenchCluster, wanted: Load, salt: int, program: Path) -> dict[str, float]:
    config = load(None, cluster.environ)
    model = model_folder(config, cache_dir(config))
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        # Another salt: what one client has asked is in the cache.
        asked = _prompts(wanted, salt + 1)
        prompts.write_bytes(b"".join(orjson.dumps({"prompt": each}) + b"\n" for each in asked))
        command = [
            *(str(program), "bench", "serve", "--backend", "openai", "--model", cluster.model),
            *("--host", "127.0.0.1", "--port", str(cluster.port), "--tokenizer", str(model)),
            *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
            *("--disable-shuffle", "--custom-output-len", str(wanted.output_tokens)),
            "--ignore-eos",
            *("--num-prompts", str(wanted.requests), "--max-concurrency", str(wanted.streams)),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"),
            *("--seed", str(salt % 2**31), "--temperature", "0", "--disable-tqdm"),
            # Ours is warm too: what a first request has to load is no time of the server's.
            *("--ready-check-timeout-sec", "0", "--num-warmups", str(wanted.streams)),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        unwanted = ("BATON_", "PYTHONPATH")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
        try:
            done = subprocess.run(
                command,
                env=environ,
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE_S,
                preexec_fn=wake_first,
            )
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"vllm bench serve took more than {PATIENCE_S:g} s") from error
        if done.returncode != 0:
            raise BenchError(f"vllm bench serve failed:\n{done.stderr[-2000:]}")
        result = orjson.loads((Path(folder) / "result.json").read_bytes())
    if result["completed"] != wanted.requests:
        raise BenchError(f"vllm bench serve had {result['completed']} answers")
    return {
        "requests": result["completed"],
        "prompt tokens": result["total_input_tokens"] / result["completed"],
        "output tokens": result["total_output_tokens"] / result["completed"],
        "requests/s": result["request_throughput"],
        "output tokens/s": result["output_throughput"],
        "TTFT p50": result["p50_ttft_ms"],
        "TTFT p99": result["p99_ttft_ms"],
        "ITL p50": result["p50_itl_ms"],
        "ITL p99": result["p99_itl_ms"],
        "TPOT p50": result["p50_tpot_ms"],
        "end to end p50": result["p50_e2el_ms"],
    }


def page(result: Mapping[str, object]) -> str:
    """Return the table."""
    rounds = result["rounds"]
    assert isinstance(rounds, dict)
    ours, theirs = rounds["baton bench"], rounds["vllm bench serve"]
    rows = []
    for name in ("prompt tokens", "output tokens", "requests/s", "output tokens/s", *NAMES):
        mine, other = ([each[name] for each in found] for found in (ours, theirs))
        bound = next((b for start, b in BOUNDS.items() if name.startswith(start)), None)
        ratio = median(mine) / median(other)
        kept = "-" if bound is None else "yes" if abs(ratio - 1) <= bound else "NO"
        words = "-" if bound is None else f"{bound:.0%}: {kept}"
        rows.append((name, _spread(mine), _spread(other), f"{ratio:.3f}", words))
    asked = result["load"]
    assert isinstance(asked, dict)
    header = ("", "baton bench", "vllm bench serve", "ratio", "within")
    return (
        f"{table(header, rows)}\n\n"
        f"{asked['streams']} requests at once, {asked['requests']} a round and client, prompts of "
        f"{asked['prompt_tokens']} words, {asked['output_tokens']} tokens each; median "
        f"(least - most) of {len(ours)} rounds, the clients in turn on one running cluster. Times "
        "in ms. Cores used: by `baton bench` itself "
        f"{median(each['client cores'] for each in ours):.3f}, by others meanwhile "
        f"{median(each['others cores'] for each in ours):.2f}."
    )


def _spread(values: list[float]) -> str:
    return f"{median(values):.4g} ({min(values):.4g} - {max(values):.4g})"
