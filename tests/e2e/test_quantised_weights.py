"""A cluster of the real model with weights of 8 and 4 bits: answers, deaths, changed settings.

"Right" is what the engine says alone, in this process: so a cluster's answer is the model's,
whoever computed which part of it.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli.client import Delta, GatewayClient
from baton.engine.build import build_engine
from baton.engine.info import read_info, resolve_dtype
from baton.engine.kernels import choose_kernels
from baton.engine.prepare_kernels import prepare_kernels
from support.cluster_client import complete, metric
from support.engine_compiled import LEVELS, library_of
from support.engine_fixtures import model_dir  # noqa: F401 - a fixture
from support.engine_steps import Arena, Sequel, ids_of
from support.ops_cluster import OpsCluster, ops_cluster, wait_until
from support.undisturbed import assert_same_answers, stream_all

PROMPTS = json.loads((Path(__file__).parents[1] / "reference" / "greedy.json").read_text())
TOKENS, STREAMS, BLOCK = 24, 4, 16
#: So that a step of the death's streams does not end them before their worker is dead.
LONG = 160
RIVERS = ("Seine", "Loire", "Rhône", "Garonne", "Dordogne", "Marne", "Rhine")
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The default model without packed weights: they are made here, in a place of their own."""
    made = tmp_path_factory.mktemp("model")
    for file in model_dir.iterdir():
        if not file.name.startswith("packed-"):
            (made / file.name).symlink_to(file)
    return made


def _settings(folder: Path, weights: str) -> dict[str, str]:
    return {
        "BATON_ENGINE_KIND": "torch",
        "BATON_MODEL_PATH": str(folder),
        "BATON_MODEL_NAME": "m",
        "BATON_MODEL_CACHE_DIR": str(library_of().path.parent.parent),
        "BATON_ENGINE_WEIGHTS": weights,
        "BATON_ARENA_SIZE_MB": "300",
        "BATON_LIMITS_PREFILL_CHUNK_TOKENS": "64",
        "BATON_CHECK": "1",
    }


@pytest.fixture(scope="module", params=["int8", "int4"])
def weights(request: pytest.FixtureRequest) -> str:
    """Which weights the tests run with."""
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(folder: Path, weights: str) -> Iterator[OpsCluster]:
    """One prefill, one decode; the first start packs the weights."""
    with ops_cluster(**_settings(folder, weights)) as place:
        place.up(wait_s=120)
        yield place


