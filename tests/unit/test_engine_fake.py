"""The fake engine: forced ids, corrupt KV by name, times, stop points; its model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.core.sampling import SamplingParams
from baton.engine.build import build_engine
from baton.engine.fake import EOS_ID, FakeEngine, FakeKnobs, KVCorrupt, forced_ids
from baton.engine.fake_model import fake_info, write_fake_model
from baton.engine.info import layout_of, read_info
from baton.ports.engine import StepFailed
from support.engine_steps import Arena, Sequel, ids_of

LAYOUT = layout_of(fake_info(), "float32", 16)
PROMPT = ids_of(b"Tell me where the baton is now, and who holds it.")


class Recorder:
    """Remembers the points it was told of; raises at one of them."""

    def __init__(self, break_at: str = "") -> None:
        self.points: list[tuple[str, str]] = []
        self._break_at = break_at

    def at(self, point: str, request_id: str) -> None:
        self.points.append((point, request_id))
        if point == self._break_at:
            raise KeyboardInterrupt


def made(knobs: FakeKnobs | None = None, **ports: Any) -> FakeEngine:
    return FakeEngine(fake_info(), LAYOUT, knobs, **ports)


def request(engine: FakeEngine, prompt: Any = PROMPT, **changes: Any) -> tuple[Sequel, Arena]:
    arena = Arena(engine, 12)
    return Sequel(engine, prompt, ids_of([7, 3, 9, 1, 5, 2]), **changes), arena


def test_tokens_follow_from_prompt_output_and_seed_alone() -> None:
    """Two engines agree; another seed or prompt gives another text."""
    texts = []
    for prompt, seed in ((PROMPT, 1), (PROMPT, 1), (PROMPT, 2), (PROMPT[1:], 1)):
        sequel, _ = request(made(), prompt, params=SamplingParams(seed=seed))
        sequel.prefill([5])
        sequel.decode(20)
        texts.append(tuple(sequel.output))
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    assert bytes(texts[0]).decode("ascii").replace(" ", "").isalpha()


def test_forced_ids_come_from_knobs_or_from_the_prompts_text() -> None:
    """After the forced ids comes the end-of-sequence id, at any temperature."""
    hot = SamplingParams(seed=1, temperature=2.0)
    sequel, _ = request(made(FakeKnobs(forced={"request": (72, 105)})), params=hot)
    sequel.prefill()
    sequel.decode(4)
    assert sequel.output == [72, 105, EOS_ID, EOS_ID]
    sequel, _ = request(made(), ids_of(b"[[forced 258 65]] and [[forced 66]] x"), params=hot)
    sequel.prefill()
    sequel.decode(2)
    assert sequel.output == [66, EOS_ID]
    assert forced_ids(ids_of(b"[[forced]]")) == ()
    assert forced_ids(PROMPT) is None


def test_masks_are_stronger_than_forced_ids() -> None:
    """min_tokens keeps a forced end-of-sequence id away until its turn."""
    params = SamplingParams(seed=1, temperature=0.0, min_tokens=3, stop_token_ids=(EOS_ID,))
    sequel, _ = request(made(FakeKnobs(forced={"request": (EOS_ID,) * 5})), params=params)
    sequel.prefill()
    sequel.decode(5)
    assert [token == EOS_ID for token in sequel.output] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("offset", "named"),
    [
        (0, "layer 0, K, head 0"),
        (40, "layer 0, K, head 1"),
        (16 * 64 + 40, "layer 0, V, head 1"),
        (3 * 16 * 64 + 8, "layer 1, V, head 0"),
    ],
)
def test_any_wrong_byte_is_named(offset: int, named: str) -> None:
    """One flipped bit before the row fails the step with position, layer, axis and head."""
    engine = made()
    sequel, arena = request(engine)
    sequel.prefill()
    arena.memory[3 * LAYOUT.block_bytes + 2 * 64 + offset] ^= 1  # block 3 is logical 1
    with pytest.raises(KVCorrupt, match=f"position 18 .*block 3 .*{named}") as caught:
        engine.step([sequel.decode_row()])
    assert caught.value.retryable


def test_another_requests_whole_prefix_is_found_by_its_ids() -> None:
    """KV that is consistent in itself but of other tokens is not this request's."""
    engine = made()
    sequel, _ = request(engine)
    sequel.prefill()
    stranger = Sequel(engine, PROMPT[::-1].copy(), sequel.blocks, output=list(sequel.output))
    with pytest.raises(KVCorrupt, match="another prefix from position 0"):
        engine.step([stranger.decode_row()])


