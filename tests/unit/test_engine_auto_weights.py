"""What `engine.weights = "auto"` stands for: the fewest bits that lose nothing of a model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from baton.engine import pack as packing
from baton.engine.build import build_engine
from baton.engine.load import WEIGHTS_FILE, load_model, stored_dtype
from baton.engine.native import binding
from baton.engine.packed import find_packed, packed_path, write_packed
from baton.engine.prepare_kernels import prepare_kernels
from support.engine_folders import BEST, chosen, folder_of, link_library, of_codes


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A cache in which the best level's library lies already."""
    return link_library(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_auto_means_the_fewest_bits_that_lose_nothing(
    tmp_path: Path, compiled: Path, kind: str, dtype: str
) -> None:
    """Weights that came from codes are kept as codes; it is looked for once, and said."""
    info = of_codes(tmp_path, kind)
    before = chosen(tmp_path, info, weights="auto", dtype=dtype)
    assert before.missing and before.name.startswith("attention-")
    said: list[str] = []
    prepare_kernels(tmp_path, dtype, compiled, "auto", said.append, weights="auto")
    assert said[-1] == f"{kind} loses nothing of them"
    choice = chosen(tmp_path, info, weights="auto", dtype=dtype)
    assert choice == chosen(tmp_path, info, weights=kind, dtype=dtype)
    assert (choice.name, choice.weights) == (f"step-{binding.name_of(BEST)}-{kind}", kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "fewest_bits", None)
        prepare_kernels(tmp_path, dtype, compiled, "auto", said.append, weights="auto")
    build_engine(tmp_path, dtype=dtype, threads=1, kernels=choice).warm_up()


def test_auto_means_full_weights_where_one_number_would_be_another(
    tmp_path: Path, compiled: Path
) -> None:
    """In any matrix of any layer, and in the head. What bfloat16 does not tell apart is no loss."""
    info = of_codes(tmp_path, "int4")
    whole = load_file(tmp_path / WEIGHTS_FILE)
    names = [name for name in whole if name.endswith("proj.weight")]
    assert len(names) == 7 * info.layers
    for name in (*names, "lm_head.weight"):
        for nudge, dtype, kind in (
            (1.5, "bfloat16", "full"),
            (1 + 1e-6, "float32", "full"),
            (1 + 1e-6, "bfloat16", "int4"),
        ):
            changed = whole[name].clone()
            shared = changed[-1, -32:]
            # Not one that decides scale and least value, nor one halfway between two of bfloat16.
            halfway = shared.bfloat16() != (shared * (1 + 1e-6)).bfloat16()
            outer = (shared == shared.max()) | (shared == shared.min())
            shared[(~halfway & ~outer & (shared != 0)).nonzero()[0]] *= nudge
            save_file({**whole, name: changed}, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
            model = load_model(tmp_path, stored_dtype(tmp_path), keep=False)
            assert packing.fewest_bits(model, dtype) == kind, (name, nudge, dtype)
    info = folder_of(tmp_path)
    said: list[str] = []
    prepare_kernels(tmp_path, "float32", compiled, "auto", said.append, weights="auto")
    assert said[-1] == "packing the weights of tiny in float32"
    assert chosen(tmp_path, info, weights="auto") == chosen(tmp_path, info)
    assert not chosen(tmp_path, info).missing


def test_weights_stored_in_half_precision_are_looked_at_as_they_are(tmp_path: Path) -> None:
    """The file of 16 bits is not converted for the question; codes that were rounded are not kept
    where rounding lost them."""
    of_codes(tmp_path, "int8", "bfloat16")
    before = set(tmp_path.iterdir())
    assert stored_dtype(tmp_path) == "bfloat16"
    model = load_model(tmp_path, "bfloat16", keep=False)
    assert packing.fewest_bits(model, "bfloat16") == "full"
    assert set(tmp_path.iterdir()) == before


def test_auto_goes_back_to_full_weights_where_the_step_is_refused_with_codes(
    tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is said, and the model is served as if it had never had codes; these kernels are
    not asked again, others are."""
    info = of_codes(tmp_path, "int4")
    monkeypatch.setattr(packing, "_TOLERANCE_CODES", {"float32": 0.0})
    said: list[str] = []
    prepare_kernels(tmp_path, "float32", compiled, "auto", said.append, weights="auto")
    assert said[-2] == "int4 loses nothing of them"
    assert said[-1].startswith("but not int4: the compiled step differs from the modules by")
    choice = chosen(tmp_path, info, weights="auto")
    assert (choice.name, choice.weights) == (f"step-{binding.name_of(BEST)}", "full")
    monkeypatch.undo()
    prepare_kernels(tmp_path, "float32", compiled, "auto", said.append, weights="auto")
    assert chosen(tmp_path, info, weights="auto") == choice
    refused = find_packed(tmp_path, "float32", info, "int4")
    assert refused is not None and refused.refused_by == binding.name_of(BEST)
    older = msgspec.structs.replace(refused, refused_by="older")
    write_packed(packed_path(tmp_path, "float32", "int4"), older, {})
    prepare_kernels(tmp_path, "float32", compiled, "auto", said.append, weights="auto")
    assert chosen(tmp_path, info, weights="auto").weights == "int4"
