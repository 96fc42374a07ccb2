"""The Redis adapter on a real server that is killed, frozen, emptied, full, or cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import redis
import uvloop

from baton.core.ids import Peer
from baton.core.lifecycles import LeaseState, RequestState
from baton.ledger.connection import LedgerUnfit, LedgerUnreachable
from baton.ledger.keys import Keys
from baton.ledger.redis_ledger import RedisLedger
from baton.ports.ledger import (
    AcquireLease,
    AdmitRequest,
    AdvanceRequest,
    AnyOp,
    Conflict,
    Done,
    EndRequest,
    LeaseHeld,
    PlaceRequest,
    RenewLease,
    Reply,
    RetryRequest,
    Unavailable,
)
from support.ledger_bench import (
    CANCELLED,
    COMPLETED,
    DECODE,
    GATEWAY,
    LIMITS,
    PREFILL,
    ROUTER,
    TTL,
    member,
    spec,
)
from support.ledger_client import LeaseShell, ask, ask_until_available, open_ledger, until
from support.ledger_proxy import LedgerProxy
from support.ledger_server import LedgerServer

S = RequestState
#: Shorter timeouts than in production, so that an outage is seen within the test.
QUICK = msgspec.structs.replace(LIMITS, ledger_timeout_ms=250)
#: Where time is not what is tested: a busy machine must not end a call or a record.
PATIENT = msgspec.structs.replace(LIMITS, ledger_timeout_ms=8_000, terminal_ttl_ms=60_000)


@pytest.fixture
def server() -> Iterator[LedgerServer]:
    with LedgerServer() as server:
        yield server


@pytest.fixture
def admin(server: LedgerServer) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        yield client


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def life(name: str) -> list[AnyOp]:
    """A plain life on the split path, one op a transition."""
    return [
        AdmitRequest(spec(name), ROUTER),
        PlaceRequest(name, 1, ROUTER, DECODE, PREFILL),
        AdvanceRequest(name, 1, S.PREFILLING, PREFILL),
        AdvanceRequest(name, 1, S.COMMITTED, DECODE),
        AdvanceRequest(name, 1, S.DECODING, DECODE),
        EndRequest(name, 1, COMPLETED, GATEWAY),
    ]


@asynccontextmanager
async def proxied(server: LedgerServer) -> AsyncIterator[tuple[LedgerProxy, RedisLedger]]:
    async with LedgerProxy(server.socket_path) as proxy, open_ledger(proxy.url, PATIENT) as ledger:
        yield proxy, ledger


def has_len(answers: list[Reply | Unavailable], wanted: int) -> bool:
    return len(answers) == wanted


# --- the server dies, stops, forgets ----------------------------------------------------------


def test_a_killed_server_comes_back_with_every_answered_record(server: LedgerServer) -> None:
    """kill -9 and restart: what was answered is there, the same adapter goes on by itself."""

    async def test() -> None:
        async with open_ledger(server.url) as ledger:
            names = [f"k{number}" for number in range(100)]
            for name in names:
                for op in life(name)[:5]:
                    assert isinstance(await ask(ledger, op), Done)
            held = await ask(ledger, AcquireLease(member(ROUTER), TTL))
            assert isinstance(held, LeaseHeld)
            server.kill()
            assert isinstance(await ask(ledger, life("k0")[5]), Unavailable)
            server.start()
            again = await ask_until_available(ledger, RenewLease(ROUTER, TTL))
            assert isinstance(again, LeaseHeld)
            assert again.ledger_id == held.ledger_id
            for name in names:
                assert await ask(ledger, life(name)[5]) == Done(1, S.COMPLETED, 1)
            assert ledger.connects == 2

    run(test)


def test_calls_while_the_server_is_gone_are_answered_in_time(server: LedgerServer) -> None:
    """Nothing hangs: each call is Unavailable within its timeout and says why."""

    async def test() -> None:
        async with open_ledger(server.url, QUICK) as ledger:
            server.kill()
            loop = asyncio.get_running_loop()
            began = loop.time()
            answers = await asyncio.gather(*(ask(ledger, life("x")[0]) for _ in range(50)))
            assert all(isinstance(answer, Unavailable) for answer in answers)
            assert loop.time() - began < 4 * QUICK.ledger_timeout_ms / 1000
            late = await ask(ledger, life("x")[0])
            assert isinstance(late, Unavailable)
            assert "ledger.sock" in late.reason or "lost" in late.reason
            server.start()
            assert await ask_until_available(ledger, life("x")[0]) == Done(1, S.ADMITTED, 0)

    run(test)


def test_nobody_is_lost_within_a_ttl_of_a_freeze(server: LedgerServer) -> None:
    """The server stops for several TTLs: leases are SUSPECT, then HELD again, never LOST; a
    member that died meanwhile is lost, but not within one TTL of the thaw."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with open_ledger(server.url, QUICK) as one, open_ledger(server.url, QUICK) as two:
            router = LeaseShell(member(ROUTER), one)
            decode = LeaseShell(member(DECODE), two)
            prefill = LeaseShell(member(PREFILL), two)
            shells = (router, decode, prefill)
            await until(lambda: all(len(shell.members) == 3 for shell in shells))
            await until(lambda: not router.keeper.rebuilding)
            server.freeze()
            prefill.stop()
            await until(lambda: all(s.keeper.state is LeaseState.SUSPECT for s in (router, decode)))
            frozen_until = loop.time() + 3.5 * TTL / 1000
            await until(lambda: loop.time() >= frozen_until)
            thawed_at = loop.time()
            server.thaw()
            await until(lambda: len(router.members) == 2)
            assert loop.time() - thawed_at >= TTL / 1000
            await until(lambda: router.keeper.state is decode.keeper.state is LeaseState.HELD)
            for shell in (router, decode):
                assert LeaseState.LOST not in [state for _, state in shell.states]
                assert len(shell.ledger_ids) == 1
            assert {each.peer for each in router.members} == {ROUTER, DECODE}

    run(test)