def _alone(folder: Path, weights: str, prompts: list[list[int]]) -> list[list[int]]:
    """Return the engine's own greedy answers, one prompt at a time."""
    info, dtype = read_info(folder), resolve_dtype("auto")
    kernels = choose_kernels(
        "compiled",
        folder,
        info,
        dtype=dtype,
        block_size=BLOCK,
        cache_dir=library_of().path.parent.parent,
        weights=weights,
    )
    assert kernels.name.endswith(f"-{weights}") is (weights != "full")
    engine = build_engine(folder, dtype=dtype, block_size=BLOCK, threads=1, kernels=kernels)
    answers = []
    for prompt in prompts:
        blocks = -(-(len(prompt) + TOKENS) // BLOCK)
        Arena(engine, blocks)
        sequel = Sequel(engine, ids_of(prompt), ids_of(range(blocks)))
        sequel.prefill()
        sequel.decode(TOKENS)
        answers.append(sequel.output)
    return answers


@pytest.mark.slow
def test_answers_are_the_engines_own(cluster: OpsCluster, folder: Path, weights: str) -> None:
    """Id for id, for prompts of every length; and a question has an answer that makes sense."""
    prompts = [p["prompt"] for p in PROMPTS["prompts"][:: len(PROMPTS["prompts"]) // 10]]
    prompts = [prompt for prompt in prompts if len(prompt) <= 1000]
    fields = {"max_tokens": TOKENS, "ignore_eos": True}
    said = [complete(cluster.port, "m", prompt, **fields).ids for prompt in prompts]
    assert said == _alone(folder, weights, prompts)
    assert metric(cluster.port, "baton_handovers_total") >= len(prompts) - 1
    client = GatewayClient(f"http://127.0.0.1:{cluster.port}")
    pieces = client.stream_chat(
        [{"role": "user", "content": "Name three rivers in France."}],
        model="m",
        max_tokens=60,
        temperature=0,
    )
    text = "".join(piece.text for piece in pieces if isinstance(piece, Delta))
    assert any(river in text for river in RIVERS), text


@pytest.mark.slow
@pytest.mark.skipif(LEVELS[0].name != "amxbf16", reason="this CPU has no AMX for bfloat16")
def test_with_tile_registers_four_bits_say_what_full_weights_say(folder: Path) -> None:
    """The model's own file has 4 bits: of them its bfloat16 weights are made, bit for bit."""
    prompts = [p["prompt"] for p in PROMPTS["prompts"] if len(p["prompt"]) <= 300]
    assert len(prompts) > 20
    for weights in ("int4", "full"):
        cache = library_of().path.parent.parent
        prepare_kernels(folder, "bfloat16", cache, "compiled", print, weights=weights)
    assert _alone(folder, "int4", prompts) == _alone(folder, "full", prompts)


def _requests(topic: str, words: int) -> list[dict[str, Any]]:
    """Greedy and sampled ones, in turn."""
    fields = {"max_tokens": LONG, "ignore_eos": True}
    return [
        {
            "prompt": f"{topic}, number {number}: " + "once upon a time " * words,
            "temperature": number % 2,
            "seed": number,
            **fields,
        }
        for number in range(STREAMS)
    ]


def _ready(cluster: OpsCluster) -> bool:
    return bool(cluster.reports()["decode-0"].get("writers")) and bool(cluster.status()["ready"])


@pytest.mark.slow
def test_by_default_the_default_model_has_four_bits(folder: Path) -> None:
    """They lose nothing of it, which `up` finds out; `status` tells what serves."""
    with ops_cluster(**_settings(folder, "auto")) as cluster:
        made = cluster.baton("up", "--wait", "120", timeout_s=150)
        assert made.returncode == 0, made.stdout + made.stderr
        assert "int4 loses nothing of them" in made.stdout, made.stdout
        assert all("-int4 " in kernels for kernels in cluster.status()["kernels"]["running"])
        (prompt,) = [p["prompt"] for p in PROMPTS["prompts"][:1]]
        fields = {"max_tokens": TOKENS, "ignore_eos": True}
        said = complete(cluster.port, "m", prompt, **fields).ids
        assert [said] == _alone(folder, "int4", [prompt])


@pytest.mark.slow
def test_decode_dies_and_the_text_is_the_same(cluster: OpsCluster) -> None:
    """Its successor takes its memory over; greedy and sampled answers are the undisturbed ones."""
    wait_until(lambda: _ready(cluster), 30, "ready")
    victim = cluster.process("decode-0")
    # A prompt of its own each time, so that nothing but the death decides what is found.
    calm = stream_all(cluster, _requests("decode", 20))
    disturbed = stream_all(
        cluster, _requests("decode", 20), lambda: victim.send(signal.SIGKILL), after=10
    )
    assert_same_answers(cluster, calm, disturbed, LONG)
    assert not victim.is_alive()
    recovered = metric(cluster.port, "baton_recoveries_total", worker="decode-0")
    assert recovered == STREAMS, cluster.logs()


@pytest.mark.slow
def test_prefill_dies_and_the_text_is_the_same(cluster: OpsCluster) -> None:
    """While it computes prompts of 1,000 tokens, 64 at a time."""
    wait_until(lambda: _ready(cluster), 30, "ready")
    victim = cluster.process("prefill-0")
    log = cluster.run_dir / "logs" / "prefill-0.log"
    before = log.read_text().count('"event":"chunk_stored"')

    def kill_in_the_middle() -> None:
        wait_until(
            lambda: log.read_text().count('"event":"chunk_stored"') >= before + 3, 30, "chunks"
        )
        victim.send(signal.SIGKILL)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    disturbed = stream_all(cluster, _requests("prefill", 250))
    killer.join()
    assert not victim.is_alive()
    wait_until(lambda: _ready(cluster), 30, "ready again")
    assert metric(cluster.port, "baton_attempts_failed_total") > 0, cluster.logs()
    calm = stream_all(cluster, _requests("prefill", 250))
    assert_same_answers(cluster, calm, disturbed, LONG)


@pytest.mark.slow
def test_a_roll_to_other_weights_is_refused_and_never_mixed(folder: Path) -> None:
    """`baton restart` takes no other settings than those of the start; where they are changed under
    it, the first process that has them meets nobody: the roll ends there, and no client notices."""
    with ops_cluster(**_settings(folder, "full")) as cluster:
        prepared = cluster.baton("model", "prepare", BATON_ENGINE_WEIGHTS="int4")
        assert prepared.returncode == 0, prepared.stdout + prepared.stderr
        cluster.up(wait_s=120)
        calm = stream_all(cluster, _requests("roll", 20))
        refused = cluster.baton("restart", "--rolling", BATON_ENGINE_WEIGHTS="int4")
        assert refused.returncode == 78
        assert 'engine.weights = "int4"' in refused.stderr

        settings = cluster.run_dir / "settings.toml"
        was = settings.read_text()
        settings.write_text(was.replace('weights = "full"', 'weights = "int4"'))
        decode = cluster.process("decode-0")
        rolled: list[Any] = []

        def roll() -> None:
            cluster.environ["BATON_ENGINE_WEIGHTS"] = "int4"
            rolled.append(cluster.baton("restart", "--rolling", "--wait", "10"))

        assert_same_answers(cluster, calm, stream_all(cluster, _requests("roll", 20), roll), LONG)
        assert rolled[0].returncode == 75, rolled[0].stdout + rolled[0].stderr
        for words in ("prefill-0", "kernels:", "-int4 ", "nothing else was touched"):
            assert words in rolled[0].stderr, rolled[0].stderr
        assert decode.is_alive(), "the roll went on"


def test_plain_torch_does_not_take_them(folder: Path) -> None:
    """The start is refused in a few lines that name both settings; nothing is compiled or left."""
    before = set(folder.iterdir())
    with ops_cluster(**_settings(folder, "int4")) as cluster:
        done = cluster.baton("up", BATON_ENGINE_KERNELS="torch")
        assert done.returncode == 78
        assert "engine.weights = 'int4' needs the compiled step" in done.stderr
        assert "engine.kernels is torch" in done.stderr
        assert len(done.stderr.splitlines()) <= 3, done.stderr
        assert "making kernels" not in done.stdout
        assert set(folder.iterdir()) == before
        assert cluster.left_behind() == []
