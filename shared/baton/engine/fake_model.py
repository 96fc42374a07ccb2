"""A prepared-model folder for the fake engine, small enough to write at every start.

Decides the fake model's names and sizes. Its tokenizer is a real ``tokenizers`` file: byte-level
without merges, so that token id and byte value are the same number and every text is encodable.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from baton.core.alphabet import byte_alphabet
from baton.engine.fake import EOS_ID
from baton.engine.info import INFO_FILE
from baton.ports.engine import ModelInfo

VOCAB_SIZE = 259
_SPECIAL = {"<|eos|>": EOS_ID, "<|im_start|>": 257, "<|im_end|>": 258}
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def fake_info(*, context_max: int = 8_192, layers: int = 2, kv_heads: int = 2) -> ModelInfo:
    """Return the fake model's :class:`ModelInfo`; what differs changes the digest."""
    sizes = f"{context_max} {layers} {kv_heads}"
    return ModelInfo(
        name="fake",
        digest=hashlib.sha256(f"fake {sizes}".encode()).hexdigest(),
        tokenizer_digest=hashlib.sha256(_tokenizer()).hexdigest(),
        architecture="Fake",
        vocab_size=VOCAB_SIZE,
        context_max=context_max,
        eos_ids=(EOS_ID, _SPECIAL["<|im_end|>"]),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=8,
        hidden_size=8,
        parameters=0,
    )


def write_fake_model(folder: Path) -> ModelInfo:
    """Write ``tokenizer.json``, the chat template and ``baton.json`` into ``folder``."""
    info = fake_info()
    folder.mkdir(parents=True, exist_ok=True)
    template = {"chat_template": _CHAT_TEMPLATE, "eos_token": "<|eos|>"}
    generation = {"eos_token_id": list(info.eos_ids)}
    files = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": msgspec.json.encode(template),
        "chat_template.jinja": _CHAT_TEMPLATE.encode(),
        "generation_config.json": msgspec.json.encode(generation),
        INFO_FILE: msgspec.json.encode(info),
    }
    for name, content in files.items():
        _replace(folder / name, content)
    return info


def _replace(path: Path, content: bytes) -> None:
    """Write at once: every process of a cluster writes this folder when it starts."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(content)
    fresh.replace(path)


def _tokenizer() -> bytes:
    added = [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, token_id in _SPECIAL.items()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": byte_alphabet(),
        "merges": [],
    }
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": model,
    }
    return msgspec.json.encode(document)
