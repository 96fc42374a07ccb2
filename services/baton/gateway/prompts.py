"""From what a client wrote to token ids: messages, texts, lists of ids.

Decides which messages are well formed and how long a text may be before it is tokenized; long ones
are tokenized in a thread, so that no stream waits for somebody's prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from baton.gateway.errors import ApiError, context_exceeded, invalid, not_supported
from baton.gateway.fields import Fields
from baton.gateway.tokens import ModelText, TemplateError

#: Texts up to this length are tokenized on the loop (about a millisecond).
INLINE_CHARS = 4_096
#: No text of this many characters a token of context can fit; it is refused without tokenizing.
CHARS_PER_TOKEN_MAX = 32
MESSAGES_MAX = 4_096
PROMPTS_MAX = 64

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

T = TypeVar("T")


class Prompts:
    """Makes prompts of one model."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        # One thread: tokenizing is CPU work, and a second one would only take the loop's core.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Stop the thread; what is queued is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def chat(self, fields: Fields, messages: list[dict[str, Any]], param: str) -> list[int]:
        """Return the ids of a chat's prompt."""
        continue_final = fields.flag("continue_final_message")
        add_prompt = fields.flag("add_generation_prompt", not continue_final)
        if continue_final and add_prompt:
            raise fields.fail("continue_final_message", "excludes 'add_generation_prompt'")
        if continue_final and messages[-1]["role"] != "assistant":
            raise fields.fail("continue_final_message", "needs a last message of the assistant")
        extra = fields.object("chat_template_kwargs")
        size = sum(len(message["content"]) for message in messages)
        self._check_size(size, param)

        def make() -> list[int]:
            prompt = self._text.render(
                messages,
                add_generation_prompt=add_prompt,
                continue_final_message=continue_final,
                extra=_template_names(extra),
            )
            return self._text.encode(prompt, special=False)

        try:
            ids = await self._run(make, size)
        except TemplateError as error:
            raise invalid(param, str(error)) from None
        if not ids:
            raise invalid(param, f"'{param}' gives an empty prompt")
        return ids

    async def plain(self, text: str, param: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text."""
        self._check_size(len(text), param)
        return await self._run(lambda: self._text.encode(text, special=special), len(text))

    async def completion(self, fields: Fields) -> list[list[int]]:
        """Return the prompts of a completions request, at least one, none empty."""
        value = fields.get("prompt")
        if value is None:
            raise invalid("prompt", "'prompt' is required")
        prompts = []
        for item in _prompt_items(fields, value):
            if isinstance(item, str):
                ids = await self.plain(item, "prompt")
            else:
                ids = list(self._check_ids(item))
            if not ids:
                raise fields.fail("prompt", "must not be empty")
            prompts.append(ids)
        return prompts

    def _check_ids(self, ids: list[Any]) -> list[int]:
        vocab, context = self._text.info.vocab_size, self._text.info.context_max
        if len(ids) > context:
            raise context_exceeded(context, len(ids), None, "prompt")
        holder = Fields({"prompt": ids})
        return list(holder.token_ids("prompt", vocab, context))

    def _check_size(self, chars: int, param: str) -> None:
        context = self._text.info.context_max
        if chars > context * CHARS_PER_TOKEN_MAX:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens, but '{param}' has "
                f"{chars} characters.",
                param,
                "context_length_exceeded",
            )

    async def _run(self, make: Callable[[], T], size: int) -> T:
        if size <= INLINE_CHARS:
            return make()
        return await self.offload(make)

    async def offload(self, work: Callable[[], T]) -> T:
        """Run CPU work off the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _prompt_items(fields: Fields, value: Any) -> Sequence[str | list[Any]]:
    """Split the four ways of writing prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fields.fail("prompt", "must be a string, token ids, or a list of those")
    if all(isinstance(item, str) for item in value) or all(
        isinstance(item, list) for item in value
    ):
        if len(value) > PROMPTS_MAX:
            raise fields.fail("prompt", f"may hold at most {PROMPTS_MAX} prompts")
        return value
    return [value]


def _template_names(extra: Fields | None) -> Mapping[str, Any]:
    """What a client may set in the template: not the names that Baton sets itself."""
    if extra is None:
        return {}
    reserved = {"messages", "add_generation_prompt", "continue_final_message", "bos_token"}
    return {key: value for key, value in extra.values.items() if key not in reserved}


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Check ``messages``; return them as the template wants them, content as one string."""
    value = fields.get("messages")
    if value is None:
        raise invalid("messages", "'messages' is required")
    if not isinstance(value, list) or not value:
        raise fields.fail("messages", "must be a list with at least one message")
    if len(value) > MESSAGES_MAX:
        raise fields.fail("messages", f"may hold at most {MESSAGES_MAX} messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(item: Any, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise invalid(path, f"'{path}' must be an object")
    message = Fields(item, path)
    role = message.text("role")
    if role is None:
        raise invalid(f"{path}.role", f"'{path}.role' is required")
    if role not in _ROLES:
        raise message.fail("role", f"must be one of {', '.join(_ROLES)}")
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = item.get("tool_calls")
    if calls is not None:
        if role != "assistant" or not isinstance(calls, list):
            raise message.fail("tool_calls", "must be a list, in a message of the assistant")
        for i, call in enumerate(calls):
            if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
                raise message.fail(f"tool_calls[{i}]", "must be an object with a 'function'")
        result["tool_calls"] = calls
    result["content"] = _content(message, required=not (role == "assistant" and calls))
    for key in ("name", "tool_call_id"):
        text = message.text(key)
        if text is not None:
            result[key] = text
    return result


def _content(message: Fields, *, required: bool) -> str:
    """One string, from a string or from text parts."""
    value = message.get("content")
    if value is None:
        if required:
            raise message.fail("content", "is required")
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise message.fail("content", "must be a string or a list of parts")
    texts = []
    for i, part in enumerate(value):
        key = f"content[{i}]"
        if not isinstance(part, dict):
            raise message.fail(key, "must be an object")
        kind = part.get("type")
        if kind in ("image_url", "input_image", "input_audio", "file", "input_file"):
            raise not_supported(message.name(f"{key}.type"), f"content of type '{kind}'")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise message.fail(f"{key}.type", "must be 'text'")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise message.fail(f"{key}.text", "must be a string")
        texts.append(text)
    return "".join(texts)
