"""Streams that are cut and resumed: what comes after joins what came before, byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import httpx
import msgspec
import pytest

from baton.core.ids import Peer
from baton.core.limits import Limits
from baton.core.outcomes import Ending, Reason
from baton.gateway.numbering import Numbering, Position
from baton.gateway.telling import resume
from baton.ports.ledger import ClaimResumable
from baton.runtime.settings import GatewayConfig
from baton.sim.resumables import ResumableModel
from support.gateway_cluster import DECODE, PREFILL, ROUTER, GatewayCluster, Script

CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
}
#: Characters of one to four bytes, one token a byte, and a stop string's beginning in the middle.
TEXT = "Grüße 你好 👩‍👩‍👧 STO STOP"
RESUME = {"X-Baton-Resume": "20"}


@dataclass
class Cut:
    """A stream that its client has read a part of."""

    token: str
    events: list[bytes] = field(default_factory=list)

    @property
    def last_id(self) -> str:
        return event_id(self.events[-1])


def event_id(event: bytes) -> str:
    found = re.match(rb"id: (\S+)\n", event)
    assert found, event
    return found[1].decode()


def split(body: bytes) -> list[bytes]:
    """Return the events of a stream as they came, keep-alives left out."""
    return [part + b"\n\n" for part in body.split(b"\n\n") if part and not part.startswith(b":")]


def text_of(events: list[bytes]) -> str:
    """Join what a chat's stream says."""
    out = []
    for event in events:
        data = event.split(b"data: ", 1)[1].strip()
        if data != b"[DONE]":
            for choice in json.loads(data).get("choices", ()):
                out.append(choice["delta"].get("content") or "")
    return "".join(out)


def whole(cluster: GatewayCluster, path: str, body: dict[str, Any]) -> tuple[str, bytes]:
    """Stream without a disturbance; return the token and all bytes."""
    answer = cluster.http.post(path, json=body, headers=RESUME)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-baton-resume-token"], answer.content


def resumed(cluster: GatewayCluster, token: str, last: str = "", **headers: str) -> httpx.Response:
    """Resume; the whole answer is waited for."""
    headers = {**({"Last-Event-ID": last} if last else {}), **headers}
    return cluster.http.get(f"/v1/requests/{token}/events", headers=headers)


@contextmanager
def open_stream(cluster: GatewayCluster, body: dict[str, Any]) -> Iterator[HTTPResponse]:
    """A client whose connection is closed at the end, whatever it has read."""
    connection = HTTPConnection("127.0.0.1", cluster.port, timeout=10)
    headers = {"Content-Type": "application/json", **RESUME}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    try:
        yield response
    finally:
        connection.close()


def read_events(response: HTTPResponse, count: int) -> list[bytes]:
    """Read the next ``count`` events."""
    found: list[bytes] = []
    lines: list[bytes] = []
    while len(found) < count:
        line = response.readline()
        assert line, "the stream ended early"
        lines.append(line)
        if line == b"\n":
            event = b"".join(lines)
            lines = []
            if not event.startswith(b":"):
                found.append(event)
    return found


def cut_after(cluster: GatewayCluster, body: dict[str, Any], count: int) -> Cut:
    """Stream, and break the connection after ``count`` events."""
    with open_stream(cluster, body) as response:
        cut = Cut(response.headers["x-baton-resume-token"], read_events(response, count))
    return cut


@pytest.fixture(scope="module")
def ledger() -> ResumableModel:
    return ResumableModel()


@pytest.fixture(scope="module")
def first(
    tmp_path_factory: pytest.TempPathFactory, ledger: ResumableModel
) -> Iterator[GatewayCluster]:
    with GatewayCluster(tmp_path_factory.mktemp("first"), resumables=ledger) as running:
        yield running


@pytest.fixture(scope="module")
def second(
    tmp_path_factory: pytest.TempPathFactory, ledger: ResumableModel
) -> Iterator[GatewayCluster]:
    folder = tmp_path_factory.mktemp("second")
    with GatewayCluster(folder, resumables=ledger, me=Peer("gateway-1", 12)) as running:
        yield running


