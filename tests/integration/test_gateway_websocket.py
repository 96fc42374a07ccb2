"""Responses over a WebSocket: several at once, cancelled one by one, bounded and fenced off."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from baton.core.limits import Limits
from baton.core.outcomes import Reason
from baton.ports.driving import EXIT_RESTART
from baton.runtime.settings import GatewayConfig
from support.gateway_cluster import GatewayCluster, Script, prompt_ids

TERMINAL = {
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.cancelled",
}


def echo(spec: Any) -> tuple[int, ...]:
    """Answer with the user's words, several times."""
    prompt = bytes(i for i in prompt_ids(spec) if i < 256)
    words = prompt.split(b"\n")[1]
    return tuple((words + b". ") * 20)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GatewayCluster]:
    limits = Limits(body_bytes_max=64 * 1024, keepalive_ms=300, write_stall_ms=1_000)
    script = Script(ids=echo, step_s=0.005)
    with GatewayCluster(tmp_path, limits=limits, script=script) as running:
        yield running


def run(
    cluster: GatewayCluster, talk: Callable[[ClientConnection], Awaitable[None]], **options: Any
) -> None:
    """Run a conversation on one socket."""

    async def main() -> None:
        url = f"ws://127.0.0.1:{cluster.port}/v1/responses"
        async with asyncio.timeout(20), connect(url, **options) as ws:
            await talk(ws)

    asyncio.run(main())


def create(text: str, **values: Any) -> str:
    return json.dumps({"type": "response.create", "model": "fake", "input": text, **values})


async def events(ws: ClientConnection) -> AsyncIterator[dict[str, Any]]:
    async for message in ws:
        assert isinstance(message, str)
        yield json.loads(message)


async def until_ended(ws: ClientConnection, count: int) -> dict[str, list[dict[str, Any]]]:
    """Collect events by response until ``count`` have ended."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    ended = 0
    async for event in events(ws):
        found[event["response_id"]].append(event)
        ended += event["type"] in TERMINAL
        if ended == count:
            return found
    raise AssertionError("the socket closed early")


def text_of(collected: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in collected if e["type"] == "response.output_text.delta")


def test_one_response(cluster: GatewayCluster) -> None:
    """The events of the HTTP stream, numbered, with the response's id on each."""

    async def talk(ws: ClientConnection) -> None:
        await ws.send(create("hello"))
        ((response_id, got),) = (await until_ended(ws, 1)).items()
        assert [e["sequence_number"] for e in got] == list(range(len(got)))
        assert got[0]["type"] == "response.created"
        assert got[0]["response"]["id"] == response_id
        assert got[-1]["response"]["output"][0]["content"][0]["text"] == "hello. " * 20
        assert text_of(got) == "hello. " * 20

    run(cluster, talk)


def test_eight_at_once_two_cancelled(cluster: GatewayCluster) -> None:
    """Eight responses on one socket: each in order and complete but the two cancelled ones; one
    terminal event each; the workers are told."""

    async def talk(ws: ClientConnection) -> None:
        for number in range(8):
            await ws.send(create(f"number {number}", stream_id=f"lane-{number}"))
        lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
        ended: list[str] = []
        async for event in events(ws):
            lane = event["stream_id"]
            lanes[lane].append(event)
            if (
                lane in ("lane-3", "lane-5")
                and event["type"] == "response.output_text.delta"
                and sum(e["type"] == event["type"] for e in lanes[lane]) == 3
            ):
                cancel = {"type": "response.cancel", "response_id": event["response_id"]}
                await ws.send(json.dumps(cancel))
            if event["type"] in TERMINAL:
                ended.append(lane)
                if len(ended) == 8:
                    break
        assert sorted(ended) == sorted(lanes)
        for number in range(8):
            got = lanes[f"lane-{number}"]
            whole = f"number {number}. " * 20
            assert len({e["response_id"] for e in got}) == 1
            assert [e["sequence_number"] for e in got] == list(range(len(got)))
            if number in (3, 5):
                assert got[-1]["type"] == "response.cancelled"
                assert whole.startswith(text_of(got))
                assert len(text_of(got)) < len(whole)
            else:
                assert got[-1]["type"] == "response.completed"
                assert text_of(got) == whole

    run(cluster, talk)
    cluster.wait(lambda: all(work.ended for work in cluster.works.values()))
    reasons = [work.ended.reason for work in cluster.works.values() if work.ended]
    assert reasons.count(Reason.CLIENT_CANCELLED) == 2


