"""Packs a prepared model's weights for the compiled step, once, and checks the result.

Decides which models the compiled step knows: those whose transformers classes compute what
``native/llama.h`` does. What is packed is held to the modules before the file gets its name: both
compute the same tokens, and the logits must agree. Of other models the file keeps the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from baton.core.sampling import SamplingParams
from baton.engine.info import ModelRefused, layout_of
from baton.engine.llama_engine import LlamaEngine
from baton.engine.load import held_lock, load_model, stored_dtype
from baton.engine.native.abi import GROUP, GROUP_HEADS_MAX, K_STEP, Library
from baton.engine.packed import (
    AUTO,
    STEP_ARCHITECTURES,
    LayerSpec,
    PackedSpec,
    find_packed,
    packed_path,
    settle_auto,
    write_packed,
)
from baton.engine.quantize import BITS, Quantized, head_kind, loses_nothing, packed_slabs, quantize
from baton.ports.engine import ModelInfo, Row, SampleSpec

_LANES = 16
#: Tokens that are compared with the modules: past two tiles of attention, and in uneven chunks.
_CHECKED = 300
_CHUNK = 110
#: Largest difference of a logit from the modules in float32 over the same weights, in standard
#: deviations of the logits, that counts as rounding. Of 60 packs of tiny models of random weights
#: 59 came to 0.03 to 0.10, full weights and codes alike, and one with codes to 0.18; another one
#: had come to 0.202: rare large values of a maximum, for which codes have room.
_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.2}
_TOLERANCE_CODES = {"float32": 5e-3, "bfloat16": 0.3}


def pack(
    model_dir: Path, info: ModelInfo, dtype: str, library: Path, weights: str = "full"
) -> PackedSpec:
    """Write the packed weights of a Llama-like model, unless they are there, and return the header.

    Its ``refused`` says why the compiled step is not for this model, if it is not: what these
    kernels have said once stands, what others said is not.
    """
    path = packed_path(model_dir, dtype, weights)
    with held_lock(model_dir / ".pack.lock"):
        found = find_packed(model_dir, dtype, info, weights)
        if found is not None and _stands(found, library):
            return found
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            # Codes are made from the stored weights, not from what the dtype leaves of them.
            loaded = dtype if weights == "full" else "float32"
            model = load_model(model_dir, loaded, keep=False)
            _write_checked(part, model, info, library, dtype=dtype, weights=weights)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        found = find_packed(model_dir, dtype, info, weights)
        assert found is not None
        return found


def pack_fewest(
    model_dir: Path, info: ModelInfo, dtype: str, library: Path, say: Callable[[str], None]
) -> PackedSpec:
    """Write the packed weights that ``auto`` stands for, unless that is settled.

    These are the fewest bits that lose nothing of this model (:func:`fewest_bits`). A step that is
    refused with codes may be right with full weights, so those are tried then; other kernels are
    asked for codes again.
    """
    found = find_packed(model_dir, dtype, info, AUTO)
    codes = (find_packed(model_dir, dtype, info, kind) for kind in BITS)
    if found is not None and all(
        spec is None or _stands(spec, library) for spec in (found, *codes)
    ):
        return found
    weights = fewest_bits(load_model(model_dir, stored_dtype(model_dir), keep=False), dtype)
    if weights != "full":
        say(f"{weights} loses nothing of them")
    packed = pack(model_dir, info, dtype, library, weights)
    if packed.refused and weights != "full":
        say(f"but not {weights}: {packed.refused}")
        weights = "full"
        packed = pack(model_dir, info, dtype, library, weights)
    settle_auto(model_dir, dtype, weights)
    return packed


@torch.inference_mode()
def fewest_bits(model: Any, dtype: str) -> str:
    """Return the kind of weights of fewest bits that stand for ``model``'s own, in ``dtype``.

    Every matrix is looked at, as long as none differs: a model that never had codes is refused by
    its first one. ``full``: there is no such kind.
    """
    wanted = getattr(torch, dtype)
    for kind in sorted(BITS, key=lambda kind: BITS[kind]):
        matrices = ((module, kind) for layer in model.model.layers for module in _linears(layer))
        heads = ((model.lm_head, head_kind(kind)),)
        if all(loses_nothing(part.weight, of, wanted) for part, of in chain(matrices, heads)):
            return kind
    return "full"


def _linears(layer: Any) -> tuple[Any, ...]:
    attention, feed = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(feed.gate_proj, feed.up_proj, feed.down_proj),
    )


def _stands(found: PackedSpec, library: Path) -> bool:
    """Whether what was packed, or these very kernels' refusal to, need not be looked at again."""
    return not found.refused or found.refused_by == library.stem


