"""Bad input over real HTTP: a 400 (or 404, 413, 415) that names the field, and nothing lost."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from baton.core.limits import Limits
from support.gateway_cluster import CHAT, GatewayCluster

CONTEXT = 8192


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayCluster]:
    limits = Limits(body_bytes_max=2**20)
    with GatewayCluster(tmp_path_factory.mktemp("gateway"), limits=limits) as running:
        yield running


def post(cluster: GatewayCluster, path: str, body: Any) -> tuple[httpx.Response, float]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    started = time.perf_counter()
    answer = cluster.http.post(path, content=content, headers={"content-type": "application/json"})
    return answer, time.perf_counter() - started


def expect_error(answer: httpx.Response, status: int, param: str | None) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert "/" not in error["message"].replace("/v1/", "").replace("application/json", "")
    return str(error["message"])


NUMBERS: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p")
        for value in (-2.5, 2.5, 1e308, -1e308, "hot", True, [], {}, [0.5])
    ),
    ("top_p", 0),
    *(("repetition_penalty", value) for value in (0, -1, 1e308, "x", False)),
    *(
        (name, value)
        for name in ("max_tokens", "max_completion_tokens")
        for value in (0, -1, 1e12, 1.5, True, "10", [], 10**18, 2**63, CONTEXT)
    ),
    *(("n", value) for value in (0, -1, 1000, 1.5, True, "2", 2**70)),
    *(("top_k", value) for value in (-2, 1.5, "3", True, 2**64)),
    *(("min_tokens", value) for value in (-1, 0.5, "x", 10**9)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "x", True, 1e30)),
    *(("top_logprobs", value) for value in (3, -1, 21, 1.5, "x", True)),
    *(("logprobs", value) for value in (1, "true", [])),
    *(("stream", value) for value in (1, "true", [])),
]
TEXTS: list[tuple[str, Any]] = [
    *(("stop", value) for value in ("", [""], ["a", ""], 5, [5], {}, ["x"] * 5000, "x" * 9000)),
    ("stop", "x" * (2**20 - 500)),
    *(("model", value) for value in (None, 5, [])),
    *(("stream_options", value) for value in ({"include_usage": True}, 5, [])),
    ("logit_bias", []),
    ("logit_bias", {"259": 1}),
    ("logit_bias", {"-1": 1, "abc": 2}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias.5", {"5": 101}),
    ("logit_bias.5", {"5": "x"}),
    ("logit_bias.5", {"5": None}),
    ("logit_bias", {str(i): 1 for i in range(2000)}),
    *(("stop_token_ids", value) for value in (5, "5", [-1], [259], [1.5], [True], [1] * 5000)),
    *(("allowed_token_ids", value) for value in ("x", [9999], ["5"])),
    *(("bad_words", value) for value in (5, [""], [5], ["x"] * 100, ["y" * 300])),
    *(("ignore_eos", value) for value in (1, "yes")),
    *(("skip_special_tokens", value) for value in (1, "yes")),
    *(("include_stop_str_in_output", value) for value in (1, "yes")),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("response_format.type", {"type": "xml"}),
    ("response_format.type", {}),
    ("response_format", "json"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tools", "x"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function"}),
    ("functions", [{"name": "f"}]),
    ("chat_template_kwargs", 5),
    ("modalities", ["audio"]),
]
MESSAGES: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", "hi"),
    ("messages", []),
    ("messages", {}),
    ("messages[0]", [123]),
    ("messages[0]", [None]),
    ("messages[0].role", [{}]),
    ("messages[0].role", [{"role": 123, "content": "x"}]),
    ("messages[0].role", [{"role": "robot", "content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": None}]),
    ("messages[0].content", [{"role": "user", "content": 123}]),
    ("messages[0].content", [{"role": "user", "content": {"a": 1}}]),
    ("messages[0].content[0]", [{"role": "user", "content": [5]}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
    (
        "messages[0].content[0].type",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    ("messages[1].name", [CHAT["messages"][0], {"role": "user", "content": "x", "name": 5}]),
    ("messages[0].tool_calls", [{"role": "user", "content": "x", "tool_calls": []}]),
    ("messages", [{"role": "user", "content": "x"}] * 5000),
]
TABLE = [*NUMBERS, *TEXTS, *MESSAGES]


@pytest.mark.parametrize(("param", "value"), TABLE, ids=range(len(TABLE)))
def test_wrong_fields_are_named(cluster: GatewayCluster, param: str, value: Any) -> None:
    """Each wrong value is a 400 in under 200 ms that names the field."""
    field = param.partition(".")[0].partition("[")[0]
    answer, seconds = post(cluster, "/v1/chat/completions", {**CHAT, field: value})
    message = expect_error(answer, 400, param)
    assert param.rpartition(".")[2].partition("[")[0] in message or "maximum context" in message
    tries = [seconds]
    while min(tries) >= 0.2 and len(tries) < 3:
        tries.append(post(cluster, "/v1/chat/completions", {**CHAT, field: value})[1])
    assert min(tries) < 0.2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'"text"',
        b"5",
        b"null",
        b"[]",
        b'{"model": NaN}',
        b'{"temperature": Infinity}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff\xfe"}',
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"[" * 100_000,
    ],
    ids=range(13),
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"]
)
def test_what_is_no_json_object_is_a_400(cluster: GatewayCluster, path: str, body: bytes) -> None:
    """Not JSON, not an object, NaN, lone surrogates, deep nesting: 400, never 500."""
    answer, _ = post(cluster, path, body)
    expect_error(answer, 400, None)


def test_all_wrong_logit_bias_keys_are_named(cluster: GatewayCluster) -> None:
    """Every bad key is in the message."""
    answer, _ = post(
        cluster, "/v1/chat/completions", {**CHAT, "logit_bias": {"x": 1, "5": 1, "900": 1}}
    )
    message = expect_error(answer, 400, "logit_bias")
    assert "'x'" in message
    assert "'900'" in message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        ([[]], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([1, "x"], "prompt"),
        ([259], "prompt"),
        ([-1], "prompt"),
        ([[1], [99999]], "prompt"),
        ([True], "prompt"),
        ([1.5], "prompt"),
        (["x"] * 65, "prompt"),
    ],
)
def test_prompts_that_are_none(cluster: GatewayCluster, prompt: Any, param: str) -> None:
    """Empty prompts and ids outside the vocabulary are 400."""
    answer, _ = post(cluster, "/v1/completions", {"model": "fake", "prompt": prompt})
    expect_error(answer, 400, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": True}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "echo": "yes"}, "echo"),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": 5}, "input"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [5]}, "input[0]"),
        ("/v1/responses", {"input": [{"type": "reasoning"}]}, "input[0].type"),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ("/v1/responses", {"input": "x", "tools": [{}]}, "tools"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "background": True}, "background"),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema"}}},
            "text.format",
        ),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
    ],
)
def test_other_endpoints_name_their_fields(
    cluster: GatewayCluster, path: str, body: dict[str, Any], param: str
) -> None:
    """The same care at every endpoint."""
    answer, _ = post(cluster, path, {"model": "fake", **body})
    expect_error(answer, 400, param)


@pytest.mark.parametrize(("param", "least"), [("max_tokens", 1), ("top_k", -1)])
def test_a_number_without_an_upper_bound_is_told_as_such(
    cluster: GatewayCluster, param: str, least: int
) -> None:
    """Nobody reads that max_tokens may be nine quintillion."""
    answer, _ = post(cluster, "/v1/chat/completions", {**CHAT, param: least - 1})
    assert expect_error(answer, 400, param) == f"'{param}' must be at least {least}"


def test_continuing_excludes_a_generation_prompt(cluster: GatewayCluster) -> None:
    """continue_final_message with add_generation_prompt, or after a user's message, is a 400."""
    for extra in ({"add_generation_prompt": True}, {}):
        answer, _ = post(
            cluster, "/v1/chat/completions", {**CHAT, "continue_final_message": True, **extra}
        )
        expect_error(answer, 400, "continue_final_message")