def test_an_emptied_ledger_is_rebuilt_by_its_members(
    server: LedgerServer, admin: redis.Redis
) -> None:
    """FLUSHALL: a new id, everybody acquires again, nobody has to be restarted."""

    async def test() -> None:
        async with open_ledger(server.url) as ledger:
            shells = [LeaseShell(member(peer), ledger) for peer in (ROUTER, DECODE, PREFILL)]
            await until(lambda: all(len(shell.members) == 3 for shell in shells))
            admin.flushall()
            await until(lambda: all(len(shell.ledger_ids) == 2 for shell in shells))
            await until(lambda: all(len(shell.members) == 3 for shell in shells))
            assert len({tuple(shell.ledger_ids) for shell in shells}) == 1
            assert not any(shell.replaced for shell in shells)
            for shell in shells:
                shell.leave()
            await until(lambda: admin.exists(Keys("t").members) == 0)

    run(test)


def test_a_restarted_worker_replaces_its_frozen_former_self(server: LedgerServer) -> None:
    """The former incarnation is told so once it asks again, and gives up."""

    async def test() -> None:
        async with open_ledger(server.url) as old, open_ledger(server.url) as new:
            former = LeaseShell(member(Peer("decode-0", 50)), old)
            await until(lambda: former.keeper.state is LeaseState.HELD)
            latter = LeaseShell(member(Peer("decode-0", 49)), new)
            await until(lambda: former.replaced)
            assert [state for _, state in former.states][-1] is LeaseState.LOST
            assert latter.keeper.state is LeaseState.HELD
            assert former.keeper.deadline() is None

    run(test)


# --- scripts ----------------------------------------------------------------------------------


def test_forgotten_scripts_are_loaded_again_in_order(
    server: LedgerServer, admin: redis.Redis
) -> None:
    """SCRIPT FLUSH under a full pipeline: every op is executed once, answers stay in order, also
    of calls that were already on their way when the first NOSCRIPT came back."""

    async def test() -> None:
        async with (
            LedgerProxy(server.socket_path) as proxy,
            open_ledger(proxy.url, PATIENT) as ledger,
        ):
            proxy.delay_s = 0.01
            for turn in range(5):
                admin.script_flush()
                ops = [op for number in range(60) for op in life(f"s{turn}-{number}")]
                answers: list[Reply | Unavailable] = []
                for wave in range(0, len(ops), 30):
                    for op in ops[wave : wave + 30]:
                        ledger.call(op, answers.append)
                    await asyncio.sleep(0.002)
                await until(partial(has_len, answers, len(ops)))
                wanted = [S.ADMITTED, S.PLACED, S.PREFILLING, S.COMMITTED, S.DECODING, S.COMPLETED]
                for place, answer in enumerate(answers):
                    assert isinstance(answer, Done), answer
                    assert answer.state is wanted[place % 6]
            assert ledger.connects == 1

    run(test)


