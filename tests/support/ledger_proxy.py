"""A TCP proxy before the ledger's server that delays, withholds and cuts, for fault tests."""

from __future__ import annotations

import asyncio
from pathlib import Path


class LedgerProxy:
    """Listens on loopback and forwards to the server's Unix socket. One event loop."""

    def __init__(self, target: Path) -> None:
        self.delay_s = 0.0
        """Each way."""
        self.reply_bytes_left: int | None = None
        """So many bytes of replies are still passed on; then the connection is cut."""
        self.withholds = False
        """Replies are taken from the server and kept."""
        self.connections = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LedgerProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there, back = await asyncio.open_unix_connection(self._target)
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._requests(reader, back), self._replies(there, writer))
        except (OSError, asyncio.CancelledError):
            # The end of a task that asyncio's streams made; it is nobody's to wait for.
            pass
        finally:
            self._writers -= {writer, back}
            writer.transport.abort()
            back.close()
            self._tasks.discard(task)

    async def _requests(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await asyncio.sleep(self.delay_s)
            target.write(data)
            await target.drain()
        raise ConnectionResetError

    async def _replies(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await asyncio.sleep(self.delay_s)
            if self.withholds:
                continue
            left = self.reply_bytes_left
            if left is not None:
                target.write(data[:left])
                self.reply_bytes_left = left - len(data)
                if self.reply_bytes_left <= 0:
                    self.reply_bytes_left = None
                    await target.drain()
                    raise ConnectionResetError
            else:
                target.write(data)
                await target.drain()
        raise ConnectionResetError
