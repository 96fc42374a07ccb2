"""Headless Chromium, driven over the DevTools protocol: just what the playground's tests need."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
DEADLINE_S = 20.0


def find_chromium() -> str | None:
    """Return the browser's path, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """A browser process with an empty profile; ends with the ``with`` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Browser:
        program = find_chromium()
        assert program is not None
        profile = self._folder / "profile"
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "HOME": str(self._folder)},
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if b"DevTools listening on" in line:
                self.port = int(line.rsplit(b":", 1)[1].split(b"/")[0])
                break
        assert self.port, "the browser did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def open(self) -> Page:
        """Return a new page's connection; use it with ``async with``."""
        answer = httpx.put(f"http://127.0.0.1:{self.port}/json/new?about:blank")
        return Page(answer.json()["webSocketDebuggerUrl"])


class Page:
    """One tab."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._next = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        """Console errors, exceptions, violated policies."""
        self.requested: list[str] = []
        """Every address the page asked for."""

    async def __aenter__(self) -> Page:
        self._ws: ClientConnection = await connect(self._url, max_size=None)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._ws.close()

    async def _read(self) -> None:
        async for raw in self._ws:
            message = json.loads(raw)
            if (number := message.get("id")) in self._answers:
                self._answers.pop(number).set_result(message)
                continue
            values = message.get("params", {})
            match message.get("method"):
                case "Runtime.exceptionThrown":
                    self.problems.append(str(values["exceptionDetails"]))
                case "Log.entryAdded" if values["entry"]["level"] == "error":
                    self.problems.append(values["entry"]["text"])
                case "Network.requestWillBeSent":
                    self.requested.append(values["request"]["url"])
                case _:
                    pass

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a DevTools method."""
        self._next += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._next] = future
        await self._ws.send(json.dumps({"id": self._next, "method": method, "params": params}))
        message = await asyncio.wait_for(future, DEADLINE_S)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, accept: Callable[[Any], bool] = bool) -> Any:
        """Wait until the expression's value is accepted; looked at once a frame of the page."""
        async with asyncio.timeout(DEADLINE_S):
            while not accept(found := await self.value(expression)):
                await self.value("new Promise((done) => requestAnimationFrame(done))")
        return found

    async def go(self, url: str) -> None:
        """Open an address."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState", lambda state: state == "complete")

    async def viewport(self, width: int, height: int, *, phone: bool, dark: bool = False) -> None:
        """Pretend to be a device."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    async def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press and release one key."""
        code = {"Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    async def click(self, selector: str) -> None:
        """Click the middle of an element, as a mouse would."""
        box = await self.value(
            f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    async def screenshot(self, path: Path) -> None:
        """Save what is seen."""
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))
