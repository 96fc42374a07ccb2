"""The load generator's client: streams as real servers send them, kept and broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice, repeat

import orjson
import pytest

from baton.bench.load.answer import Answer
from baton.bench.load.arrivals import Arrivals
from baton.bench.load.asking import AskPlan, Conversation, PromptForm
from baton.bench.load.generator import Generator, LoadPlan
from baton.bench.load.http import Body, Client
from baton.bench.load.server import ServerError, identify
from baton.bench.load.workload import Session, Turn

USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def chunk(text: str, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"text":"%s","finish_reason":%s}]}\n\n' % (
        text.encode(),
        finish.encode(),
    )


def answer(*parts: bytes, status: int = 200) -> Answer:
    made = Answer(0.0)
    made.status = status
    for number, part in enumerate(parts):
        made.feed(part, float(number + 1))
    made.end(10.0)
    return made


def test_pieces_are_the_events_that_bring_something() -> None:
    """Role chunks, usage and the end mark are none; usage counts the tokens."""
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
    text = b'data: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n'
    found = answer(role, text, b": keep-alive\n\n", text, USAGE, DONE)
    assert found.ok
    assert found.arrivals == [2.0, 4.0]
    assert (found.tokens, found.prompt_tokens, found.cached_tokens) == (3, 7, 2)


def test_a_token_without_text_yet_is_a_piece() -> None:
    """The first half of a character came in time; the end without a token is no piece."""
    found = answer(chunk("a"), chunk(""), chunk("b"), chunk("", '"length"'), USAGE, DONE)
    assert found.ok and found.arrivals == [1.0, 2.0, 3.0] and found.tokens == 3
    held = b'data: {"choices":[{"delta":{"content":""},"finish_reason":null}]}\n\n'
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    assert answer(held, end, DONE).arrivals == [1.0]


def test_events_cut_anywhere_are_put_together() -> None:
    """TCP knows no events."""
    whole = chunk("a") + chunk("b", '"length"') + USAGE + DONE
    parts = [whole[n : n + 7] for n in range(0, len(whole), 7)]
    found = answer(*parts)
    assert found.ok and found.text == ["a", "b"] and found.finish == "length"


@pytest.mark.parametrize(
    ("parts", "status", "words"),
    [
        ((chunk("a"),), 200, "without its end mark"),
        ((b'data: {"error":{"message":"broke"}}\n\n', DONE), 200, "broke"),
        ((b"data: {half\n\n", DONE), 200, "no JSON"),
        ((b'{"error":{"message":"full"}}',), 429, "HTTP 429: full"),
        ((b"<html>",), 502, "HTTP 502: <html>"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(
    parts: tuple[bytes, ...], status: int, words: str
) -> None:
    """With the server's own words."""
    found = answer(*parts, status=status)
    assert not found.ok and words in found.error
    assert found.refused == (status == 429)


