"""Conversations with a decode worker that shuts down while others could go on with its requests."""

from __future__ import annotations

from baton.core.events import DrainRequested, PromptsTaken, RoleLeft
from baton.core.ids import Role
from baton.core.outcomes import Ending, Outcome, Reason
from baton.decode.io import RunStep
from baton.ports.driving import EXIT_ROLE, Exit
from baton.wire.messages import (
    CancelWork,
    DecodeReserved,
    MoveOffered,
    RequestEnded,
    TokenChunk,
    WorkerStatus,
    WorkFailed,
)
from support.decode_parts import ADVANCED, STEP, Decode, G, R, run, spec
from support.machine_playbook import sent

MOVED = CancelWork("r", 1, Reason.MOVED)
RELEASED = CancelWork("r", 2, Reason.SUPERSEDED)
DRAINED = Exit(0, "drained")


def running(play: Decode, tokens: int = 6) -> None:
    """Take ``r`` in; its first token is out and its next step runs."""
    play.local(spec("r", tokens=tokens, max_tokens=9))
    play.stepped((50,), ADVANCED, STEP, run(0, 50))


def test_a_draining_worker_offers_what_runs_and_goes_on() -> None:
    """Who could take it only the router knows; the offer comes after the word that nothing new is
    taken, and says how much the next place must hold."""
    play = Decode()
    running(play)
    play.feed(DrainRequested(), sent(R, MoveOffered, request_id="r", epoch=1, tokens=7))
    statuses = [each for each in play.all if sent(R, WorkerStatus).matches(each)]
    offers = [each for each in play.all if sent(R, MoveOffered).matches(each)]
    assert not statuses[-1].message.accepting
    assert play.all.index(statuses[-1]) < play.all.index(offers[0])
    play.stepped((51,), STEP, run(1, 51))
    play.stepped((52,), STEP, run(2, 52))


def test_a_prompt_that_prefill_still_writes_is_offered_when_it_is_complete() -> None:
    """What prefill has computed would be lost."""
    play = Decode()
    ticket = play.remote(spec(tokens=6))
    play.feed(DrainRequested())
    play.complete(ticket, 6)
    play.verified(ADVANCED, STEP, run(0, 50), sent(R, MoveOffered, request_id="r"))


def test_a_moved_sequence_is_stepped_no_more_and_keeps_its_blocks() -> None:
    """Not even the token of the step in flight is sent; the block that it filled has its name."""
    play = Decode()
    running(play, tokens=7)
    play.feed(DrainRequested(), sent(R, MoveOffered))
    play.hear(R, MOVED)
    play.stepped((51,))
    assert play.used() == 2
    first, second = (
        play.pool.blocks[number] for number in play.machine.state.sequences["r"].blocks
    )
    assert first.chain and second.chain
    play.hear(R, RELEASED, DRAINED)
    assert play.states() == {"FREE": 6, "CACHED": 2}


def test_a_request_that_ends_while_its_blocks_are_kept_lets_them_go() -> None:
    """The gateway tells everybody who may hold something."""
    play = Decode()
    running(play)
    play.feed(DrainRequested(), sent(R, MoveOffered))
    play.hear(R, MOVED)
    play.stepped((51,))
    play.hear(G, RequestEnded("r", 2, Outcome(Ending.COMPLETED)), DRAINED)


def test_an_answer_that_was_complete_before_the_move_is_kept_as_it_is() -> None:
    """The gateway has not spoken yet: the blocks are cached, the ids can be sent again."""
    play = Decode()
    play.local(spec("r", tokens=6, max_tokens=1))
    play.feed(DrainRequested(), sent(R, MoveOffered))
    play.stepped((50,), ADVANCED, sent(G, TokenChunk))
    play.hear(R, MOVED)
    assert play.states() == {"FREE": 7, "CACHED": 1}
    play.hear(R, RELEASED, DRAINED)


def test_a_router_that_is_lost_keeps_nothing_here() -> None:
    """It cannot say any more that another one has it."""
    play = Decode()
    running(play)
    play.feed(DrainRequested(), sent(R, MoveOffered))
    play.hear(R, MOVED)
    play.stepped((51,))
    play.lose(R, DRAINED)


def test_what_still_runs_is_offered_again_on_the_next_link() -> None:
    """The offer may have been lost with the link."""
    play = Decode()
    running(play)
    play.feed(DrainRequested(), sent(R, MoveOffered))
    play.lose(R)
    play.up(R, Role.ROUTER, sent(R, MoveOffered, request_id="r", epoch=1))


def test_memory_that_is_kept_for_others_gives_way_first() -> None:
    """What runs here goes on here; the import will find less and compute more."""
    play = Decode(blocks=4, growth_tokens=0)
    play.local(spec("a", tokens=7, first=30, max_tokens=9))
    play.stepped((60,), ADVANCED, STEP, sent(G, TokenChunk))
    play.reserve(spec("r", tokens=6, max_tokens=4), None, sent(R, DecodeReserved))
    play.feed(DrainRequested(), sent(R, MoveOffered), sent(R, MoveOffered))
    play.hear(R, MOVED)
    play.stepped((61,), STEP, sent(G, TokenChunk))
    assert [row.request_id for row in play.last(RunStep).rows] == ["a"]
    assert play.machine.state.sequences["r"].blocks == []
    play.hear(R, RELEASED)


def test_a_move_of_an_older_epoch_changes_nothing() -> None:
    """The router that sent it has been overtaken."""
    play = Decode()
    play.local(spec("r", tokens=6, max_tokens=9), epoch=2)
    play.hear(R, MOVED)
    play.stepped((50,), ADVANCED, STEP, run(0, 50, epoch=2))


def test_the_drains_end_lets_go_of_what_is_kept() -> None:
    """Nobody is told: its router has placed it elsewhere already."""
    play = Decode(drain_ms=1_000)
    running(play)
    play.feed(DrainRequested(), sent(R, MoveOffered))
    play.hear(R, MOVED)
    play.stepped((51,))
    assert play.wait(1.1) == [DRAINED]
    assert not play.messages(WorkFailed)


def test_a_worker_that_leaves_its_role_asks_for_another_machine() -> None:
    """As in a drain; a stop that comes meanwhile makes it a stop."""
    play = Decode()
    running(play)
    play.feed(RoleLeft(), sent(R, MoveOffered, request_id="r"))
    play.hear(R, MOVED)
    play.stepped((51,))
    play.hear(R, RELEASED, Exit(EXIT_ROLE, "drained"))
    play = Decode()
    running(play)
    play.feed(RoleLeft(), sent(R, MoveOffered, request_id="r"))
    play.feed(DrainRequested())
    play.hear(R, MOVED)
    play.stepped((51,))
    play.hear(R, RELEASED, DRAINED)


def test_whether_it_takes_prompts_is_told_to_the_routers() -> None:
    """At once, and nothing else changes."""
    play = Decode()
    running(play)
    play.wait(1.0)
    play.feed(PromptsTaken(mixed=True))
    play.wait(0.1)
    assert play.messages(WorkerStatus, R)[-1].mixed
    play.feed(PromptsTaken(mixed=False))
    play.wait(0.1)
    assert not play.messages(WorkerStatus, R)[-1].mixed
