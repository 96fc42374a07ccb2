"""What a decode worker tells routers of its prefix cache."""

from __future__ import annotations

from baton.core.ids import Peer, Role
from baton.core.outcomes import Reason
from baton.core.prefix import chain_of, short_names
from baton.decode.io import RunStep, StepFinished
from baton.ports.driving import Send
from baton.ports.engine import Sampled
from baton.wire.messages import (
    BlocksChanged,
    BlocksListed,
    BlocksWanted,
    CancelWork,
    ReserveDecode,
    WorkerStatus,
)
from support.decode_parts import R1, SIZE, Decode, R, spec
from support.machine_playbook import ids, sent


def names(tokens: int, first: int = 1) -> bytes:
    """Return what stands for the full blocks of that many consecutive ids."""
    return short_names(chain_of(b"root", ids(*range(first, first + tokens)), SIZE))


class News(Decode):
    """A decode worker whose news are read."""

    def told(self, router: Peer = R) -> list[BlocksChanged]:
        return self.messages(BlocksChanged, router)

    def compute(self, tokens: int = 9, first: int = 1, request_id: str = "r") -> None:
        """Let one prompt be computed here, and be cancelled after its first token."""
        self.do_hear(R, ReserveDecode(spec(request_id, tokens, first, max_tokens=2), 1, None))
        self.step()
        self.do_hear(R, CancelWork(request_id, 1, Reason.CLIENT_CANCELLED))
        self.step()

    def step(self) -> None:
        """Answer the last step, whatever comes back."""
        step = self.last(RunStep)
        sums = tuple((7,) * len(checks) for checks in step.seals)
        self.do(StepFinished(step.step, (Sampled(50),), sums, 0.01))


def test_full_blocks_are_told_once_and_numbered() -> None:
    """Each router hears the same numbers; the status says the last one."""
    play = News()
    play.up(R1, Role.ROUTER)
    play.compute(9)
    play.wait(0.1)
    assert play.told(R) == play.told(R1)
    assert [message.number for message in play.told()] == list(range(1, len(play.told()) + 1))
    assert b"".join(message.stored for message in play.told()) == names(8)
    assert not any(message.removed for message in play.told())
    play.wait(1.0)
    assert play.messages(WorkerStatus, R)[-1].blocks_told == len(play.told())


def test_what_is_evicted_is_told_too() -> None:
    """Another prompt takes the blocks of the first: those names are gone."""
    play = News(blocks=4)
    play.compute(9)
    play.wait(0.1)
    before = len(play.told())
    play.compute(13, first=100, request_id="s")
    play.wait(0.1)
    news = play.told()[before:]
    gone = b"".join(message.removed for message in news)
    assert names(8)[8:] in (gone[at : at + 8] for at in range(0, len(gone), 8))
    assert b"".join(message.stored for message in news) == names(12, 100)


def test_changes_in_between_are_told_together() -> None:
    """Not more than one message in ``status_pause_ms``, but for those that go with a status."""
    play = News(blocks=64, status_pause_ms=200)
    play.wait(1.0)
    began = len(play.told())
    for number in range(10):
        play.compute(9, first=100 * number + 1, request_id=f"r{number}")
    play.wait(0.2)
    news = play.told()[began:]
    assert 1 <= len(news) <= 3
    assert sum(len(message.stored) for message in news) == 10 * 2 * 8


def test_too_many_changes_are_not_told_but_have_a_number() -> None:
    """The router has to ask then; what is sent has a bound."""
    play = News(blocks=64, block_names_max=3)
    play.wait(1.0)
    play.compute(21)
    play.wait(0.2)
    last = play.told()[-1]
    assert last.too_many and not last.stored and not last.removed
    assert last.number == len(play.told())


def test_a_router_gets_all_names_page_by_page() -> None:
    """Each page names the block that the next one starts with; the last one none."""
    play = News(blocks=8, block_names_max=3)
    play.compute(9)
    start: int | None = 0
    found = b""
    while start is not None:
        number = play.machine.news.number
        play.hear(R, BlocksWanted(start), sent(R, BlocksListed, start=start, number=number))
        page = play.messages(BlocksListed, R)[-1]
        found += page.stored
        start = page.next
    assert sorted(found[at : at + 8] for at in (0, 8)) == sorted((names(8)[:8], names(8)[8:]))
    assert play.messages(BlocksListed, R)[-1].start == 6
    play.hear(R, BlocksWanted(1_000), sent(R, BlocksListed, stored=b"", next=None))


def test_a_page_stands_behind_all_changes_until_then() -> None:
    """Its number is that of the last change, which has been sent before it."""
    play = News(blocks=8, status_pause_ms=10_000)
    play.compute(9)
    play.do_hear(R, BlocksWanted(0))
    page, last = play.messages(BlocksListed, R)[-1], play.told()[-1]
    assert page.number == last.number
    kinds = [type(each.message) for each in play.all if isinstance(each, Send)]
    assert kinds[-1] is BlocksListed and BlocksChanged in kinds[:-1]
    assert not play.pool.renamed