def test_a_key_that_somebody_else_wrote_ends_nobody(
    server: LedgerServer, admin: redis.Redis
) -> None:
    """Calls that meet a key of another type are answered Unavailable until it is gone."""

    async def test() -> None:
        bugs: list[BaseException] = []
        ledger = RedisLedger(server.url, "t", LIMITS, bugs.append)
        await ledger.start()
        keys = Keys("t")
        for key, op in (
            (keys.request("odd"), life("odd")[0]),
            (keys.leases, AcquireLease(member(DECODE), TTL)),
            (keys.meta, AcquireLease(member(DECODE), TTL)),
            (keys.members, AcquireLease(member(DECODE), TTL)),
        ):
            admin.delete(key)
            admin.set(key, "x")
            assert isinstance(await ask(ledger, op), Unavailable)
            admin.delete(key)
            assert not isinstance(await ask(ledger, op), Unavailable)
        assert bugs == []
        await ledger.close()

    run(test)


def test_a_member_that_cannot_be_read_is_nobody(server: LedgerServer, admin: redis.Redis) -> None:
    """A record of another version beside ours ends no process: the others see each other."""

    async def test() -> None:
        bugs: list[BaseException] = []
        ledger = RedisLedger(server.url, "t", LIMITS, bugs.append)
        await ledger.start()
        keys = Keys("t")
        admin.hset(keys.members, "decode-9/5", b"\xc1\xff of the future")
        admin.zadd(keys.leases, {"decode-9/5": 1, "nobody": 1, b"\xff/x": 1})
        for peer in (DECODE, ROUTER):
            assert isinstance(await ask(ledger, AcquireLease(member(peer), TTL)), LeaseHeld)
        await asyncio.sleep(1.2 * TTL / 1000)  # those who are nobody expire meanwhile
        held = await ask(ledger, AcquireLease(member(DECODE), TTL))
        assert isinstance(held, LeaseHeld)
        assert member(DECODE) in held.members
        assert bugs == []
        await ledger.close()

    run(test)


# --- the connection ---------------------------------------------------------------------------


def test_a_cut_before_the_answer_leaves_a_repeatable_op(server: LedgerServer) -> None:
    """Cut after each possible byte of a reply: Unavailable, and the repetition gets the very
    answer that was lost; no op is executed twice."""

    async def test() -> None:
        async with (
            LedgerProxy(server.socket_path) as proxy,
            open_ledger(proxy.url, PATIENT) as ledger,
        ):
            for number in range(40):
                name = f"c{number}"
                for op in life(name):
                    proxy.reply_bytes_left = number % 20
                    first = await ask(ledger, op)
                    if not isinstance(first, Unavailable):
                        # The reply was shorter than what was let through.
                        proxy.reply_bytes_left = None
                    again = await ask_until_available(ledger, op)
                    assert isinstance(again, Done), again
                    assert again.attempts == (0 if isinstance(op, AdmitRequest) else 1)
            assert ledger.connects > 100

    run(test)


def test_a_reset_in_the_middle_of_a_pipeline_answers_every_call_once(
    server: LedgerServer,
) -> None:
    """Connections reset at random moments under load: each call gets one answer, its own."""

    async def test() -> None:
        async with (
            LedgerProxy(server.socket_path) as proxy,
            open_ledger(proxy.url, PATIENT) as ledger,
        ):

            async def live(name: str) -> None:
                for op, state in zip(
                    life(name),
                    [S.ADMITTED, S.PLACED, S.PREFILLING, S.COMMITTED, S.DECODING, S.COMPLETED],
                    strict=True,
                ):
                    answer = await ask_until_available(ledger, op)
                    assert isinstance(answer, Done)
                    assert answer.state is state

            async def cut_often() -> None:
                while True:
                    await asyncio.sleep(0.01)
                    proxy.cut()

            cutting = asyncio.create_task(cut_often())
            await asyncio.gather(*(live(f"x{number}") for number in range(60)))
            cutting.cancel()
            assert proxy.connections > 1

    run(test)


def test_a_late_reply_never_reaches_another_caller(server: LedgerServer) -> None:
    """Replies withheld past the timeout: the connection is given up, later calls get their own
    answers, each of which names its own state and epoch."""

    async def test() -> None:
        async with (
            LedgerProxy(server.socket_path) as proxy,
            open_ledger(proxy.url, QUICK) as ledger,
        ):
            assert await ask(ledger, life("a")[0]) == Done(1, S.ADMITTED, 0)
            proxy.withholds = True
            lost = await asyncio.gather(*(ask(ledger, op) for op in life("a")[1:4]))
            assert [type(answer) for answer in lost] == [Unavailable] * 3
            proxy.withholds = False
            assert await ask_until_available(ledger, life("b")[0]) == Done(1, S.ADMITTED, 0)
            assert await ask(ledger, RetryRequest("nobody", 1, ROUTER)) == Conflict(0, None)
            # What was asked on the connection that was given up did happen.
            assert await ask(ledger, life("a")[3]) == Done(1, S.COMMITTED, 1)
            assert ledger.connects >= 2

    run(test)