@pytest.fixture(autouse=True)
def scripts(first: GatewayCluster, second: GatewayCluster) -> None:
    """Both gateways' clusters answer alike, as any two with the same model do."""
    for cluster in (first, second):
        cluster.script = Script(ids=tuple(TEXT.encode()), step_s=0.003)
        cluster.works.clear()
        cluster.ledger.away = False


# --- what comes after an event ------------------------------------------------------------------

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "usage": (
        "/v1/chat/completions",
        {**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "stop": ("/v1/chat/completions", {**CHAT, "stop": ["STOP", "👧 zz"]}),
    "kept stop": (
        "/v1/chat/completions",
        {**CHAT, "stop": "STOP", "include_stop_str_in_output": True},
    ),
    "length": ("/v1/chat/completions", {**CHAT, "max_tokens": 12}),
    "logprobs": (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ),
    "completion": (
        "/v1/completions",
        {"model": "fake", "prompt": "say", "max_tokens": 60, "stream": True, "echo": True},
    ),
    "response": ("/v1/responses", {"model": "fake", "input": "hi", "stream": True}),
    "cut response": (
        "/v1/responses",
        {"model": "fake", "input": "hi", "stream": True, "max_output_tokens": 9},
    ),
}


def check_every_rest(first: GatewayCluster, gateway: GatewayCluster, name: str) -> None:
    """Stream at ``first``, and resume at ``gateway`` after each event."""
    path, body = STREAMS[name]
    token, said = whole(first, path, body)
    events = split(said)
    ids = [event_id(event) for event in events]
    assert len(set(ids)) == len(ids), "two events with one id"
    for position, last in enumerate(["", *ids]):
        answer = resumed(gateway, token, last)
        rest = b"".join(events[position:])
        assert answer.status_code == (200 if rest else 204)
        assert answer.content == rest, f"after {last}"


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_what_comes_after_any_event_is_the_rest(
    first: GatewayCluster, second: GatewayCluster, name: str, where: str
) -> None:
    """From every event on, in the middle of a character or of a stop string too: the same bytes."""
    check_every_rest(first, first if where == "here" else second, name)


@pytest.mark.parametrize("name", ["chat", "stop", "response"])
def test_a_resume_that_repeats_an_event_is_noticed(
    first: GatewayCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above fail if the event that a client has is sent once more."""
    begin = Numbering.__init__

    def mutant(self: Numbering, choices: int, after: Position | None = None) -> None:
        steps = after.steps if after is not None else ()
        if any(steps):
            after = Position(tuple(max(0, count - 1) for count in steps))
        begin(self, choices, after)

    monkeypatch.setattr(Numbering, "__init__", mutant)
    with pytest.raises(AssertionError, match="after"):
        check_every_rest(first, first, name)


def test_every_way_to_cut_the_ids_into_messages_is_one_stream(first: GatewayCluster) -> None:
    """However many ids come at once, the events and their ids are the same."""
    said = []
    for per_step in (1, 2, 7, 100):
        first.script.per_step = per_step
        body = whole(first, "/v1/chat/completions", {**CHAT, "seed": 1})[1]
        own = json.loads(split(body)[0].split(b"data: ")[1])
        for word in (own["id"], own["resume_token"].rpartition(".")[2], str(own["created"])):
            body = body.replace(word.encode(), b"?")
        said.append(body)
    assert len(set(said)) == 1


def test_choices_are_numbered_each_for_itself(first: GatewayCluster) -> None:
    """With n > 1 an id tells how far each choice is, and each goes on from there."""
    first.script.ids = lambda spec: tuple(f"choice {spec.sampling.choice} ü".encode())
    token, said = whole(first, "/v1/chat/completions", {**CHAT, "n": 3})
    events = split(said)

    def of(chosen: list[bytes], index: int) -> list[bytes]:
        parts = [event.split(b"\n", 1)[1] for event in chosen]
        return [part for part in parts if b'"index":%d,' % index in part]

    for position in range(len(events)):
        answer = resumed(first, token, event_id(events[position]))
        for index in range(3):
            assert of(split(answer.content), index) == of(events[position + 1 :], index)
        assert answer.status_code == 204 or answer.content.endswith(b"data: [DONE]\n\n")


# --- connections that break ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 9, 20])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_stream_that_was_cut_goes_on(
    first: GatewayCluster, second: GatewayCluster, count: int, where: str
) -> None:
    """The client's network breaks in the middle; the rest joins what it has, at any gateway."""
    cut = cut_after(first, CHAT, count)
    answer = resumed(first if where == "here" else second, cut.token, cut.last_id)
    assert answer.status_code == 200
    assert answer.headers["x-baton-resume-token"] == cut.token
    assert text_of(cut.events + split(answer.content)) == TEXT
    assert answer.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("age_s", [40, 600])
def test_a_stream_that_has_run_for_long_goes_on_elsewhere(
    first: GatewayCluster, second: GatewayCluster, ledger: ResumableModel, age_s: int
) -> None:
    """Turns of claims grow with the time since the opening: a late one is one that routers take."""
    cut = cut_after(first, CHAT, 5)
    (record,) = [each for key, each in ledger.records.items() if cut.token.startswith(key)]
    record.opened_at -= age_s * 1_000
    answer = resumed(second, cut.token, cut.last_id)
    assert text_of(cut.events + split(answer.content)) == TEXT


def test_nothing_is_computed_twice_for_a_client_that_comes_back_here(
    first: GatewayCluster,
) -> None:
    """The request goes on while nobody reads, under its own id, to its end."""
    first.script.step_s = 0.01
    cut = cut_after(first, CHAT, 5)
    work = first.only_work()
    first.wait(lambda: work.ended)
    assert work.ended is not None
    assert work.ended.ending is Ending.COMPLETED
    answer = resumed(first, cut.token, cut.last_id)
    assert text_of(cut.events + split(answer.content)) == TEXT
    assert len(first.works) == 1


def test_who_did_not_ask_is_cancelled_at_once(first: GatewayCluster) -> None:
    """A disconnect cancels, as ever."""
    first.script.endless = True
    connection = HTTPConnection("127.0.0.1", first.port, timeout=10)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(CHAT), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.headers["x-baton-resume-token"] is None
    assert not response.readline().startswith(b"id:")
    connection.close()
    work = first.only_work()
    outcome = first.wait(lambda: work.ended)
    assert outcome is not None
    assert outcome.ending is Ending.CANCELLED


def test_a_cut_stream_may_be_cut_again(first: GatewayCluster, second: GatewayCluster) -> None:
    """Resumed twice, at both gateways, with every part joining the one before."""
    for cluster in (first, second):
        cluster.script.step_s = 0.01
    cut = cut_after(first, CHAT, 4)
    connection = HTTPConnection("127.0.0.1", second.port, timeout=10)
    path = f"/v1/requests/{cut.token}/events"
    connection.request("GET", path, headers={"Last-Event-ID": cut.last_id})
    cut.events += read_events(connection.getresponse(), 6)
    connection.close()
    answer = resumed(first, cut.token, cut.last_id)
    assert text_of(cut.events + split(answer.content)) == TEXT


def test_the_later_of_two_readers_wins(first: GatewayCluster) -> None:
    """The earlier one gets a clear end, without an end mark, and the later one everything."""
    first.script.step_s = 0.02
    with open_stream(first, CHAT) as response:
        token = response.headers["x-baton-resume-token"]
        read_events(response, 3)
        answer = resumed(first, token)
        rest = split(response.read())
    assert text_of(split(answer.content)) == TEXT
    last = json.loads(rest[-1].split(b"data: ")[1])
    assert last["error"]["code"] == str(Reason.SUPERSEDED)
    assert not rest[-1].startswith(b"id:")
    assert all(b"[DONE]" not in event for event in rest)


def test_asking_for_the_head_takes_no_answer_from_its_reader(
    first: GatewayCluster, second: GatewayCluster
) -> None:
    """A HEAD tells its client nothing of the answer, so it must not cost another one its own."""
    first.script.step_s = 0.02
    with open_stream(first, CHAT) as response:
        token = response.headers["x-baton-resume-token"]
        events = read_events(response, 3)
        for cluster in (first, second):
            answer = cluster.http.head(f"/v1/requests/{token}/events")
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
            answer = cluster.http.head(f"/v1/requests/{token}")
            assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE")
        rest = split(response.read())
    assert text_of(events + rest) == TEXT
    assert rest[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_readers_that_come_in_one_turn_all_get_the_answer(
    first: GatewayCluster, second: GatewayCluster, where: str
) -> None:
    """An answer that is complete has no later reader: each is told all of it, nobody waits."""
    token, _ = whole(first, "/v1/chat/completions", CHAT)
    cluster = first if where == "here" else second

    async def read() -> int:
        telling = await resume(cluster.serving, token, "", "")
        count = 0
        while not telling.generation.done:
            count += len(await telling.generation.parts(1.0))
        return count

    async def all_of_them() -> list[int]:
        return await asyncio.wait_for(asyncio.gather(*(read() for _ in range(4))), 5)

    counts = cluster.call(all_of_them)
    assert len(set(counts)) == 1 and counts[0] > 2


def test_who_was_cut_off_does_not_fail_what_runs_elsewhere(
    tmp_path: Any, second: GatewayCluster, ledger: ResumableModel
) -> None:
    """Its client went to another gateway when it lost its router and its workers. That it gives the
    request up says nothing of the one that serves it now."""
    limits = Limits(recovery_ms=300)
    other = Peer("gateway-2", 13)
    with GatewayCluster(tmp_path, limits=limits, resumables=ledger, me=other) as lonely:
        lonely.script = Script(ids=tuple(TEXT.encode()), step_s=0.003, stall_after=8)
        cut = cut_after(lonely, CHAT, 5)
        second.script.stall_after = 12
        connection = HTTPConnection("127.0.0.1", second.port, timeout=10)
        path = f"/v1/requests/{cut.token}/events"
        connection.request("GET", path, headers={"Last-Event-ID": cut.last_id})
        cut.events += read_events(connection.getresponse(), 2)
        for peer in (DECODE, PREFILL, ROUTER):
            lonely.lose(peer)
        lonely.wait_until(lambda: not lonely.machine.state.kept)
    connection.close()
    second.script.stall_after = None
    work = second.only_work()
    second.call(lambda: second.step(work))
    answer = resumed(second, cut.token, cut.last_id)
    assert answer.status_code == 200, answer.text
    assert text_of(cut.events + split(answer.content)) == TEXT


def test_nobody_comes_back(tmp_path: Any) -> None:
    """After its window the request is cancelled, and a late client is told to send it again."""
    limits = Limits(resume_max_ms=2_000)
    with GatewayCluster(tmp_path, limits=limits) as cluster:
        cluster.script = Script(endless=True, step_s=0.02)
        connection = HTTPConnection("127.0.0.1", cluster.port, timeout=10)
        headers = {"Content-Type": "application/json", "X-Baton-Resume": "1"}
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), headers)
        response = connection.getresponse()
        token = response.headers["x-baton-resume-token"]
        read_events(response, 3)
        connection.close()
        work = cluster.only_work()
        outcome = cluster.wait(lambda: work.ended)
        assert outcome is not None
        assert outcome.ending is Ending.CANCELLED
        answer = resumed(cluster, token)
        assert answer.status_code == 410
        assert answer.json()["error"]["code"] == "resume_expired"


def test_a_client_may_cancel_what_it_could_resume(
    first: GatewayCluster, second: GatewayCluster
) -> None:
    """DELETE ends it at once, here and through another gateway."""
    for cluster in (first, second):
        first.script.endless = second.script.endless = True
        cut = cut_after(first, CHAT, 3)
        assert cluster.http.delete(f"/v1/requests/{cut.token}").status_code == 204
        works = cluster.works
        (outcome,) = cluster.wait(lambda works=works: [w.ended for w in works.values() if w.ended])
        assert outcome.ending is Ending.CANCELLED
        assert outcome.reason is Reason.CLIENT_CANCELLED
        assert resumed(cluster, cut.token).status_code == 410
        first.works.clear()


# --- who may ------------------------------------------------------------------------------------


def check_keys(tmp_path: Any) -> None:
    """Resume with another API key, with none, and with the right one."""
    config = GatewayConfig(port=0, api_keys=("key-a", "key-b"))
    with GatewayCluster(tmp_path, config=config) as cluster:
        mine = {"Authorization": "Bearer key-a", **RESUME}
        answer = cluster.http.post("/v1/chat/completions", json=CHAT, headers=mine)
        token = answer.headers["x-baton-resume-token"]
        foreign = resumed(cluster, token, Authorization="Bearer key-b")
        assert foreign.status_code == 403
        assert foreign.json()["error"]["code"] == "resume_foreign"
        assert cluster.http.get(f"/v1/requests/{token}/events").status_code == 401
        gone = cluster.http.delete(
            f"/v1/requests/{token}", headers={"Authorization": "Bearer key-b"}
        )
        assert gone.status_code == 403
        again = resumed(cluster, token, Authorization="Bearer key-a")
        assert again.content == answer.content


def test_only_the_key_that_began_it_may_resume(tmp_path: Any) -> None:
    """A token is worth nothing with another API key, and nothing is said or changed by it."""
    check_keys(tmp_path)


def test_a_resume_by_a_foreign_key_is_noticed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails if the ledger does not compare whose request it is."""
    claim = ResumableModel._claim

    def mutant(self: ResumableModel, op: ClaimResumable, now: int) -> Any:
        owner = self.records[op.resumable_id].op.owner
        return claim(self, msgspec.structs.replace(op, owner=owner), now)

    monkeypatch.setattr(ResumableModel, "_claim", mutant)
    with pytest.raises(AssertionError, match="403"):
        check_keys(tmp_path)


@pytest.mark.parametrize("change", ["nothing", "no dot", "another secret", "another id", "long"])
def test_a_wrong_token_is_unknown(first: GatewayCluster, change: str) -> None:
    """Nobody learns from the answer which part of it was right."""
    token = whole(first, "/v1/chat/completions", CHAT)[0]
    wrong = {
        "nothing": "x",
        "no dot": token.replace(".", ""),
        "another secret": token[:-1] + ("A" if token[-1] != "A" else "B"),
        "another id": "chatcmpl-0." + token.rpartition(".")[2],
        "long": token + "a" * 4_000,
    }[change]
    answer = resumed(first, wrong)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "resume_unknown"


@pytest.mark.parametrize("last", ["x", "-1", "1.2", "1+", "9" * 40, "é", "1e3", "0x1", "+1", "99"])
def test_an_id_that_no_event_has_is_refused(first: GatewayCluster, last: str) -> None:
    """A wrong Last-Event-ID is a 400 that names it; the request can still be resumed."""
    first.script.ids = tuple(b"abc")
    token, said = whole(first, "/v1/chat/completions", CHAT)
    headers = {b"last-event-id": last.encode()}
    answer = first.http.get(f"/v1/requests/{token}/events", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "last_event_id"
    assert resumed(first, token).content == said


def test_an_id_beyond_all_that_may_come_is_refused_at_once(first: GatewayCluster) -> None:
    """Also while the answer is being made: nobody waits for its end to hear that, and who reads it
    goes on."""
    first.script.ids = tuple(b"abc" * 100)
    first.script.step_s = 0.02
    with open_stream(first, CHAT | {"max_tokens": 300}) as response:
        read_events(response, 5)
        token = response.headers["x-baton-resume-token"]
        answer = resumed(first, token, "303")
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "event_id_unknown"
        read_events(response, 5)


def test_secrets_and_prompts_are_in_no_log_and_secrets_not_in_the_ledger(
    first: GatewayCluster,
) -> None:
    """The ledger knows digests only."""
    body = {**CHAT, "messages": [{"role": "user", "content": "a very private matter"}]}
    token = whole(first, "/v1/chat/completions", body)[0]
    resumed(first, token)
    secret = token.rpartition(".")[2]
    assert secret not in first.log.getvalue().decode()
    assert b"private" not in first.log.getvalue()
    assert secret not in repr(first.resumables.records) + repr(first.ledger.ops)


def test_another_model_cannot_tell_the_answer(tmp_path: Any, first: GatewayCluster) -> None:
    """Its ids would be others: a clear error instead of another text."""
    cut = cut_after(first, CHAT, 3)
    with GatewayCluster(tmp_path, resumables=first.resumables, compat="other") as other:
        answer = resumed(other, cut.token)
        assert answer.status_code == 410
        assert answer.json()["error"]["code"] == "resume_lost"


# --- idempotency keys ---------------------------------------------------------------------------


def test_a_repeated_post_gets_the_same_answer(
    first: GatewayCluster, second: GatewayCluster
) -> None:
    """Once complete, the same bytes from any gateway, and no second request."""
    body = {**CHAT, "stream": False}
    headers = {"Idempotency-Key": "k-1"}
    answer = first.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    for cluster in (first, second):
        again = cluster.http.post("/v1/chat/completions", json=body, headers=headers)
        assert again.content == answer.content
    assert len(first.works) + len(second.works) == 1


def test_a_whole_answer_has_no_events(first: GatewayCluster) -> None:
    """Asking for them says what to do instead, and the answer stays where it is."""
    body, headers = {**CHAT, "stream": False}, {"Idempotency-Key": "k-7"}
    answer = first.http.post("/v1/chat/completions", json=body, headers=headers)
    refused = resumed(first, answer.headers["x-baton-resume-token"])
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "not_a_stream"
    again = first.http.post("/v1/chat/completions", json=body, headers=headers)
    assert again.content == answer.content


def test_a_repeated_post_joins_the_running_request(first: GatewayCluster) -> None:
    """A plain client whose connection broke repeats its POST, and waits for the one request."""
    first.script.step_s = 0.02
    body = json.dumps({**CHAT, "stream": False})
    headers = {"Content-Type": "application/json", "Idempotency-Key": "k-2"}
    connection = HTTPConnection("127.0.0.1", first.port, timeout=10)
    connection.request("POST", "/v1/chat/completions", body, headers)
    first.wait(lambda: any(work.sent > 3 for work in first.works.values()))
    connection.close()
    answer = first.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert len(first.works) == 1


def test_a_stream_may_be_repeated_too(first: GatewayCluster) -> None:
    """With the key alone; what it joins is told from the start, with a token of its own."""
    headers = {"Idempotency-Key": "k-3"}
    answers = [
        first.http.post("/v1/chat/completions", json=CHAT, headers=headers) for _ in range(2)
    ]
    tokens = [answer.headers["x-baton-resume-token"] for answer in answers]
    assert tokens[0] != tokens[1]
    bodies = {
        answer.content.replace(token.encode(), b"?")
        for answer, token in zip(answers, tokens, strict=True)
    }
    assert len(bodies) == 1
    assert resumed(first, tokens[0]).status_code == 404
    assert resumed(first, tokens[1]).status_code == 200


def test_a_key_is_for_one_body(first: GatewayCluster) -> None:
    """The same key with another body, or on another path, is refused."""
    headers = {"Idempotency-Key": "k-4"}
    first.http.post("/v1/chat/completions", json={**CHAT, "stream": False}, headers=headers)
    other = {**CHAT, "stream": False, "temperature": 0.5}
    answer = first.http.post("/v1/chat/completions", json=other, headers=headers)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "idempotency_key_reused"


def test_what_was_refused_may_be_repeated(first: GatewayCluster) -> None:
    """429 and 503 mean that nothing was computed: the key is free."""
    headers = {"Idempotency-Key": "k-5"}
    body = {**CHAT, "stream": False}
    first.script.refuse = Reason.OVERLOADED
    refused = first.http.post("/v1/chat/completions", json=body, headers=headers)
    assert refused.status_code == 429
    first.script.refuse = None
    answer = first.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("ids", [0, 5])
def test_a_failure_is_told_again_too(first: GatewayCluster, ids: int) -> None:
    """One terminal outcome: who repeats gets the same error, and no second attempt."""
    headers = {"Idempotency-Key": f"k-6-{ids}"}
    first.script.fail_after = ids
    body = {**CHAT, "stream": False}
    errors = [
        first.http.post("/v1/chat/completions", json=body, headers=headers).json() for _ in range(2)
    ]
    assert errors[0] == errors[1]
    assert errors[0]["error"]["code"] == str(Reason.WORKER_LOST)
    assert len(first.works) == 1


# --- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", ["0", "-1", "301", "x", "1.5", "9" * 30, "²"])
def test_a_window_has_bounds(first: GatewayCluster, window: str) -> None:
    """A window that cannot be had is a 400 that says what can."""
    headers = {"X-Baton-Resume": window.encode("latin-1")}
    answer = first.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 400
    assert "1 to 300" in answer.json()["error"]["message"]


def test_a_whole_answer_needs_a_key_to_be_repeated_with(first: GatewayCluster) -> None:
    """Without a stream there is no token before the end: only a repeated POST can join it."""
    body = {**CHAT, "stream": False}
    answer = first.http.post("/v1/chat/completions", json=body, headers=RESUME)
    assert answer.status_code == 400
    assert "Idempotency-Key" in answer.json()["error"]["message"]


def test_a_gateway_keeps_a_bounded_number(tmp_path: Any) -> None:
    """More are refused with a time to come back; those without a window are still served."""
    limits = Limits(resumables_max=2, resume_bytes_max=20_000)
    with GatewayCluster(tmp_path, limits=limits) as cluster:
        for _ in range(2):
            whole(cluster, "/v1/chat/completions", {**CHAT, "max_tokens": 50})
        body = {**CHAT, "max_tokens": 50}
        answer = cluster.http.post("/v1/chat/completions", json=body, headers=RESUME)
        assert answer.status_code == 429
        assert "retry-after" in answer.headers
        assert cluster.http.post("/v1/chat/completions", json=body).status_code == 200
        large = {**CHAT, "logprobs": True, "top_logprobs": 20, "max_tokens": 50}
        answer = cluster.http.post("/v1/chat/completions", json=large, headers=RESUME)
        assert answer.status_code == 400
        assert "too large to be resumable" in answer.json()["error"]["message"]


def test_without_the_ledger_a_client_comes_back_to_where_it_was(first: GatewayCluster) -> None:
    """What runs here can be read here; a new one cannot be kept, and is refused in time."""
    first.script.step_s = 0.02
    cut = cut_after(first, CHAT, 3)
    first.ledger.away = True
    answer = resumed(first, cut.token, cut.last_id)
    assert text_of(cut.events + split(answer.content)) == TEXT
    refused = first.http.post("/v1/chat/completions", json=CHAT, headers=RESUME)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == str(Reason.LEDGER_UNAVAILABLE)


def test_an_answer_too_large_for_the_ledger_is_made_again(tmp_path: Any) -> None:
    """It is complete and nobody has it any more: the same ids are computed under another name."""
    limits = Limits(resume_record_bytes_max=1_200)
    with GatewayCluster(tmp_path, limits=limits) as cluster:
        cluster.script.ids = tuple(TEXT.encode()) * 8
        token, said = whole(cluster, "/v1/chat/completions", CHAT)
        assert cluster.wait(lambda: [w for w in cluster.works.values() if w.ended])
        answer = resumed(cluster, token)
        assert answer.content == said
        names = sorted(cluster.works)
        assert names[1].startswith(names[0] + "~")
        claims = [op for op in cluster.ledger.ops if isinstance(op, ClaimResumable)]
        assert len(claims) == 1
