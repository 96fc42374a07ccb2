"""A TCP proxy that cuts and delays: between clients and gateways, and before the ledger.

One event loop; it buffers no more than what one read brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """Listens on a loopback port of its own and passes everything on."""

    def __init__(self, connect: Callable[[], Awaitable[Streams]]) -> None:
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.cuts = 0
        """Connections cut so far."""

    async def start(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Cut everything and listen no more."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset all connections, on both sides."""
        self.cuts += len(self._writers) // 2
        for writer in self._writers:
            writer.transport.abort()

    def hold(self) -> None:
        """Let nothing through until :meth:`let_go`; connections stay."""
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        pair = {writer}
        try:
            there, back = await self._connect()
            pair.add(back)
            self._writers |= pair
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone: so is the other, below
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._open.wait()
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
