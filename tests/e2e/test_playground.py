"""The playground in a real browser: an answer streams, can be stopped, and errors are told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from baton.core.outcomes import Reason
from support.gateway_browser import Browser, Page, find_chromium
from support.gateway_cluster import DECODE, GatewayCluster, Script

pytestmark = pytest.mark.browser

ANSWER = (
    "A KV cache keeps the keys and values of tokens that were read already, so that each new "
    "token costs one step — not a re-reading of everything. Prefill fills it; decode goes on "
    "from it. 🏃"
)
LAST = "document.querySelector('.turn.assistant:last-of-type .bubble')?.textContent ?? ''"
FACTS = "document.querySelector('.turn.assistant:last-of-type .facts')?.textContent ?? ''"
NOTICE = (
    "document.querySelector('#notice').hidden ? '' : document.querySelector('#notice').textContent"
)
STATUS = "document.querySelector('#status').dataset.state"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_chromium() is None:
        text = "no chromium on this machine: the playground is NOT tested"
        if os.environ.get("BATON_REQUIRE_BROWSER") == "1":
            pytest.fail(text)
        pytest.skip(text)
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GatewayCluster]:
    script = Script(ids=tuple(ANSWER.encode()), step_s=0.002)
    with GatewayCluster(tmp_path, script=script) as running:
        yield running


def use(
    browser: Browser,
    cluster: GatewayCluster,
    story: Callable[[Page], Awaitable[None]],
    *,
    phone: bool = False,
    dark: bool = False,
) -> list[str]:
    """Open the playground and live the story; return what went wrong in the page."""

    async def main() -> list[str]:
        async with browser.open() as page:
            size = (390, 844) if phone else (1200, 800)
            await page.viewport(*size, phone=phone, dark=dark)
            await page.go(cluster.url + "/")
            await page.until(STATUS, lambda state: state == "ok")
            await page.until("document.querySelector('#model').textContent", lambda t: "fake" in t)
            await story(page)
            assert all(url.startswith((cluster.url, "data:")) for url in page.requested)
            return page.problems

    return asyncio.run(asyncio.wait_for(main(), 60))


async def ask(page: Page, text: str) -> None:
    await page.value("document.querySelector('#prompt').focus()")
    await page.type(text)
    await page.press("Enter")


def keep(page_name: str) -> Path | None:
    """Where screenshots go, if somebody wants to look at them."""
    folder = os.environ.get("BATON_SCREENSHOTS")
    return Path(folder) / f"{page_name}.png" if folder else None


@pytest.mark.parametrize("phone", [False, True], ids=["desk", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_answer_streams(
    browser: Browser, cluster: GatewayCluster, phone: bool, dark: bool
) -> None:
    """The answer grows while it is generated; time to first token and tokens per second are
    shown; nothing is loaded from elsewhere and nothing violates the policy."""

    async def story(page: Page) -> None:
        if (path := keep(f"welcome-{phone}-{dark}")) is not None:
            await page.screenshot(path)
        await ask(page, "What is a KV cache?")
        partial = await page.until(LAST, lambda text: len(text) > 0)
        assert ANSWER.startswith(partial)
        await page.until(LAST, lambda text: text == ANSWER)
        facts = await page.until(FACTS)
        assert "ms to first token" in facts
        assert "tokens/s" in facts
        assert f"{len(ANSWER.encode()) + 1} tokens" in facts
        width = await page.value("document.documentElement.scrollWidth - innerWidth")
        assert width <= 0, "nothing is wider than the screen"
        if (path := keep(f"answer-{phone}-{dark}")) is not None:
            await page.screenshot(path)
            await page.click("#settings-open")
            await page.screenshot(path.with_name(f"settings-{phone}-{dark}.png"))

    assert use(browser, cluster, story, phone=phone, dark=dark) == []


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_cancels(browser: Browser, cluster: GatewayCluster, way: str) -> None:
    """Stop ends the stream, and the work behind it, and keeps what was written."""
    cluster.script = Script(ids=tuple(b"on and on "), endless=True, step_s=0.01)

    async def story(page: Page) -> None:
        await ask(page, "Talk")
        await page.until(LAST, lambda text: len(text) > 5)
        if way == "button":
            await page.click("#stop")
        else:
            await page.press("Escape")
        assert "stopped" in await page.until(FACTS)
        assert await page.value("document.querySelector('#stop').hidden")

    use(browser, cluster, story)
    work = cluster.only_work()
    outcome = cluster.wait(lambda: work.ended)
    assert outcome is not None
    assert outcome.reason is Reason.CLIENT_CANCELLED


def test_a_broken_connection_is_resumed(browser: Browser, cluster: GatewayCluster) -> None:
    """The page comes back by itself, and the answer is whole: nothing lost, nothing twice."""
    cluster.script = Script(ids=tuple(ANSWER.encode()), step_s=0.02)

    def cut() -> None:
        for transport in list(cluster.serving.connections):
            transport.abort()  # type: ignore[attr-defined]

    async def story(page: Page) -> None:
        await ask(page, "Talk")
        for part in (4, 12):
            await page.until(LAST, lambda text, part=part: len(text) > part)
            await asyncio.to_thread(cluster.call, cut)
        await page.until(LAST, lambda text: text == ANSWER)
        assert f"{len(ANSWER.encode()) + 1} tokens" in await page.until(FACTS)

    use(browser, cluster, story)
    assert len(cluster.works) == 1


def test_conversation_and_settings_are_sent(browser: Browser, cluster: GatewayCluster) -> None:
    """The second question carries the first; settings reach the request."""

    async def story(page: Page) -> None:
        await page.value(
            "for (const [id, value] of [['system', 'Be brief'], ['temperature', '0.3'],"
            " ['max-tokens', '300'], ['seed', '5']]) {"
            " const e = document.getElementById(id); e.value = value;"
            " e.dispatchEvent(new Event('input')); }"
        )
        await ask(page, "First?")
        await page.until(FACTS)
        await ask(page, "Second?")
        await page.until("document.querySelectorAll('.facts').length", lambda n: n == 2)

    assert use(browser, cluster, story) == []
    spec = list(cluster.works.values())[-1].spec
    prompt = bytes(i for i in memoryview(spec.prompt).cast("I") if i < 256)
    for part in (b"system\nBe brief", b"user\nFirst?", b"assistant\nA KV cache", b"user\nSecond?"):
        assert part in prompt
    assert spec.sampling.temperature == 0.3
    assert spec.sampling.seed == 5
    assert spec.max_tokens == 300


def test_a_new_chat_forgets_the_answer_under_way(browser: Browser, cluster: GatewayCluster) -> None:
    """Its first question goes out alone, also if the last chat's answer was still streaming."""
    cluster.script = Script(ids=tuple(b"on and on "), endless=True, step_s=0.01)

    async def story(page: Page) -> None:
        await ask(page, "Talk")
        await page.until(LAST, lambda text: len(text) > 5)
        await page.click("#clear")
        await page.until("document.querySelector('#stop').hidden")
        cluster.script = Script(ids=tuple(b"Hello."))
        await ask(page, "Fresh?")
        assert "tokens" in await page.until(FACTS)
        assert await page.value("document.querySelectorAll('.turn').length") == 2

    assert use(browser, cluster, story) == []
    spec = list(cluster.works.values())[-1].spec
    prompt = bytes(i for i in memoryview(spec.prompt).cast("I") if i < 256)
    assert b"user\nFresh?" in prompt
    assert b"on and on" not in prompt


def test_errors_are_told(browser: Browser, cluster: GatewayCluster) -> None:
    """A refusal, a cut stream and an unreachable server each say so; the question is kept."""

    async def story(page: Page) -> None:
        cluster.script = Script(refuse=Reason.OVERLOADED)
        await ask(page, "Refused?")
        assert "Try again in" in await page.until(NOTICE)
        assert await page.value("document.querySelector('#prompt').value") == "Refused?"
        cluster.script = Script(ids=tuple(b"half an answer"), fail_after=4)
        await page.press("Enter")
        assert "gave it up" in await page.until(FACTS)
        assert await page.value(LAST) == "half"
        await asyncio.to_thread(cluster.lose, DECODE)
        await page.value("fetch('health')")
        await page.until(STATUS, lambda state: state == "bad")
        text = await page.value("document.querySelector('#status-text').textContent")
        assert text == "no decode worker"

    use(browser, cluster, story)
