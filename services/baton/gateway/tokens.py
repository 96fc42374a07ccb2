"""The model's tokenizer and chat template, without torch or transformers.

Decides how a prompt becomes ids and which bytes an id stands for. The template is the model's own
and runs in jinja2's immutable sandbox, with the few names transformers gives it.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
import orjson
from tokenizers import Tokenizer

from baton.core.alphabet import byte_alphabet
from baton.ports.engine import ModelInfo

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class ModelFolderError(ValueError):
    """The prepared model's folder is missing or broken; the text says what and where."""


class TemplateError(ValueError):
    """The chat template refused the messages; the text is the template's own."""


class ModelText:
    """Everything about the model that has to do with text. Immutable after loading."""

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        document: Mapping[str, Any],
        template: str,
        special: Mapping[str, str],
    ) -> None:
        self.info = info
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._decoding = _decoding_of(document.get("decoder"))
        self.strip_first_space = self._decoding == "metaspace" and _strips_first(document)
        self._bytes: dict[int, bytes] = {}
        self._names = dict(special)
        self._template = _compile(template) if template else None

    # --- prompts --------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a chat.

        Raises:
            TemplateError: the template refused the messages.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        try:
            text: str = self._template.render(
                **(dict(extra or {})),
                **self._names,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from None
        if continue_final_message:
            final = str(messages[-1].get("content") or "").rstrip()
            at = text.rfind(final)
            if not final or at < 0:
                raise TemplateError("the final message cannot be continued with this template")
            text = text[: at + len(final)]
        return text

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of ``text``; ``special`` adds what the tokenizer puts around a text."""
        # Of the ways to encode, only the batch ones let other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    def text_of(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ``ids``, each byte that is no UTF-8 as U+FFFD."""
        parts = [self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i))]
        raw = b"".join(parts)
        if self.strip_first_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    # --- the Vocabulary of baton.gateway.text ---------------------------------------------------

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        raw = self._bytes.get(token_id)
        if raw is None:
            raw = self._bytes[token_id] = self._compute_bytes(token_id)
        return raw

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no text."""
        return token_id in self._special

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._decoding == "bytes":
            return b"".join(_BYTE_OF[char] if char in _BYTE_OF else char.encode() for char in token)
        if self._decoding == "metaspace":
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(match[1], 16)])
            return token.replace(_SPACE, " ").encode()
        raise AssertionError("unreachable: load() refuses other decoders")


def load_model_text(folder: Path) -> ModelText:
    """Load a prepared model's text side.

    Raises:
        ModelFolderError: a file is missing or not what it should be.
    """
    info_file = folder / "baton.json"
    tokenizer_file = folder / "tokenizer.json"
    try:
        info = msgspec.json.decode(info_file.read_bytes(), type=ModelInfo)
        raw = tokenizer_file.read_bytes()
    except OSError as error:
        raise ModelFolderError(
            f"no prepared model in {folder}: {error.strerror}: {error.filename}"
        ) from None
    except msgspec.MsgspecError as error:
        raise ModelFolderError(f"{info_file} is broken: {error}") from None
    try:
        document = orjson.loads(raw)
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # tokenizers raises bare Exception for a broken file
        raise ModelFolderError(f"{tokenizer_file} is broken: {error}") from None
    # One text at a time: a pool of threads would only take cores from the engine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if _decoding_of(document.get("decoder")) == "":
        kind = (document.get("decoder") or {}).get("type", "none")
        raise ModelFolderError(f"{tokenizer_file}: decoder {kind!r} is not supported")
    template, special = _template_of(folder)
    return ModelText(info, tokenizer, document, template, special)


def _template_of(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the chat template and the names of special tokens it may use."""
    template = ""
    special: dict[str, str] = {}
    config_file = folder / "tokenizer_config.json"
    if config_file.exists():
        try:
            config = orjson.loads(config_file.read_bytes())
        except orjson.JSONDecodeError as error:
            raise ModelFolderError(f"{config_file} is broken: {error}") from None
        chosen = config.get("chat_template") or ""
        if isinstance(chosen, list):
            named = {entry["name"]: entry["template"] for entry in chosen}
            chosen = named.get("default", "")
        template = chosen
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = config.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                special[name] = value
    template_file = folder / "chat_template.jinja"
    if template_file.exists():
        template = template_file.read_text(encoding="utf-8")
    return template, special


def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelFolderError(f"the chat template does not compile: {error}") from None


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def _tojson(value: object, indent: int | None = None) -> str:
    """As transformers: no HTML escapes, non-ASCII as it is, blanks after separators."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _decoding_of(decoder: Mapping[str, Any] | None) -> str:
    """Which of the two ways of writing bytes as tokens the tokenizer uses; empty: neither."""
    if decoder is None:
        return ""
    kinds = {decoder.get("type")}
    if decoder.get("type") == "Sequence":
        kinds = {part.get("type") for part in decoder.get("decoders", ())}
    if "ByteLevel" in kinds:
        return "bytes"
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return "metaspace"
    return ""


def _strips_first(document: Mapping[str, Any]) -> bool:
    """Whether the decoder drops the space that the tokenizer put before the text."""
    decoder = document["decoder"]
    parts = decoder.get("decoders", [decoder])
    for part in parts:
        if part.get("type") == "Strip" and part.get("start"):
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    return False


#: GPT-2's printable stand-in of each byte.
_BYTE_OF = {letter: bytes([byte]) for letter, byte in byte_alphabet().items()}
