"""Answers over HTTP, streaming and whole, with httpx and the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from baton.core.outcomes import Ending, FinishReason, Reason
from support.gateway_cluster import CHAT, GatewayCluster, Script, prompt_ids
from support.sse_events import joined, parse, sse

TEXT = "Grüße 你好 👩‍👩‍👧 end"


def client(cluster: GatewayCluster, **values: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=cluster.url + "/v1", api_key="k", max_retries=0, timeout=10, **values
    )


# --- chat ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [False, True])
def test_chat_stream_is_the_exact_sequence(cluster: GatewayCluster, usage: bool) -> None:
    """Role chunk, content chunks, one finish chunk, the usage chunk if wanted, end mark."""
    cluster.script.ids = tuple(b"abcdefgh")
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = sse(cluster, "/v1/chat/completions", {**CHAT, **options})
    assert events.pop() == "[DONE]"
    last = events.pop() if usage else None
    head = {(e["id"], e["created"], e["model"], e["object"]) for e in events}
    assert len(head) == 1
    assert events[0]["id"].startswith("chatcmpl-")
    assert events[0]["object"] == "chat.completion.chunk"
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta.keys() == {"content"} for delta in deltas[1:-1])
    assert deltas[-1] == {}
    finishes = [e["choices"][0]["finish_reason"] for e in events]
    assert finishes == [None] * (len(events) - 1) + ["stop"]
    assert all("usage" not in e for e in events)
    assert joined(events) == "abcdefgh"
    whole = cluster.http.post("/v1/chat/completions", json=CHAT).json()
    if last is not None:
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 9
    assert whole["usage"]["prompt_tokens"] == len(prompt_ids(cluster.works[whole["id"]].spec))


def test_headers_of_a_stream(cluster: GatewayCluster) -> None:
    """Nothing on the way may buffer or change the stream; the request's id comes back."""
    answer = cluster.http.post(
        "/v1/chat/completions", json={**CHAT, "stream": True}, headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-should-retry"] == "false"
    bad = cluster.http.get("/v1/models", headers={"x-request-id": "a b" * 100})
    assert len(bad.headers["x-request-id"]) == 32


@pytest.mark.parametrize("per_step", [1, 2, 3, 100])
@pytest.mark.parametrize("stop", [None, "好", ["👧 e", "zz"], "nowhere"])
def test_stream_and_whole_are_one_text(cluster: GatewayCluster, per_step: int, stop: Any) -> None:
    """Joined deltas are the whole answer's text, split characters and stops included."""
    cluster.script = Script(ids=tuple(TEXT.encode()), per_step=per_step)
    body = {**CHAT, "stop": stop}
    events = sse(cluster, "/v1/chat/completions", body)
    whole = cluster.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    stops = [stop] if isinstance(stop, str) else (stop or [])
    cut = min((TEXT.find(s) for s in stops if s in TEXT), default=len(TEXT))
    assert joined(events) == whole["message"]["content"] == TEXT[:cut]
    assert whole["finish_reason"] == "stop"
    assert all("\ufffd" not in json.dumps(e, ensure_ascii=False) for e in events)


def test_stop_string_ends_the_work(cluster: GatewayCluster) -> None:
    """A stop in the middle of a message: decode is told, the tokens up to it are counted."""
    cluster.script = Script(ids=tuple(b"one two three four"), per_step=9, endless=True)
    body = {**CHAT, "stop": " t", "max_tokens": 500}
    whole = cluster.http.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == "one"
    assert whole["usage"]["completion_tokens"] == 5
    work = cluster.works[whole["id"]]
    outcome = cluster.wait(lambda: work.ended)
    assert outcome is not None
    assert outcome.finish is FinishReason.STOP
    assert outcome.completion_tokens == 5
    assert work.sent <= 18


def test_stop_text_may_be_kept(cluster: GatewayCluster) -> None:
    """include_stop_str_in_output keeps the stop string."""
    cluster.script.ids = tuple(b"one two three")
    body = {**CHAT, "stop": ["two"], "include_stop_str_in_output": True}
    whole = cluster.http.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == "one two"


def test_length_is_exact(cluster: GatewayCluster) -> None:
    """max_tokens cuts with finish_reason length; half a character at the cut is U+FFFD."""
    cluster.script.ids = tuple("aé你".encode())
    for key, limit, text in (
        ("max_tokens", 2, "a\ufffd"),
        ("max_completion_tokens", 3, "aé"),
        ("max_tokens", 5, "aé\ufffd"),
    ):
        body = {**CHAT, key: limit}
        whole = cluster.http.post("/v1/chat/completions", json=body).json()
        assert whole["choices"][0]["message"]["content"] == text
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == limit
        assert joined(sse(cluster, "/v1/chat/completions", body)) == text


def test_ignore_eos_reaches_max_tokens(cluster: GatewayCluster) -> None:
    """With ignore_eos the model's end ids are no stop ids; other stop ids still are."""
    cluster.script = Script(ids=(97, 256), endless=True)
    whole = cluster.http.post(
        "/v1/chat/completions", json={**CHAT, "ignore_eos": True, "max_tokens": 7}
    ).json()
    assert whole["usage"]["completion_tokens"] == 7
    assert whole["choices"][0]["message"]["content"] == "aaaa"
    whole = cluster.http.post(
        "/v1/chat/completions", json={**CHAT, "stop_token_ids": [97], "max_tokens": 7}
    ).json()
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_n_choices(cluster: GatewayCluster) -> None:
    """n is n requests of one parent with one seed and the prompt counted once; the role chunks
    come first, in order."""
    cluster.script.ids = lambda spec: tuple(f"choice {spec.sampling.choice}".encode())
    body = {**CHAT, "n": 3, "seed": 7}
    whole = cluster.http.post("/v1/chat/completions", json=body).json()
    assert [c["message"]["content"] for c in whole["choices"]] == [f"choice {k}" for k in range(3)]
    specs = [work.spec for work in cluster.works.values()]
    assert {spec.parent_id for spec in specs} == {whole["id"]}
    assert {spec.sampling.seed for spec in specs} == {7}
    assert whole["usage"]["prompt_tokens"] == specs[0].prompt_tokens
    assert whole["usage"]["completion_tokens"] == 27
    events = sse(cluster, "/v1/chat/completions", body)
    assert [e["choices"][0]["index"] for e in events[:3]] == [0, 1, 2]
    assert all("role" in e["choices"][0]["delta"] for e in events[:3])
    for k in range(3):
        mine = [e for e in events[:-1] if e["choices"][0]["index"] == k]
        assert joined(mine) == f"choice {k}"
        assert [e["choices"][0]["finish_reason"] for e in mine].count("stop") == 1


def test_a_request_without_a_seed_gets_one(cluster: GatewayCluster) -> None:
    """Seeds are drawn at admission, one a request."""
    for _ in range(2):
        cluster.http.post("/v1/chat/completions", json=CHAT)
    seeds = {work.spec.sampling.seed for work in cluster.works.values()}
    assert len(seeds) == 2
    assert 0 not in seeds


@pytest.mark.parametrize("per_step", [1, 4, 100])
def test_logprobs_are_complete(cluster: GatewayCluster, per_step: int) -> None:
    """As many entries as tokens, streamed or not, in order; their bytes join to the text."""
    text = "ab 👩 end###"
    cluster.script = Script(ids=tuple(text.encode()), per_step=per_step)
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": "##!"}
    whole = cluster.http.post("/v1/chat/completions", json=body).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for e in sse(cluster, "/v1/chat/completions", body)[:-1]
        if e["choices"][0]["logprobs"]
        for entry in e["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == entries
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == text
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    zero = cluster.http.post(
        "/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 0}
    ).json()
    assert zero["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    none = cluster.http.post("/v1/chat/completions", json={**CHAT, "logprobs": False}).json()
    assert none["choices"][0]["logprobs"] is None


def test_continuous_usage_and_token_ids(cluster: GatewayCluster) -> None:
    """The extensions: usage on every chunk, never falling; ids beside the text."""
    cluster.script = Script(ids=tuple(b"abc"), cached_tokens=4)
    body = {
        **CHAT,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    events = sse(cluster, "/v1/chat/completions", body)[:-1]
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    ids = [i for e in events if e["choices"] for i in e["choices"][0].get("token_ids", [])]
    assert ids == [*b"abc", 256]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def test_message_forms_give_the_same_prompt(cluster: GatewayCluster) -> None:
    """Text parts are their text; developer is system; tool results and calls are taken."""
    forms = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}],
        [
            {"role": "developer", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
        ],
    ]
    for messages in forms:
        cluster.http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    prompts = {bytes(work.spec.prompt) for work in cluster.works.values()}
    assert len(prompts) == 1
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]
    answer = cluster.http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert answer.status_code == 200, answer.text


def test_final_message_can_be_continued(cluster: GatewayCluster) -> None:
    """continue_final_message ends the prompt inside the assistant's message."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once upon"}]
    cluster.http.post(
        "/v1/chat/completions",
        json={**CHAT, "messages": messages, "continue_final_message": True},
    )
    prompt = bytes(i for i in prompt_ids(cluster.only_work().spec) if i < 256)
    assert prompt.endswith(b"assistant\nOnce upon")


def test_one_ledger_transition_a_request(cluster: GatewayCluster) -> None:
    """The gateway calls the ledger once a request, however many tokens."""
    before = len(cluster.ledger.ops)
    sse(cluster, "/v1/chat/completions", CHAT)
    assert len(cluster.ledger.ops) == before + 1
    assert cluster.ledger.ops[-1].outcome.ending is Ending.COMPLETED  # type: ignore[union-attr]


# --- the official client ------------------------------------------------------------------------


def test_openai_package(cluster: GatewayCluster) -> None:
    """The official client, its stream helper included, is satisfied."""
    cluster.script.ids = tuple(TEXT.encode())
    api = client(cluster)
    assert [model.id for model in api.models.list()] == ["fake"]
    answer = api.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == TEXT
    with api.chat.completions.stream(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        stream_options={"include_usage": True},
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert final.usage == answer.usage
    completion = api.completions.create(model="fake", prompt="x", max_tokens=100)
    assert completion.choices[0].text == TEXT
    response = api.responses.create(model="fake", input="hi", instructions="be brief")
    assert response.output_text == TEXT
    kinds = []
    with api.responses.stream(model="fake", input="hi") as events:
        for event in events:
            kinds.append(event.type)
        assert events.get_final_response().output_text == TEXT
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_response_events_are_numbered(cluster: GatewayCluster) -> None:
    """Sequence numbers are 0, 1, 2 ...; event: is the type; a cut answer is incomplete."""
    answer = cluster.http.post(
        "/v1/responses",
        json={"model": "fake", "input": "x", "stream": True, "max_output_tokens": 3},
    )
    names = [line[7:] for line in answer.text.split("\n") if line.startswith("event: ")]
    events = parse(answer.text)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events] == names
    assert names[-1] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["response"]["usage"]["output_tokens"] == 3


# --- completions --------------------------------------------------------------------------------


def test_completions_of_several_prompts(cluster: GatewayCluster) -> None:
    """index = prompt * n + k, for all four ways of writing prompts."""
    cluster.script.ids = lambda spec: tuple(
        f"{prompt_ids(spec)[0]}.{spec.sampling.choice}".encode()
    )
    for prompt, firsts in (
        ("a", [97]),
        (["a", "b"], [97, 98]),
        ([5, 6], [5]),
        ([[5], [6]], [5, 6]),
    ):
        body = {"model": "fake", "prompt": prompt, "n": 2, "max_tokens": 20}
        whole = cluster.http.post("/v1/completions", json=body).json()
        assert whole["object"] == "text_completion"
        assert [c["text"] for c in whole["choices"]] == [
            f"{first}.{k}" for first in firsts for k in range(2)
        ]
        assert [c["index"] for c in whole["choices"]] == list(range(2 * len(firsts)))


def test_completion_defaults_logprobs_and_echo(cluster: GatewayCluster) -> None:
    """16 tokens by default; the four log-probability lists; echo repeats the prompt."""
    cluster.script = Script(ids=(120,), endless=True)
    body = {"model": "fake", "prompt": "x", "logprobs": 2}
    whole = cluster.http.post("/v1/completions", json=body).json()
    assert whole["usage"]["completion_tokens"] == 16
    logprobs = whole["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {16}
    assert logprobs["text_offset"] == list(range(16))
    streamed = sse(cluster, "/v1/completions", body)[:-1]
    merged = [t for e in streamed for t in (e["choices"][0]["logprobs"] or {}).get("tokens", [])]
    assert merged == logprobs["tokens"]
    body = {"model": "fake", "prompt": "before ", "echo": True, "max_tokens": 2}
    echoed = cluster.http.post("/v1/completions", json=body).json()
    assert echoed["choices"][0]["text"] == "before xx"
    text = "".join(e["choices"][0]["text"] for e in sse(cluster, "/v1/completions", body)[:-1])
    assert text == "before xx"


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (Reason.OVERLOADED, 429, openai.RateLimitError),
        (Reason.NO_DECODE_WORKER, 503, openai.InternalServerError),
        (Reason.NO_PREFILL_WORKER, 503, openai.InternalServerError),
        (Reason.LEDGER_UNAVAILABLE, 503, openai.InternalServerError),
        (Reason.TOO_LONG, 400, openai.BadRequestError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_http_errors(
    cluster: GatewayCluster, reason: Reason, status: int, kind: type[Exception], stream: bool
) -> None:
    """A refusal is a status with its code before the first byte, with Retry-After if a retry
    may help."""
    cluster.script.refuse = reason
    answer = cluster.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == str(reason)
    assert answer.headers.get("retry-after") == (None if status == 400 else "2")
    assert "x-should-retry" not in answer.headers
    with pytest.raises(kind):
        client(cluster).chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], stream=stream
        )


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_an_http_error(
    cluster: GatewayCluster, stream: bool
) -> None:
    """500 with the code, and the client is told not to repeat what was admitted."""
    cluster.script.fail_after = 0
    answer = cluster.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "worker_lost"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("with_ids", [False, True], ids=["alone", "with ids"])
def test_failure_in_mid_stream_is_an_error_event(cluster: GatewayCluster, with_ids: bool) -> None:
    """What was generated, then one error event; no finish, no end mark; the client raises."""
    cluster.script = Script(fail_after=5, per_step=5, fail_with_ids=with_ids)
    events = sse(cluster, "/v1/chat/completions", CHAT)
    assert events[-1]["error"]["code"] == "worker_lost"
    assert joined(events[:-1]) == "Hello"
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    stream = client(cluster).chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], stream=True
    )
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass


def test_failure_with_text_held_back_is_an_error_event(cluster: GatewayCluster) -> None:
    """Text that a stop string held back is shown with the failure, and does not hide it."""
    cluster.script = Script(fail_after=5)
    events = sse(cluster, "/v1/chat/completions", {**CHAT, "stop": ["lo there"]})
    assert events[-1]["error"]["code"] == "worker_lost"
    assert joined(events[:-1]) == "Hello"


@pytest.mark.parametrize("with_ids", [False, True], ids=["alone", "with ids"])
def test_failure_of_a_whole_answer_is_an_error(cluster: GatewayCluster, with_ids: bool) -> None:
    """Never a 200 with the part that was generated."""
    cluster.script = Script(fail_after=5, per_step=5, fail_with_ids=with_ids)
    answer = cluster.http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "worker_lost"


def test_contradicting_tokens_are_an_error_never_an_answer(cluster: GatewayCluster) -> None:
    """A worker that takes back what it sent ends the stream with an integrity error."""
    cluster.script = Script(stall_after=4)
    with cluster.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as answer:
        work = cluster.wait(lambda: next(iter(cluster.works.values()), None))
        cluster.wait(lambda: work.sent == 4)
        work.sent, cluster.script.stall_after = 2, None
        work.ids[2:4] = [1, 2]
        cluster.call(lambda: cluster.step(work))
        answer.read()
    events = parse(answer.text)
    assert events[-1]["error"]["code"] == "integrity"
    assert joined(events[:-1]) == "Hell"


def test_keep_alive_while_what_happens_cannot_be_seen(cluster: GatewayCluster) -> None:
    """Special tokens give no text: the client still sees that the stream is alive."""
    cluster.script = Script(ids=(*b"a", *(258,) * 100), step_s=0.01)
    body = {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 101}
    answer = cluster.http.post("/v1/chat/completions", json=body)
    assert answer.text.count(": keep-alive\n\n") >= 2
    assert answer.text.endswith("data: [DONE]\n\n")


def test_keep_alive_while_nothing_happens(cluster: GatewayCluster) -> None:
    """Comments while the request waits, none while tokens flow; then the answer as ever."""
    cluster.script = Script(first_s=1.0)
    answer = cluster.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.text.count(": keep-alive\n\n") >= 2
    assert joined(parse(answer.text)) == "Hello from Baton!"
    cluster.script = Script(step_s=0.01)
    answer = cluster.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert ":" not in {line[:1] for line in answer.text.split("\n")}


def test_the_first_chunk_does_not_wait_for_the_second_token(cluster: GatewayCluster) -> None:
    """Nothing is buffered: with one token out, its chunk is at the client."""
    cluster.script = Script(stall_after=1)
    with cluster.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as answer:
        text = ""
        for chunk in answer.iter_text():
            text += chunk
            if '"content":"H"' in text:
                break
        assert cluster.only_work().sent == 1


def test_ledger_away_does_not_cost_the_answer(cluster: GatewayCluster) -> None:
    """With the ledger away, answers are complete and correct."""
    cluster.ledger.away = True
    try:
        assert joined(sse(cluster, "/v1/chat/completions", CHAT)) == "Hello from Baton!"
    finally:
        cluster.ledger.away = False
