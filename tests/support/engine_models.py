"""Tiny random models of many families, made in memory: no file, no network, milliseconds."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from baton.engine.attention import NAME
from baton.engine.load import row_invariant
from baton.ports.engine import ModelInfo

VOCAB = 211
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # with the usual 0.02 every prompt gets the same answer
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}

#: Families that must pass the proof: transformers' configuration class and what differs.
PROVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral-window": ("MistralConfig", {"sliding_window": 37}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 300}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 40}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", _GPT2),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "smollm3": ("SmolLM3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
}

#: Families that must be refused, and a word of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon": ("FalconConfig", {}, "attention"),
    "bloom": ("BloomConfig", {"n_head": 4, "n_layer": 3}, "attention"),
    "mpt": ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 3}, "attention"),
    "llama-dynamic-ntk": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic",
    ),
}


def tiny_config(family: str) -> PretrainedConfig:
    """Return a family's configuration."""
    name, changes = PROVEN[family] if family in PROVEN else REFUSED[family][:2]
    sizes = {} if changes is _GPT2 else _SIZES
    made: PretrainedConfig = getattr(transformers, name)(**{**sizes, **changes})
    return made


def tiny_model(family: str, *, attention: str = NAME) -> Any:
    """Return a random model in float32, the same at every call."""
    torch.manual_seed(11)
    make: Any = AutoModelForCausalLM.from_config
    model = make(tiny_config(family), attn_implementation=attention).eval().requires_grad_(False)
    return row_invariant(model) if attention == NAME else model


def tiny_info(model: Any) -> ModelInfo:
    """Return what preparation would say of it."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return ModelInfo(
        name="tiny",
        digest="0" * 64,
        tokenizer_digest="0" * 64,
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        context_max=getattr(config, "max_position_embeddings", 512),
        eos_ids=(),
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        parameters=0,
    )