def test_only_the_corrupt_row_is_blamed_and_the_others_are_stored() -> None:
    """The batch can be stepped again without the row that failed, with the right result."""
    engine = made()
    arena = Arena(engine, 12)
    good = Sequel(engine, PROMPT, ids_of([0, 1, 2, 3, 4]), request_id="good")
    bad = Sequel(engine, PROMPT, ids_of([6, 7, 8, 9, 10]), request_id="bad")
    good.prefill()
    bad.prefill()
    arena.memory[8 * LAYOUT.block_bytes] ^= 255
    with pytest.raises(StepFailed) as caught:
        engine.step([bad.decode_row(), good.decode_row()])
    assert caught.value.request_ids == ("bad",)
    good.take(engine.step([good.decode_row()])[0])
    fresh, _ = request(made())
    fresh.prefill()
    fresh.decode(2)
    assert good.output == fresh.output


def test_times_are_spent_through_the_given_sleep() -> None:
    """Per prompt chunk, between its blocks, and once per decode step whatever its batch."""
    naps: list[float] = []
    engine = made(FakeKnobs(prefill_ms=50, step_ms=20, write_ms=3), sleep=naps.append)
    sequel, _ = request(engine)
    sequel.prefill([40])  # blocks 0, 1, 2; then 9 tokens on, blocks 2 and 3
    assert naps == [0.05, 0.003, 0.003, 0.05, 0.003]
    naps.clear()
    engine.step([sequel.decode_row(), sequel.decode_row()])
    assert naps == [0.02]


def test_stop_points_come_in_order() -> None:
    """Each chunk passes three points, each decode step its own, the first one more."""
    stops = Recorder()
    sequel, _ = request(made(stops=stops))
    sequel.prefill()
    sequel.decode(3)
    points = ["P.before_write", "P.mid_write", "P.last_chunk", "P.after_write"]
    points += ["D.before_first_step", "D.step:1", "D.step:2"]
    assert stops.points == [(point, "request") for point in points]


def test_a_death_in_mid_write_leaves_half_a_chunk() -> None:
    """What was written before the point is in place, the rest is not."""
    sequel, arena = request(made(stops=Recorder("P.mid_write")))
    with pytest.raises(KeyboardInterrupt):
        sequel.prefill()
    written = [any(arena.block(int(number))) for number in sequel.blocks[:4]]
    assert written == [True, True, False, False]


def test_the_fake_models_tokenizer_maps_bytes_to_ids(tmp_path: Path) -> None:
    """Any text survives the round trip; an id below 256 is that byte; chat marks are special."""
    info = write_fake_model(tmp_path)
    assert read_info(tmp_path) == info
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "héllo 😀\n\x00 [[forced 1]]"
    ids = tokenizer.encode(text).ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_start|>x<|im_end|>").ids == [257, ord("x"), 258]
    assert tokenizer.get_vocab_size() == info.vocab_size


def test_the_fake_engine_is_built_from_its_folder(tmp_path: Path) -> None:
    """The kind decides the class; an unknown kind is named."""
    write_fake_model(tmp_path)
    engine = build_engine(tmp_path, dtype="float32", kind="fake", knobs=FakeKnobs(step_ms=1))
    assert isinstance(engine, FakeEngine)
    assert engine.layout == LAYOUT
    assert np.prod([LAYOUT.layers, 2, 16, LAYOUT.heads, LAYOUT.head_dim]) * 4 == 16 * 256
    with pytest.raises(ValueError, match=r"'quantum'.*fake, torch"):
        build_engine(tmp_path, kind="quantum")