def test_the_history_has_what_was_answered() -> None:
    """By ids if the server tells them, else by as many other ones, which is counted."""
    talk = Conversation(AskPlan(form=PromptForm.IDS, model="m"))
    body = orjson.loads(talk.body([1, 2], 3, wants_ids=True))
    assert body["prompt"] == [1, 2] and body["return_token_ids"] and body["ignore_eos"]
    told = Answer(0.0)
    told.ids = [7, 8, 9]
    talk.heard(told, [4])
    silent = Answer(0.0)
    silent.usage_tokens = 3
    assert orjson.loads(talk.body([4], 3, wants_ids=True))["prompt"] == [1, 2, 7, 8, 9, 4]
    talk.heard(silent, [5, 6])
    assert orjson.loads(talk.body([5], 3, wants_ids=True))["prompt"][-4:] == [5, 6, 5, 5]
    assert talk.invented == 1
    chat = Conversation(AskPlan(form=PromptForm.CHAT, model="m", ignore_eos=False))
    chat.body([1], 3, wants_ids=True)
    told.text = ["yes"]
    chat.heard(told, [4])
    messages = orjson.loads(chat.body([2], 3, wants_ids=True))["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == "yes"


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def with_server(handler: Handler, use: Callable[[Client], Awaitable[None]]) -> None:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with asyncio.timeout(60):
        await use(client)
    client.close()
    server.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


STREAM = chunk("a") + chunk("b") + USAGE + DONE
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def test_connections_are_kept_and_one_closed_meanwhile_is_replaced() -> None:
    """A server that closes a kept connection costs a new one, no error; as llama.cpp does."""
    served: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await read_request(reader)
            served.append(1)
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
            await writer.drain()
        # The third request of this connection is read by nobody.
        await reader.read(1)
        writer.close()

    async def use(client: Client) -> None:
        for _ in range(5):
            taker = Answer(0.0)
            await client.request("POST", "/v1/completions", b"{}", taker)
            assert taker.ok, taker.error
        assert len(served) == 5
        assert client.opened == 3

    asyncio.run(with_server(serve, use))


def test_who_is_cancelled_after_its_response_leaves_the_connection_alone() -> None:
    """Whoever asks next on the kept connection may have begun before the cancelled one wakes up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(HEAD + b"Content-Length: 2\r\n\r\nok")

    async def use(client: Client) -> None:
        loop, following = asyncio.get_running_loop(), list[asyncio.Task[tuple[int, bytes]]]()

        class Ends(Body):
            def end(self, now: float, error: str = "") -> None:
                loop.call_soon(first.cancel)
                following.append(loop.create_task(client.get("/")))

        first = loop.create_task(client.request("GET", "/", b"", Ends()))
        await asyncio.wait([first])
        assert first.cancelled()
        assert await following[0] == (200, b"ok")
        assert client.opened == 1

    asyncio.run(with_server(serve, use))


def test_a_body_may_end_with_the_connection_and_a_broken_one_is_an_error() -> None:
    """Without a length the close is the end; within a chunked body it is none."""
    heads = iter(
        [HEAD + b"Connection: close\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n5"]
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        head = next(heads)
        writer.write(head + (STREAM if head.endswith(b"\n") else b""))
        await writer.drain()
        writer.close()

    async def use(client: Client) -> None:
        whole, cut = Answer(0.0), Answer(0.0)
        await client.request("POST", "/", b"{}", whole)
        assert whole.ok, whole.error
        await client.request("POST", "/", b"{}", cut)
        assert cut.error == "the connection broke"

    asyncio.run(with_server(serve, use))


def test_nobody_there_is_an_error_of_the_request() -> None:
    """Not of the run."""

    async def use() -> None:
        taker = Answer(0.0)
        await Client("http://127.0.0.1:1").request("POST", "/", b"{}", taker)
        assert taker.error.startswith("not connected")

    asyncio.run(use())


def test_who_accepts_and_says_nothing_is_not_waited_for() -> None:
    """Neither for metrics nor to learn who it is: the error says how long it was waited for."""

    async def use() -> None:
        heard = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            heard.set()
            await reader.read(1)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = Client(url, get_s=0.2)
        async with asyncio.timeout(60):
            with pytest.raises(OSError, match=r"/metrics: no answer within 0\.2 s"):
                await client.get("/metrics")
            assert heard.is_set()
            with pytest.raises(ServerError, match="no answer within"):
                await identify(client, url)
        client.close()
        server.close()

    asyncio.run(use())


def load(kind: Arrivals, **plan: object) -> LoadPlan:
    return LoadPlan(kind=kind, warmup_s=0.0, **plan)  # type: ignore[arg-type]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Requests go out at their times while none was answered; a hanging one is cut off."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await read_request(reader)
        asked += 1
        await reader.read(1)
        writer.close()

    async def use(client: Client) -> None:
        plan = load(Arrivals.POISSON, rate=1.0, duration_s=0.5, grace_s=0.0)
        generator = Generator(client, AskPlan(), plan)
        sessions = (Session(n, n * 0.01, (Turn([1], 1),)) for n in range(10_000))
        edges: list[str] = []
        measured = await generator.run(
            sessions, lambda: edges.append("begin"), lambda: edges.append("end")
        )
        assert edges == ["begin", "end"]
        assert measured.in_flight_peak == asked > 5
        assert all(each.answer and not each.answer.ended_at for each in measured.asked)
        assert all(each.late_s >= 0 for each in measured.asked)

    asyncio.run(with_server(serve, use))


def test_an_abort_ends_a_closed_loop_with_what_there_is() -> None:
    """It is marked, and nothing hangs."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)

    async def use(client: Client) -> None:
        generator = Generator(client, AskPlan(), load(Arrivals.CLOSED, duration_s=1e6))
        sessions = repeat(Session(1, 0.0, (Turn([1], 2), Turn([2], 2, 0.0))))

        def abort_when_some_are_there() -> None:
            if len(generator.measured.asked) > 6:
                generator.abort()
            else:
                asyncio.get_running_loop().call_later(0.01, abort_when_some_are_there)

        abort_when_some_are_there()
        measured = await generator.run(sessions, lambda: None, lambda: None)
        assert measured.aborted
        first = list(islice(measured.asked, 2))
        assert [each.turn for each in first] == [0, 1]
        assert first[1].prompt_tokens == 1 + 3 + 1
        assert all(each.answer and each.answer.ok for each in first)

    asyncio.run(with_server(serve, use))


def test_a_closed_loop_without_warm_up_counts_its_first_requests() -> None:
    """Nothing is asked before the window: it would count nowhere and take the window's time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)

    async def use(client: Client) -> None:
        plan = load(Arrivals.CLOSED, duration_s=60.0, requests=3, concurrency=2)
        generator = Generator(client, AskPlan(), plan)
        sessions = repeat(Session(1, 0.0, (Turn([1], 2),)))
        measured = await generator.run(sessions, lambda: None, lambda: None)
        assert len(measured.asked) == 3
        assert all(each.due_at >= measured.began_at for each in measured.asked)

    asyncio.run(with_server(serve, use))