def test_a_slow_network_keeps_each_answer_with_its_call(server: LedgerServer) -> None:
    """With 20 ms each way and many calls in flight, every answer is its own call's."""

    async def test() -> None:
        async with (
            LedgerProxy(server.socket_path) as proxy,
            open_ledger(proxy.url, PATIENT) as ledger,
        ):
            proxy.delay_s = 0.02
            names = [f"d{number}" for number in range(100)]
            await asyncio.gather(*(ask(ledger, life(name)[0]) for name in names[::2]))
            answers = await asyncio.gather(
                *(ask(ledger, RetryRequest(name, 1, ROUTER)) for name in names)
            )
            for number, answer in enumerate(answers):
                wanted = Conflict(0, None) if number % 2 else Done(2, S.ADMITTED, 0)
                assert answer == wanted

    run(test)


def test_a_demoted_primary_is_left_until_it_is_one_again(
    server: LedgerServer, admin: redis.Redis
) -> None:
    """READONLY is an outage with that name, and ends without a restart."""

    async def test() -> None:
        async with open_ledger(server.url, QUICK) as ledger:
            admin.replicaof("127.0.0.1", 1)
            answer = await ask(ledger, life("x")[0])
            assert isinstance(answer, Unavailable)
            assert "READONLY" in answer.reason
            later = await ask(ledger, life("x")[0])
            assert isinstance(later, Unavailable)
            assert "replica" in later.reason
            admin.replicaof("NO", "ONE")
            assert await ask_until_available(ledger, life("x")[0]) == Done(1, S.ADMITTED, 0)

    run(test)


def test_a_full_server_refuses_new_requests_and_ends_live_ones(
    server: LedgerServer, admin: redis.Redis
) -> None:
    """Out of memory: admission is Unavailable with OOM; renewals, advances and ends go on."""

    async def test() -> None:
        async with open_ledger(server.url) as ledger:
            for op in [AcquireLease(member(ROUTER), TTL), *life("old")[:1]]:
                await ask(ledger, op)
            admin.config_set("maxmemory", 1)
            refused = await ask(ledger, life("new")[0])
            assert isinstance(refused, Unavailable)
            assert "OOM" in refused.reason
            for op in life("old")[1:]:
                assert isinstance(await ask(ledger, op), Done)
            assert isinstance(await ask(ledger, RenewLease(ROUTER, TTL)), LeaseHeld)
            admin.config_set("maxmemory", 0)
            assert await ask(ledger, life("new")[0]) == Done(1, S.ADMITTED, 0)
            assert ledger.connects == 1

    run(test)


def test_close_waits_for_what_is_in_flight(server: LedgerServer) -> None:
    """Calls made before close are executed and answered; calls after it are refused."""

    async def test() -> None:
        async with LedgerProxy(server.socket_path) as proxy:
            async with open_ledger(proxy.url) as ledger:
                proxy.delay_s = 0.02
                before = [ask(ledger, life(f"w{number}")[0]) for number in range(20)]
            after = ask(ledger, life("w0")[1])
            assert [future.result() for future in before] == [Done(1, S.ADMITTED, 0)] * 20
            assert isinstance(await after, Unavailable)

    run(test)


def test_close_ends_in_time_when_nobody_answers(server: LedgerServer) -> None:
    """A frozen server does not hold up the end of a process."""

    async def test() -> None:
        async with open_ledger(server.url, QUICK) as ledger:
            server.freeze()
            waiting = ask(ledger, life("x")[0])
            began = asyncio.get_running_loop().time()
            await ledger.close()
            took = asyncio.get_running_loop().time() - began
            assert took < 2 * QUICK.ledger_timeout_ms / 1000
            assert isinstance(await waiting, Unavailable)
            server.thaw()

    run(test)


# --- the start --------------------------------------------------------------------------------


def start_error(url: str, patience_s: float = 0.3) -> BaseException:
    async def start() -> None:
        ledger = RedisLedger(url, "t", QUICK, lambda error: None)
        await ledger.start(patience_s)

    with pytest.raises((LedgerUnfit, LedgerUnreachable)) as caught:
        asyncio.run(start())
    return caught.value


