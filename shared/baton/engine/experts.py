"""Mixture-of-experts layers whose results do not depend on the batch.

Decides how the tokens that chose one expert are multiplied: gathered, by products whose rows do not
see each other, so that a token's bits are the same however many others chose the same expert; its
experts' outputs are summed in the order the router ranked them. transformers' own implementations
multiply groups of any size at once, which the proof refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from baton.engine.products import product

#: Name under which transformers knows this implementation.
NAME = "baton_row_invariant"


def row_invariant_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Apply each token's experts.

    Args:
        module: the experts module, decorated by transformers' ``use_experts_implementation``.
        hidden: [tokens, hidden].
        chosen: int64 [tokens, k], the expert ids of each token.
        weights: [tokens, k].

    Returns:
        [tokens, hidden].
    """
    tokens, count = chosen.shape
    parts = hidden.new_empty(tokens * count, hidden.shape[1])
    flat = chosen.reshape(-1)
    for expert in sorted(set(flat.tolist())):
        places = (flat == expert).nonzero()[:, 0]
        parts[places] = _one_expert(module, hidden[places // count], expert)
    weighted = parts.view(tokens, count, -1) * weights.unsqueeze(-1)
    total = weighted[:, 0]
    for rank in range(1, count):
        total = total + weighted[:, rank]
    return total.to(hidden.dtype)


def _one_expert(module: Any, rows: torch.Tensor, expert: int) -> torch.Tensor:
    if module.has_gate:
        up = module._apply_gate(_linear(module, "gate_up_proj", rows, expert))
    else:
        up = module.act_fn(_linear(module, "up_proj", rows, expert))
    down = _linear(module, "down_proj", up, expert)
    return module.post_expert_norm(down) if module.has_post_expert_norm else down


def _linear(module: Any, name: str, rows: torch.Tensor, expert: int) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return product(rows, weight.t() if module.is_transposed else weight, bias)


ExpertsInterface.register(NAME, row_invariant_experts)