def test_a_lane_is_first_in_first_out(cluster: GatewayCluster) -> None:
    """Responses of one stream_id run one after the other; the others do not wait for them."""

    async def talk(ws: ClientConnection) -> None:
        for text in ("a", "b", "c"):
            await ws.send(create(text, stream_id="one"))
        await ws.send(create("d", stream_id="two"))
        order = []
        async for event in events(ws):
            if event["type"] in ("response.created", *TERMINAL):
                order.append((event["stream_id"], event["type"]))
            if len(order) == 8:
                break
        mine = [kind for lane, kind in order if lane == "one"]
        assert mine == ["response.created", "response.completed"] * 3
        assert order.index(("two", "response.completed")) < len(order) - 1

    run(cluster, talk)


def test_errors_are_events_and_change_nothing(cluster: GatewayCluster) -> None:
    """Bad messages are answered with an error event; a response under way is unharmed."""
    bad: list[tuple[str, int, str | None]] = [
        ("nonsense", 400, None),
        ("[]", 400, None),
        ("{}", 400, "type"),
        ('{"type": "response.destroy"}', 400, "type"),
        ('{"type": 5}', 400, "type"),
        ('{"type": "response.cancel"}', 400, "response_id"),
        ('{"type": "response.cancel", "response_id": "resp_x"}', 404, "response_id"),
        ('{"type": "response.create"}', 400, "model"),
        ('{"type": "response.create", "model": "other", "input": "x"}', 404, "model"),
        ('{"type": "response.create", "model": "fake"}', 400, "input"),
        (create("x", stream_id="not allowed!"), 400, "stream_id"),
        (create("x", stream_id=""), 400, "stream_id"),
        (create("x", temperature=9), 400, "temperature"),
    ]

    async def talk(ws: ClientConnection) -> None:
        await ws.send(create("steady", stream_id="steady"))
        for message, _, _ in bad:
            await ws.send(message)
        errors, text = [], ""
        async for event in events(ws):
            if event["type"] == "error":
                errors.append((event["status"], event["error"]["param"]))
            elif event["type"] == "response.output_text.delta":
                text += event["delta"]
            elif event["type"] in TERMINAL:
                break
        assert sorted(errors, key=str) == sorted(((s, p) for _, s, p in bad), key=str)
        assert text == "steady. " * 20

    run(cluster, talk)


def test_refusal_and_failure(cluster: GatewayCluster) -> None:
    """A refused response and one that fails in mid-stream end with response.failed and a code."""

    async def talk(ws: ClientConnection) -> None:
        cluster.script = Script(refuse=Reason.OVERLOADED)
        await ws.send(create("x"))
        got = next(iter((await until_ended(ws, 1)).values()))
        assert got[-1]["type"] == "response.failed"
        assert got[-1]["response"]["error"]["code"] == "overloaded"
        for with_ids in (False, True):
            cluster.script = Script(ids=echo, fail_after=4, fail_with_ids=with_ids)
            await ws.send(create("x"))
            got = next(iter((await until_ended(ws, 1)).values()))
            assert got[-1]["response"]["error"]["code"] == "worker_lost"
            assert text_of(got) == "x. x"

    run(cluster, talk)


