"""`baton bench` against a real cluster, as a user runs it: result, tables, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.cli.processes import members
from support.ops_cluster import BATON, OpsCluster, ops_cluster, wait_until

#: The fake engine's vocabulary is bytes.
IDS = ("--ids", "97-122")


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpsCluster]:
    with ops_cluster(BATON_FAKE_STEP_MS="2") as made:
        made.up()
        yield made


def test_a_run_gives_figures_under_conditions(cluster: OpsCluster, tmp_path: Path) -> None:
    """The file has every request, Baton's own figures, the cluster's settings; show prints it."""
    file = tmp_path / "r.json"
    done = cluster.baton(
        *("bench", "run", *IDS, "--arrivals", "poisson", "--rate", "30", "--prompt-tokens", "64"),
        *("--output-tokens", "8", "--warmup", "0", "--duration", "60", "--requests", "40"),
        *("--out", str(file)),
        timeout_s=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_bytes())
    (run,) = found["runs"]
    figures, conditions = run["figures"], found["conditions"]
    assert figures["ok"] == figures["requests"] == len(run["rows"]) >= 40
    assert all(row[1] == "ok" and row[2] == 64 and row[4] == 8 for row in run["rows"])
    assert figures["ttft"]["count"] == figures["ok"]
    server = figures["server"]
    assert set(server["cpu_cores"]) == {"prefill-0", "decode-0", "router-0", "gateway-0"}
    assert 0 < server["handovers"] <= figures["requests"]
    assert server["handover_bytes"] > 0 and 0 < server["handover_share_of_ttft"] < 1
    assert conditions["limits"]["mode"] == "split"
    assert len(conditions["limits"]) > 20, "all of them, whatever is shown"
    roles = {"prefill": 1, "decode": 1, "router": 1, "gateway": 1}
    assert conditions["server"]["workers"] == roles
    assert conditions["dtype"] == "none: the fake engine"
    assert any(name.startswith("decode-0") for name in conditions["pinning"]["server"])
    assert run["cost"]["unit"] == "core" and run["cost"]["amount"] >= 1
    shown = cluster.baton("bench", "show", str(file), "--markdown")
    assert shown.returncode == 0 and "hand-over's share of TTFT" in shown.stdout
    assert "mode split, arena_mib 8, drain_ms 2000, others as by default" in shown.stdout
    compared = cluster.baton("bench", "compare", str(file), str(file))
    assert compared.returncode == 0 and "1.000" in compared.stdout


def test_conversations_find_their_own_words_cached(cluster: OpsCluster, tmp_path: Path) -> None:
    """A later turn's prompt begins with the turns before, answers included, ids exact."""
    file = tmp_path / "r.json"
    done = cluster.baton(
        *("bench", "run", *IDS, "--workload", "sharegpt", "--prompt-scale", "0.2"),
        *("--output-scale", "0.05", "--context-max", "400", "--think", "0", "--concurrency", "4"),
        *("--warmup", "0", "--duration", "60", "--requests", "60", "--out", str(file)),
        timeout_s=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_bytes())
    assert found["conditions"]["workload"]["invented_histories"] == 0
    assert found["runs"][0]["figures"]["cached_share"] > 0.2


def test_ctrl_c_keeps_what_was_measured(cluster: OpsCluster, tmp_path: Path) -> None:
    """The result says that it is partial, and so does the exit code."""
    file = tmp_path / "r.json"
    arguments = ("--concurrency", "2", "--warmup", "0", "--duration", "3600", "--out", str(file))
    process = subprocess.Popen(
        [*BATON, "bench", "run", *IDS, *arguments],
        env=cluster.env(),
        cwd=cluster.cwd,
        stdout=subprocess.DEVNULL,
    )
    try:
        before = _sent(cluster)
        wait_until(lambda: _sent(cluster) > before + 1000, 60, "several answers were told")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    found = json.loads(file.read_bytes())
    assert found["aborted"]
    assert found["runs"][0]["figures"]["output_tokens_per_s"] > 0