def test_an_evicting_server_is_refused_at_the_start(
    server: LedgerServer, admin: redis.Redis
) -> None:
    """The process ends with a text that names the policy, at once."""
    admin.config_set("maxmemory-policy", "allkeys-lru")
    error = start_error(server.url, patience_s=60)
    assert isinstance(error, LedgerUnfit)
    assert "allkeys-lru" in str(error)


def test_an_unreachable_server_is_named(server: LedgerServer) -> None:
    """Nobody there, or somebody frozen: LedgerUnreachable with the address, in bounded time."""
    server.freeze()
    assert "no answer" in str(start_error(server.url))
    server.kill()
    error = start_error(server.url)
    assert isinstance(error, LedgerUnreachable)
    assert str(server.socket_path) in str(error)


def test_a_server_that_is_late_is_waited_for(server: LedgerServer) -> None:
    """A ledger that comes up within the patience is used, as after a power-up of everything."""

    async def test() -> None:
        server.stop()
        ledger = RedisLedger(server.url, "t", LIMITS, lambda error: None)
        starting = asyncio.create_task(ledger.start())
        await asyncio.to_thread(server.start)
        await starting
        assert await ask(ledger, life("x")[0]) == Done(1, S.ADMITTED, 0)
        await ledger.close()

    run(test)


def test_a_password_is_used_and_a_wrong_one_is_said(
    server: LedgerServer, admin: redis.Redis
) -> None:
    """The URL's password opens the server; without it the error is the server's."""
    admin.config_set("requirepass", "hunter2")

    async def test() -> None:
        async with open_ledger(server.url.replace("unix://", "unix://:hunter2@")) as ledger:
            assert await ask(ledger, life("x")[0]) == Done(1, S.ADMITTED, 0)

    run(test)
    assert "NOAUTH" in str(start_error(server.url))
    wrong = str(start_error(server.url.replace("unix://", "unix://:hunter3@")))
    assert "WRONGPASS" in wrong
    assert "hunter3" not in wrong


def test_something_else_on_the_port_is_not_taken_for_a_ledger() -> None:
    """A web server answers: LedgerUnreachable, and no endless wait."""

    async def test() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        web = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = web.sockets[0].getsockname()[1]
        ledger = RedisLedger(f"redis://127.0.0.1:{port}", "t", QUICK, lambda error: None)
        with pytest.raises(LedgerUnreachable, match="protocol error"):
            await ledger.start(0.1)
        web.close()

    run(test)


# --- what is left behind ----------------------------------------------------------------------


def test_nothing_is_left_after_the_requests_ended(server: LedgerServer, admin: redis.Redis) -> None:
    """While they live: one key a request. After their end and its TTL: the size of before."""

    async def test() -> None:
        async with open_ledger(server.url) as ledger:
            shell = LeaseShell(member(ROUTER), ledger)
            await until(lambda: shell.keeper.state is LeaseState.HELD)
            base = admin.dbsize()
            names = [f"z{number}" for number in range(500)]
            for name in names:
                for op in life(name)[:3]:
                    ledger.call(op, lambda _: None)
            await ask(ledger, life(names[-1])[2])
            # The index of owners is the one more; within a burst nothing has expired yet.
            assert admin.dbsize() == base + len(names) + 1
            for number, name in enumerate(names):
                if number % 3 == 0:
                    ledger.call(RetryRequest(name, 1, ROUTER), lambda _: None)
                    ledger.call(EndRequest(name, 2, CANCELLED, GATEWAY), lambda _: None)
                else:
                    ledger.call(EndRequest(name, 1, CANCELLED, GATEWAY), lambda _: None)
            await ask(ledger, RetryRequest("nobody", 1, ROUTER))
            assert admin.exists(Keys("t").owners) == 0
            for key in admin.scan_iter(Keys("t").request("*")):
                assert admin.pttl(key) != -1
            await until(lambda: admin.dbsize() == base)
            shell.leave()
            await until(lambda: admin.exists(Keys("t").leases) == 0)
            # The ledger's own id is all that stays.
            assert [key.decode() for key in admin.scan_iter()] == [Keys("t").meta]

    run(test)


def test_it_runs_on_uvloop(server: LedgerServer) -> None:
    """The adapter makes no use of what only asyncio's own loop has."""

    async def test() -> None:
        async with open_ledger(server.url, PATIENT) as ledger:
            answers = await asyncio.gather(*(ask(ledger, op) for op in life("u")))
            assert all(isinstance(answer, Done) for answer in answers)
            assert ledger.calls == {
                "AdmitRequest": 1,
                "PlaceRequest": 1,
                "AdvanceRequest": 3,
                "EndRequest": 1,
            }

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