def test_too_large_and_not_utf8(cluster: GatewayCluster) -> None:
    """1009 over the size limit, 1007 for bytes that are no UTF-8; running work is cancelled."""
    cluster.script = Script(ids=echo, step_s=0.05)

    async def large(ws: ClientConnection) -> None:
        await ws.send(create("x"))
        await ws.send("x" * 70_000)
        with pytest.raises(ConnectionClosed) as closed:
            await until_ended(ws, 1)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009

    run(cluster, large)

    async def broken(ws: ClientConnection) -> None:
        await ws.send(create("x"))
        await ws.send(b"\xff\xfe{}", text=True)
        with pytest.raises(ConnectionClosed) as closed:
            await until_ended(ws, 1)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1007

    run(cluster, broken)
    cluster.wait(lambda: all(work.ended for work in cluster.works.values()))


def test_a_socket_that_closes_cancels_all_of_it(cluster: GatewayCluster) -> None:
    """Close, or a cut connection, cancels every response of the socket."""
    cluster.script = Script(ids=echo, step_s=0.05)
    idle = cluster.tasks()
    for count, cut in ((5, False), (10, True)):

        async def talk(ws: ClientConnection, cut: bool = cut) -> None:
            for number in range(4):
                await ws.send(create(f"n{number}"))
            await ws.send(create("queued", stream_id="q"))
            await ws.send(create("queued", stream_id="q"))
            seen = set()
            async for event in events(ws):
                seen.add(event["response_id"])
                if len(seen) == 5:
                    break
            if cut:
                ws.transport.abort()

        run(cluster, talk)
        cluster.wait(lambda count=count: len(cluster.works) == count)  # type: ignore[misc]
        cluster.wait(lambda: all(work.ended for work in cluster.works.values()))
    cluster.wait_until(lambda: cluster.tasks() <= idle)
    assert cluster.exchange.open_streams == 0


def test_responses_on_one_socket_are_bounded(cluster: GatewayCluster) -> None:
    """More than 64 at once are refused with an error event."""
    cluster.script = Script(silent=True)

    async def talk(ws: ClientConnection) -> None:
        for _ in range(70):
            await ws.send(create("x"))
        refused = 0
        async for event in events(ws):
            if event["type"] == "error":
                assert event["error"]["code"] == "overloaded"
                refused += 1
                if refused == 6:
                    break
        assert len(cluster.works) <= 64

    run(cluster, talk, max_queue=None)