def test_conditions_have_the_roles_that_workers_have_now(tmp_path: Path) -> None:
    """After `baton role` the counts of the settings are wrong."""
    file = tmp_path / "r.json"
    with ops_cluster(BATON_CLUSTER_DECODE="2") as changed:
        changed.up()
        done = changed.baton("role", "decode-1", "prefill")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "decode-1 is prefill" in done.stdout
        done = changed.baton(
            *("bench", "run", *IDS, "--prompt-tokens", "16", "--output-tokens", "4"),
            *("--warmup", "0", "--duration", "30", "--requests", "5", "--out", str(file)),
            *("--slo-gap", "50", "400", "--quiet"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_bytes())
    workers = found["conditions"]["server"]["workers"]
    assert (workers["prefill"], workers["decode"]) == (2, 1)
    bounds = [each["slo"]["gap_ms"] for each in found["runs"][0]["figures"]["goodput"]]
    assert bounds == [50, 400]


def _sent(cluster: OpsCluster) -> float:
    """Return how many tokens the gateway has sent to clients."""
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    lines = [x for x in text.splitlines() if x.startswith("baton_tokens_sent_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_foreign_server_without_its_conditions_is_not_measured(cluster: OpsCluster) -> None:
    """It says which ones are missing, before anything is asked."""
    url = f"http://127.0.0.1:{cluster.port}"
    done = cluster.baton("bench", "run", "--url", url, "--condition", "dtype=x")
    assert done.returncode == 2
    assert "--condition limits=" in done.stderr and "dtype" not in done.stderr
    done = cluster.baton(
        *("bench", "run", "--url", "http://127.0.0.1:9", "--condition", "dtype=x"),
        *("--condition", "limits=x"),
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1


_HOLDER = """
import sys, time
from baton.bench.cluster import bench_cluster
with bench_cluster() as cluster:
    print(cluster.run_dir, flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


@pytest.mark.parametrize("does", ["term", "int", "leave int", "leave term int"])
def test_a_bench_that_is_ended_leaves_nothing(cluster: OpsCluster, does: str) -> None:
    """By SIGTERM or Ctrl-C, while its cluster serves or while it is taken down already."""
    process = subprocess.Popen(
        [BATON[0], "-c", _HOLDER],
        env=cluster.env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # The terminal sends to a whole group: this one's is its own.
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        run_dir = Path(process.stdout.readline().strip())
        mine = f"baton-bench-{process.pid}."
        assert members(run_dir) and _arenas(mine)
        for what in does.split():
            if what == "leave":
                process.stdin.write("\n")
                process.stdin.flush()
                wait_until(lambda: bool(_downs(run_dir)), 30, "it is taken down")
            else:
                number = signal.SIGTERM if what == "term" else signal.SIGINT
                os.killpg(process.pid, number)
        assert process.wait(60) != 0
        assert not process.stdout.read()
        assert not members(run_dir) and not _arenas(mine) and not run_dir.exists()
    finally:
        # Killed at once it would leave its cluster, which nobody would end after a failed test.
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _arenas(prefix: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]


def _downs(run_dir: Path) -> list[str]:
    """Return the commands that take the cluster in ``run_dir`` down just now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environ = (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"down" in words and f"BATON_CLUSTER_RUN_DIR={run_dir}".encode() in environ:
            found.append(folder.name)
    return found


@pytest.mark.slow
def test_modes_are_compared_on_clusters_of_their_own(cluster: OpsCluster, tmp_path: Path) -> None:
    """Every mode is measured with the same load, in two parts; one table, one sentence, a page."""
    file, page, slices = tmp_path / "m.json", tmp_path / "m.html", tmp_path / "slices"
    command = (
        *("bench", "compare-modes", *IDS, "--prompt-tokens", "100", "--output-tokens", "8"),
        *("--rates", "5,10", "--chunks", "64", "--multiples", "2,50", "--undisturbed", "2"),
        *("--warmup", "0.5", "--duration", "3", "--tune", "2", "--slices", str(slices)),
        *("--out", str(file), "--html", str(page)),
        *("--also", f"other=http://127.0.0.1:{cluster.port}", "--also-cores", "2"),
        *("--condition", "dtype=none", "--condition", "limits=usual"),
    )
    done = cluster.baton(*command, "--minutes", "0.5", timeout_s=300)
    assert done.returncode == 1 and "nothing to compare yet: 0.5 minutes" in done.stderr
    kept = {path: path.stat().st_mtime_ns for path in slices.glob("*.slice.json")}
    assert kept
    done = cluster.baton(*command, timeout_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    found = json.loads(file.read_bytes())
    modes = {run["settings"]["mode"] for run in found["runs"]}
    assert modes == {"split", "colocated", "adaptive", "other"}
    assert all(run["figures"]["ok"] for run in found["runs"])
    assert set(found["findings"]["goodput_per_cost"]) == {"2", "50"}
    assert found["findings"]["advice"] in done.stdout
    assert "forecasts of the time to the first token" in done.stdout
    assert "Goodput against rate" in page.read_text()