def test_context_is_named_before_streaming(cluster: GatewayCluster) -> None:
    """A prompt that leaves no room, or not enough, is a 400 with the limit, also for a stream."""
    long = [{"role": "user", "content": "x" * (CONTEXT + 1)}]
    for extra in ({}, {"stream": True}):
        answer, _ = post(cluster, "/v1/chat/completions", {**CHAT, "messages": long, **extra})
        message = expect_error(answer, 400, "messages")
        assert f"maximum context length is {CONTEXT}" in message
    answer, _ = post(cluster, "/v1/chat/completions", {**CHAT, "max_tokens": CONTEXT - 5})
    assert "maximum context length" in expect_error(answer, 400, "max_tokens")
    answer, _ = post(cluster, "/v1/completions", {"model": "fake", "prompt": [1] * 9000})
    assert "maximum context length" in expect_error(answer, 400, "prompt")
    answer, seconds = post(
        cluster, "/v1/completions", {"model": "fake", "prompt": "y" * (2**20 - 200)}
    )
    assert "maximum context length" in expect_error(answer, 400, "prompt")
    assert seconds < 0.6, "refused by its size, not tokenized"


def test_unknown_model_is_404(cluster: GatewayCluster) -> None:
    """An unknown model does not exist, for requests and for the list's items."""
    answer, _ = post(cluster, "/v1/chat/completions", {**CHAT, "model": "gpt-x"})
    assert "does not exist" in expect_error(answer, 404, "model")
    answer = cluster.http.get("/v1/models/other")
    expect_error(answer, 404, "model")


def test_methods_paths_and_types(cluster: GatewayCluster) -> None:
    """405 with Allow, 404, 415."""
    answer = cluster.http.get("/v1/chat/completions")
    expect_error(answer, 405, None)
    assert answer.headers["allow"] == "POST"
    expect_error(cluster.http.delete("/v1/models"), 405, None)
    expect_error(cluster.http.get("/nowhere"), 404, None)
    answer = cluster.http.post("/v1/completions", data={"a": "b"})
    expect_error(answer, 415, None)
    assert cluster.http.head("/health").status_code == 200


def test_large_body_is_refused_before_it_is_read(cluster: GatewayCluster) -> None:
    """413 by its declared length at once, and by its size when the length is not declared."""
    with socket.create_connection(("127.0.0.1", cluster.port), timeout=5) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 52428800\r\n\r\n"
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")

    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    try:
        answer = cluster.http.post(
            "/v1/completions",
            content=chunks(),
            headers={"content-type": "application/json"},
        )
        expect_error(answer, 413, None)
    except httpx.TransportError:
        pass  # cut while still sending: also a refusal
    assert cluster.call(lambda: cluster.serving.bodies._held) == 0


def test_the_next_request_is_answered(cluster: GatewayCluster) -> None:
    """After everything above the gateway answers as ever, and holds nothing."""
    answer, _ = post(cluster, "/v1/chat/completions", CHAT)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello from Baton!"
    assert cluster.exchange.open_streams == 0
    assert not cluster.log.getvalue().count(b"request_crashed")


def test_ignored_fields_are_ignored(cluster: GatewayCluster) -> None:
    """Unknown and bookkeeping fields change nothing."""
    extra = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "something_new": {"deep": [1]},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "stop": None,
        "logit_bias": None,
    }
    answer, _ = post(cluster, "/v1/chat/completions", {**CHAT, **extra})
    assert answer.status_code == 200, answer.text