def test_late_pongs_of_a_reading_client_are_forgiven(cluster: GatewayCluster) -> None:
    """A client that never answers a ping but takes its data is alive."""
    cluster.script = Script(ids=echo, step_s=0.01)

    with socket.create_connection(("127.0.0.1", cluster.port), timeout=10) as raw:
        raw.sendall(
            b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\n"
            b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
            b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert b" 101 " in raw.recv(4096)
        body = create("hello there").encode()
        mask = b"\0\0\0\0"
        raw.sendall(b"\x81" + bytes([0x80 | len(body)]) + mask + body)
        data = b""
        while b"response.completed" not in data:
            part = raw.recv(65536)
            assert part, "cut although it was reading"
            data += part
        assert data.count(b"\x89\x00") >= 3, "pings were sent"


def test_a_client_that_neither_reads_nor_answers_is_cut(cluster: GatewayCluster) -> None:
    """No byte from it and none taken: cut after write_stall_ms, its work cancelled."""
    cluster.script = Script(ids=tuple(b"x" * 4096), step_s=0.001, per_step=64, endless=True)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.connect(("127.0.0.1", cluster.port))
    raw.sendall(
        b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\n"
        b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    assert b" 101 " in raw.recv(4096)
    for _ in range(3):
        body = create("x", max_output_tokens=8000).encode()
        raw.sendall(b"\x81" + bytes([0x80 | len(body)]) + b"\0\0\0\0" + body)
    cluster.wait(lambda: len(cluster.works) == 3)
    cluster.script = Script(ids=(97,), silent=True)
    cluster.wait_until(lambda: len(cluster.serving.connections) == 0)
    cluster.wait(lambda: all(work.ended for work in cluster.works.values()))
    raw.close()


def test_who_may_open_a_socket(tmp_path: Path) -> None:
    """Keys as over HTTP; a foreign page is refused; other paths are 404."""
    config = GatewayConfig(port=0, api_keys=("k",), cors_origins=("https://app.example",))
    with GatewayCluster(tmp_path, config=config) as cluster:
        key = {"authorization": "Bearer k"}

        async def status(path: str, **options: Any) -> int:
            try:
                async with connect(f"ws://127.0.0.1:{cluster.port}{path}", **options):
                    return 101
            except InvalidStatus as refused:
                return refused.response.status_code

        async def main() -> None:
            path = "/v1/responses"
            assert await status(path) == 401
            assert await status(path, additional_headers=key) == 101
            assert await status("/v1/other", additional_headers=key) == 404
            for origin, expected in (
                ("https://app.example", 101),
                (f"http://127.0.0.1:{cluster.port}", 101),
                ("https://evil.example", 403),
            ):
                got = await status(path, additional_headers=key, origin=origin)
                assert got == expected, origin

        asyncio.run(main())


def test_a_response_object_may_be_nested(cluster: GatewayCluster) -> None:
    """Fields may stand in a "response" object, as some clients send them."""

    async def talk(ws: ClientConnection) -> None:
        nested = {"model": "fake", "input": "hi"}
        await ws.send(json.dumps({"type": "response.create", "response": nested}))
        got = next(iter((await until_ended(ws, 1)).values()))
        assert text_of(got) == "hi. " * 20

    run(cluster, talk)


def test_a_restart_closes_a_socket_when_nothing_runs_on_it(cluster: GatewayCluster) -> None:
    """With 1012, after the answers that run; one on which nothing runs at once."""

    async def talk(ws: ClientConnection) -> None:
        url = f"ws://127.0.0.1:{cluster.port}/v1/responses"
        async with connect(url) as idle:
            await ws.send(create("one"))
            async for event in events(ws):
                if event["type"] == "response.output_text.delta":
                    break
            await asyncio.to_thread(cluster.restart)
            with pytest.raises(ConnectionClosed) as closed:
                await idle.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        seen = [event["type"] async for event in events(ws)]
        assert seen[-1] == "response.completed"
        assert ws.close_code == 1012

    with pytest.raises(ConnectionClosed) as closed:
        run(cluster, talk)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    cluster.wait_until(lambda: bool(cluster.exits))
    assert cluster.exits == [(EXIT_RESTART, "drained")]


# --- resuming -----------------------------------------------------------------------------------


async def first_events(ws: ClientConnection, count: int) -> dict[str, list[dict[str, Any]]]:
    """Collect events by response until every one of the first ``count`` has some text."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    async for event in events(ws):
        found[event["response_id"]].append(event)
        if len(found) == count and all(len(each) > 8 for each in found.values()):
            return found
    raise AssertionError("the socket closed early")


def resume(token: str, last: str = "", **values: Any) -> str:
    message = {"type": "response.resume", "resume_token": token, "last_event_id": last, **values}
    return json.dumps(message)


def test_several_responses_are_resumed_on_another_socket(cluster: GatewayCluster) -> None:
    """What each says goes on where its client was, numbered without a gap; one is cancelled."""
    cluster.script.step_s = 0.01
    before: dict[str, list[dict[str, Any]]] = {}

    async def part(ws: ClientConnection) -> None:
        for word in ("one", "two", "three"):
            await ws.send(create(word, resume_s=20, stream_id=word))
        before.update(await first_events(ws, 3))

    async def rest(ws: ClientConnection) -> None:
        tokens = {each[0]["resume_token"]: each for each in before.values()}
        assert len(tokens) == 3
        for token, said in tokens.items():
            await ws.send(resume(token, said[-1]["event_id"], stream_id=said[-1]["stream_id"]))
        cancelled = next(iter(before))
        after: dict[str, list[dict[str, Any]]] = defaultdict(list)
        async for event in events(ws):
            assert event["stream_id"] == before[event["response_id"]][0]["stream_id"]
            if not after[cancelled] and event["response_id"] == cancelled:
                await ws.send(json.dumps({"type": "response.cancel", "response_id": cancelled}))
            after[event["response_id"]].append(event)
            if sum(each[-1]["type"] in TERMINAL for each in after.values() if each) == 3:
                break
        for response_id, said in before.items():
            joined = said + after[response_id]
            assert [event["sequence_number"] for event in joined] == list(range(len(joined)))
            if response_id == cancelled:
                assert joined[-1]["type"] == "response.cancelled"
                continue
            word = said[0]["stream_id"]
            assert text_of(joined) == f"{word}. " * 20
            assert joined[-1]["response"]["output"][0]["content"][0]["text"] == f"{word}. " * 20
            ids = [event["event_id"] for event in joined]
            assert len(set(ids)) == len(ids)

    run(cluster, part)
    run(cluster, rest)
    ends = [str(work.ended.ending) for work in cluster.works.values() if work.ended]
    assert sorted(ends) == ["cancelled", "completed", "completed"]


def test_an_id_that_no_event_has_is_an_error_of_the_message(cluster: GatewayCluster) -> None:
    """Of the message, not of the response: that did not fail, and can be read from its start. One
    that could not be in any such answer is told at once, before the earlier reader loses it."""

    async def talk(ws: ClientConnection) -> None:
        await ws.send(create("word", resume_s=20, max_output_tokens=400))
        (said,) = (await until_ended(ws, 1)).values()
        token = said[0]["resume_token"]
        for last in ("300", "403"):
            await ws.send(resume(token, last, stream_id="x"))
            wrong = [event async for event in first_of(ws)]
            assert wrong[-1]["type"] == "error" and wrong[-1]["status"] == 400
            assert wrong[-1]["error"]["code"] == "event_id_unknown"
            assert all(event["type"] not in TERMINAL for event in wrong)
        await ws.send(resume(token))
        (again,) = (await until_ended(ws, 1)).values()
        assert text_of(again) == "word. " * 20

    async def first_of(ws: ClientConnection) -> AsyncIterator[dict[str, Any]]:
        async for event in events(ws):
            yield event
            if event["type"] == "error" or event["type"] in TERMINAL:
                return

    run(cluster, talk)


def test_a_response_read_on_two_sockets_is_the_later_ones(cluster: GatewayCluster) -> None:
    """The earlier socket hears how it ended there, and stays open."""

    async def main() -> None:
        url = f"ws://127.0.0.1:{cluster.port}/v1/responses"
        cluster.script.step_s = 0.02
        async with asyncio.timeout(20), connect(url) as early, connect(url) as late:
            await early.send(create("word", resume_s=20))
            (said,) = (await first_events(early, 1)).values()
            await late.send(resume(said[0]["resume_token"]))
            found = await until_ended(late, 1)
            assert text_of(next(iter(found.values()))) == "word. " * 20
            (ended,) = (await until_ended(early, 1)).values()
            assert ended[-1]["type"] == "response.failed"
            assert ended[-1]["response"]["error"]["code"] == "superseded"
            await early.send(create("again"))
            assert await until_ended(early, 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (resume("resp_0.x"), "resume_unknown"),
        (json.dumps({"type": "response.resume"}), None),
        (create("x", resume_s="20"), None),
        (create("x", resume_s=0), None),
        (create("x", resume_s=10**12), None),
    ],
)
def test_what_cannot_be_resumed_is_told(
    cluster: GatewayCluster, message: str, code: str | None
) -> None:
    """An error event, and nothing else changes."""

    async def talk(ws: ClientConnection) -> None:
        await ws.send(message)
        event = json.loads(await ws.recv())
        assert event["type"] == "error"
        assert event["error"]["code"] == code
        assert event["status"] in (400, 404)
        await ws.send(create("still here"))
        assert await until_ended(ws, 1)

    run(cluster, talk)