def _write_checked(
    part: Path, model: Any, info: ModelInfo, library: Path, *, dtype: str, weights: str
) -> None:
    try:
        spec = describe(model, info, dtype, weights)
        write_packed(part, spec, dict(tensors_of(model, spec)))
        allowed = _TOLERANCE if weights == "full" else _TOLERANCE_CODES
        _check(part, model, info, dtype, library, allowed=allowed[dtype])
    except ModelRefused as error:
        nothing = msgspec.structs.replace(
            _NOTHING, model=info.digest, refused=str(error), refused_by=library.stem
        )
        write_packed(part, nothing, {})


#: The header of a model that the step does not know.
_NOTHING = PackedSpec("", "", 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, ())


@torch.inference_mode()
def _check(
    path: Path, model: Any, info: ModelInfo, dtype: str, library: Path, *, allowed: float
) -> None:
    """Compare the compiled step with the modules, which become float32 on the way.

    ``allowed``: the largest difference of a logit, in standard deviations of the logits.

    Raises:
        ModelRefused: it is more than that.
    """
    layout = layout_of(info, dtype, _LANES, "lanes")
    engine = LlamaEngine(Library(library), path, info, layout, kernels="checked")
    length = min(_CHECKED, info.context_max - 1)
    ids = np.random.default_rng(7).integers(0, info.vocab_size, length).astype(np.int32)
    blocks = np.random.default_rng(5).permutation(-(-length // _LANES)).astype(np.int32)
    engine.attach("check", memoryview(bytearray(b"\xff" * (len(blocks) * layout.block_bytes))))
    spec = SampleSpec(SamplingParams(seed=0), 0, ids, ())
    ends = [*range(_CHUNK, length, _CHUNK), length]
    found = [
        engine.logits(
            [
                Row(
                    "",
                    ids[end - min(end, _CHUNK) : end],
                    max(0, end - _CHUNK),
                    blocks,
                    "check",
                    spec,
                )
            ]
        )[0]
        for end in ends
    ]
    model.float().set_attn_implementation("eager")
    whole = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
    wanted = whole[torch.tensor(ends) - 1].numpy()
    worst = float(np.abs(np.stack(found) - wanted).max() / wanted.std())
    if not worst <= allowed:
        raise ModelRefused(
            f"the compiled step differs from the modules by {worst:.3g} standard deviations "
            f"({allowed} allowed)"
        )


@torch.inference_mode()
def describe(model: Any, info: ModelInfo, dtype: str, weights: str = "full") -> PackedSpec:
    """Return what the compiled step must know of ``model``.

    Raises:
        ModelRefused: it computes something that the step does not.
    """
    config = model.config
    layers = model.model.layers
    first = layers[0].self_attn
    spec = PackedSpec(
        model=info.digest,
        dtype=dtype,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        context=info.context_max,
        rotary=_rotary(model, 1).shape[-1],
        norm_eps=layers[0].input_layernorm.variance_epsilon,
        scale=first.scaling,
        layers=tuple(_layer(info.architecture, config, layer.self_attn) for layer in layers),
        weights=weights,
        head=head_kind(weights),
    )
    _refuse(model, spec)
    return spec


def _layer(architecture: str, config: Any, attention: Any) -> LayerSpec:
    where = STEP_ARCHITECTURES[architecture]
    owner = {"": None, "config": config, "layer": attention}[where]
    window = getattr(owner, "sliding_window", None) if owner is not None else None
    return LayerSpec(window=window or 0, rotate=bool(getattr(attention, "use_rope", True)))


def _refuse(model: Any, spec: PackedSpec) -> None:
    config = model.config
    layers = model.model.layers
    reasons = {
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        "biases in the feed-forward": any(
            getattr(layer.mlp, name).bias is not None
            for layer in layers
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        "a bias of the head": model.lm_head.bias is not None,
        f"sizes that are no multiples of {_LANES}": any(
            size % _LANES for size in (spec.hidden, spec.intermediate, spec.head_dim)
        ),
        "an odd number of rotary dimensions": bool(spec.rotary % 2),
        "rotary positions beyond a head": spec.rotary > spec.head_dim,
        "too many heads share keys": spec.heads // spec.kv_heads > GROUP_HEADS_MAX,
        "heads that do not divide": bool(spec.heads % spec.kv_heads),
        "scores that are not scaled down": not spec.scale > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ModelRefused(f"the compiled step does not know {reason}")


def _rotary(model: Any, positions: int) -> torch.Tensor:
    """Return cosines and sines, float32 [positions, 2, rotary / 2], from the modules' own code."""
    inner = model.model.rotary_emb
    places = torch.arange(positions)[None]
    cosine, sine = inner(torch.zeros(1, dtype=torch.float32), places)
    half = cosine.shape[-1] // 2
    return torch.stack((cosine[0, :, :half], sine[0, :, :half]), 1).flatten(1).float()


@torch.inference_mode()
def tensors_of(model: Any, spec: PackedSpec) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield name and bytes of every tensor, in the order a step reads them.

    The model's own weights become what the codes stand for on the way, if they are quantised.
    """
    inner, head = model.model, model.lm_head
    embedding = inner.embed_tokens.weight.to(getattr(torch, spec.dtype))
    if spec.weights != "full":
        _untie(model, embedding)
    yield "embedding", _raw(embedding)
    yield "rotary", _raw(_rotary(model, spec.context))
    for number, layer in enumerate(inner.layers):
        attention, feed = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        yield f"{number}.attention_norm", _floats(layer.input_layernorm.weight)
        yield f"{number}.qkv", _matrix(projections, spec, spec.weights)
        if projections[0].bias is not None:
            bias = torch.cat([part.bias for part in projections])
            yield f"{number}.qkv_bias", _floats(_whole_groups(bias))
        for name in ("q_norm", "k_norm"):
            if getattr(attention, name, None) is not None:
                yield f"{number}.{name}", _floats(getattr(attention, name).weight)
        yield f"{number}.out", _matrix([attention.o_proj], spec, spec.weights)
        if attention.o_proj.bias is not None:
            yield f"{number}.out_bias", _floats(_whole_groups(attention.o_proj.bias))
        yield f"{number}.mlp_norm", _floats(layer.post_attention_layernorm.weight)
        yield (
            f"{number}.gate_up",
            _matrix([feed.gate_proj, feed.up_proj], spec, spec.weights, in_turn=True),
        )
        yield f"{number}.down", _matrix([feed.down_proj], spec, spec.weights)
    yield "final_norm", _floats(inner.norm.weight)
    yield "head", _matrix([head], spec, spec.head)


def _untie(model: Any, embedding: torch.Tensor) -> None:
    """Give the head weights of its own, and the modules the embedding that the step has."""
    parameter = torch.nn.Parameter
    model.lm_head.weight = parameter(model.lm_head.weight.clone(), requires_grad=False)
    model.model.embed_tokens.weight = parameter(embedding.float(), requires_grad=False)


def _matrix(
    parts: list[Any], spec: PackedSpec, kind: str, *, in_turn: bool = False
) -> NDArray[np.uint8]:
    """Pack linear modules as one matrix, one below the other or (``in_turn``) 16 rows of each."""

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        if not in_turn:
            return torch.cat(tensors)
        lined = [tensor.view(-1, _LANES, *tensor.shape[1:]) for tensor in tensors]
        return torch.stack(lined, 1).flatten(0, 2)

    if kind == "full":
        return packed(joined([part.weight for part in parts]), K_STEP[spec.dtype])
    found = [quantize(part.weight, kind) for part in parts]
    for part, matrix in zip(parts, found, strict=True):
        part.weight = torch.nn.Parameter(matrix.weight(), requires_grad=False)
    codes, scale = (joined([getattr(m, name) for m in found]) for name in ("codes", "scale"))
    leasts = [matrix.least for matrix in found if matrix.least is not None]
    return packed_slabs(Quantized(codes, scale, joined(leasts) if leasts else None))


def packed(weight: torch.Tensor, step: int) -> NDArray[np.uint8]:
    """Return [n, k] as groups [n / 32][k / step][32][step], zeros where n ends within a group."""
    whole = _whole_groups(weight)
    columns, k = whole.shape
    lined = whole.view(columns // GROUP, GROUP, k // step, step)
    return _raw(lined.transpose(1, 2))


def _whole_groups(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[0] % GROUP
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _floats(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return _raw(tensor.float())


def _raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return found
