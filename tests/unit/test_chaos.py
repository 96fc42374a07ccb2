"""What judges a chaos run is judged itself: every kind of bad answer is told from a right one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from chaos import client, faults, links, report
from chaos.catalogue import FAKE, Back, Item, Whole, catalogue
from chaos.excuse import excuse
from chaos.faults import Done, Fault
from chaos.heard import Heard
from chaos.judge import Class, judge
from chaos.load import Judged

DIALLER = """
import socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
line.sendall(b"hello")
while data := line.recv(1000):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
"""


def heard(ids: list[int], *, done: bool = True, **fields: object) -> Heard:
    """Return what a client heard that should have heard 1 to 6."""
    usage = {"prompt_tokens": 3, "completion_tokens": 6}
    whole = Whole(ids=[1, 2, 3, 4, 5, 6], text="abcdef", finish="length", usage=usage)
    item = Item("short-0", "/v1/completions", {"stream": True}, reference=whole)
    answer = Whole(ids=ids, text="".join(" abcdef"[each] for each in ids))
    if done:
        answer.finish, answer.usage = "length", dict(usage)
    found = Heard(item, answer=answer, done=done)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (Class.RIGHT, heard([1, 2, 3, 4, 5, 6])),
        (Class.LEFT, heard([1, 2], done=False, left=True)),
        (Class.WRONG, heard([1, 2, 6, 6, 6, 6])),
        (Class.GAP, heard([1, 2, 4, 5, 6])),
        (Class.GAP, heard([1, 2, 2, 3, 4])),
        (Class.GAP, heard([1, 2, 3])),
        (Class.SILENT, heard([1, 2], done=False, silent=True)),
        (Class.SILENT, heard([1, 2], done=False, broken="reset")),
        (Class.FAILED, heard([1], done=False, status=200, error={"code": "worker_lost"})),
        (Class.REFUSED, heard([], done=False, status=503, error={"code": "no_router"})),
        (Class.FAILED, heard([1, 2, 3, 4, 5, 6], forgotten=1)),
        (Class.WRONG, heard([1, 2, 3, 4, 5, 6], before=[Whole(ids=[1, 9])])),
    ],
)
def test_every_answer_has_its_class(what: Class, found: Heard) -> None:
    """Right, left, refused and failed; and what must never be: wrong, a gap, twice, silent."""
    assert judge(found).what is what


def test_only_a_gateways_death_excuses_a_broken_connection() -> None:
    """And only the loss of the ledger's data an unknown token."""
    assert judge(heard([1], done=False, broken="x"), excused="it died").what is Class.BROKEN
    forgotten = heard([1, 2, 3, 4, 5, 6], forgotten=1)
    assert judge(forgotten, may_forget=True).what is Class.RIGHT


def struck(kind: str, victim: str = "gateway-0/7", at: float = 10.0, **fields: object) -> Done:
    """Return a fault at ``at``, mended two seconds later."""
    action, target = kind.split(maxsplit=1)
    done = Done(Fault(1, target, action, "queued", 2.0, 0), at=at, victim=victim)
    done.mended_at = at + 2.0
    for name, value in fields.items():
        setattr(done, name, value)
    return done


def lost(sent: float, ended: float, name: str = "", *, proxied: bool = False) -> Heard:
    """Return a plain client's broken connection."""
    times = {"sent_at": sent, "ended_at": ended, "broken": "reset", "through_proxy": proxied}
    return heard([1], done=False, id=name, **times)


@pytest.mark.parametrize(
    ("excused", "found", "fault", "gateway"),
    [
        (True, lost(9.0, 10.1, "a"), struck("kill gateway"), "gateway-0/7"),
        (True, lost(9.0, 10.1, "a"), struck("kill gateway", hit=frozenset({"a"})), ""),
        (False, lost(9.0, 10.1, "a"), struck("kill gateway"), "gateway-1/8"),
        (False, lost(9.0, 10.1, "a"), struck("kill gateway", hit=frozenset({"a"})), "gateway-1/8"),
        (False, lost(11.0, 12.0, "a"), struck("kill gateway"), "gateway-0/9"),
        (False, lost(9.0, 10.1, "a"), struck("kill gateway"), ""),
        (False, lost(9.0, 10.1, "a"), struck("kill gateway", victim=""), ""),
        (True, lost(9.0, 10.1), struck("kill gateway"), ""),
        (False, lost(11.0, 11.5), struck("kill gateway"), ""),
        (False, lost(9.0, 30.0), struck("kill gateway"), ""),
        (True, lost(11.0, 12.5), struck("freeze gateway"), ""),
        (False, lost(13.0, 13.5), struck("freeze gateway"), ""),
        (False, lost(9.0, 10.1), struck("kill decode"), ""),
        (True, lost(9.0, 10.1, "a", proxied=True), struck("cut client"), "gateway-1/8"),
        (False, lost(9.0, 10.1, "a"), struck("cut client"), "gateway-1/8"),
        (False, lost(11.0, 12.0, "a", proxied=True), struck("cut client"), "gateway-1/8"),
    ],
)
def test_who_was_not_connected_to_it_is_not_excused(
    excused: bool, found: Heard, fault: Done, gateway: str
) -> None:
    """A connection breaks with its own gateway or its own line, and at that time."""
    assert bool(excuse(found, [fault], gateway)) is excused


def test_a_client_that_comes_back_needs_no_excuse() -> None:
    """It has to get its whole answer."""
    found = lost(9.0, 10.1, "a")
    found.item.back = Back.TOKEN
    assert excuse(found, [struck("kill gateway")], "gateway-0/7") == ""


def test_choices_are_one_answer_in_their_order() -> None:
    """So a token in another choice's place is a wrong one."""
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    choices = [
        {"index": 1, "token_ids": [3, 4], "text": "cd", "finish_reason": "stop"},
        {"index": 0, "token_ids": [1, 2], "text": "ab", "finish_reason": "length"},
    ]
    found = Heard(Item("pair", "/v1/completions", {}), status=200)
    client._take_whole(found, json.dumps({"id": "r", "choices": choices, "usage": usage}).encode())
    assert (found.answer.ids, found.answer.text) == ([1, 2, 3, 4], "abcd")
    assert found.answer.finish == "length stop" and found.done


def test_what_is_asked_is_drawn_from_the_seed() -> None:
    """Every kind is there, the same bodies for the same seed."""
    items = catalogue("m", FAKE, 3)
    assert [each.body for each in items] == [each.body for each in catalogue("m", FAKE, 3)]
    assert len({each.name for each in items}) == len(items)
    asked = {key for each in items for key in each.body}
    assert {"min_tokens", "logit_bias", "bad_words", "allowed_token_ids", "n", "top_k"} <= asked
    stopped = [each for each in items if each.stop_of]
    assert {each.body["temperature"] for each in stopped} == {0, 0.9}


def test_shares_of_a_plan_are_the_plan() -> None:
    """Every kind at every stage, whatever is left out, and nothing twice within a round."""
    cells = sum(len(actions) for actions in faults.ACTIONS.values()) * len(faults.STAGES)
    first = list(islice(faults.plan(3), cells))
    assert len({(each.kind, each.stage) for each in first}) == cells
    less = list(islice(faults.plan(3, skip=frozenset({"roll back", "kill decode"})), cells))
    kinds = {each.kind for each in less}
    assert {"kill prefill", "restart decode"} <= kinds
    assert not kinds & {"roll back ledger", "kill decode"}


def test_a_stage_that_was_waited_for_by_the_clock_is_not_said_to_be_reached() -> None:
    """Nobody saw it; with the first token there it is even past."""
    done = [struck("kill decode"), struck("kill decode", timed=True)]
    done.append(struck("kill decode", reached=False))
    facts = {"part": "real", "title": "t", "minutes": 1.0, "audits": 1, "note": "", "seed": 1}
    found = report.slice_of(done, [], [], facts)
    assert (found["faults_at_the_wanted_stage"], found["faults_about_there"]) == (1, 1)
    before, after = (heard(ids, done=False, id="a") for ids in ([], [1]))
    stop = asyncio.run(faults.come_to("last chunk", before, FAKE, 0.001))
    assert stop is not None and stop.timed
    assert asyncio.run(faults.come_to("last chunk", after, FAKE, 0.001)) is None
    stop = asyncio.run(faults.come_to("committed", after, FAKE, 0.001))
    assert stop is not None and not stop.timed


def test_slices_add_up() -> None:
    """What was bad in one of them is bad in the sum."""
    done = Done(Fault(1, "decode", "kill", "mid decode", 0.0, 0), at=2.05, hit=frozenset({"a"}))
    done.mended_at, done.ready_at = 2.1, 3.1
    right = heard([1, 2, 3, 4, 5, 6], id="a", sent_at=1.0, ended_at=4.0)
    right.arrivals = [2.0, 2.5, 2.6]
    facts = {"part": "fake", "title": "t", "minutes": 1.0, "audits": 1, "note": ""}
    facts["conditions"] = {}
    good = report.slice_of([done], [Judged(right, judge(right))], [], {**facts, "seed": 1})
    lost = heard([1], done=False, silent=True, sent_at=1.0, ended_at=9.0)
    bad = report.slice_of([done], [Judged(lost, judge(lost))], [], {**facts, "seed": 2})
    assert not report.is_bad(good)
    total = report.merged([good, bad])
    assert report.is_bad(total)
    assert (total["faults"], total["classes"]["right"], total["classes"]["silent"]) == (2, 1, 1)
    assert (total["faults_at_the_wanted_stage"], total["faults_about_there"]) == (2, 0)
    assert total["kinds"]["kill decode"]["added_stall_s"]["p50"] == 0.5
    assert total["seeds"] == [1, 2]


@contextmanager
def connected(folder: Path) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """This process accepts as ``decode-0`` what another one dialled as ``gateway-0``."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "decode-0.sock"))
        listener.listen()
        path = str(folder / "decode-0.sock")
        command = [sys.executable, "-c", DIALLER, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as dialler:
            accepted, _ = listener.accept()
            with accepted:
                yield accepted, dialler
            dialler.kill()


def may_copy_descriptors() -> bool:
    """Whether containers' rules let this process do what root may."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        with socket.socket(socket.AF_UNIX) as own:
            copy = links._copy(pidfd, own.fileno())
    except PermissionError:
        return False
    finally:
        os.close(pidfd)
    assert copy is not None
    copy.close()
    return True


@pytest.mark.skipif(not may_copy_descriptors(), reason="pidfd_getfd is forbidden here")
@pytest.mark.parametrize("victim", ["decode-0", "gateway-0"])
def test_a_connection_is_broken_under_its_owners(victim: str, tmp_path: Path) -> None:
    """Garbage arrives, bytes do not, and then it ends, on both sides, whoever dialled."""
    with connected(tmp_path) as (accepted, dialler):
        pids = {"decode-0": os.getpid(), "gateway-0": dialler.pid}
        with links.connections(tmp_path, pids, victim) as some:
            assert [(each.owner, each.dialler_pid) for each in some] == [("decode-0", dialler.pid)]
            links.swallow(some)
            accepted.setblocking(False)
            with pytest.raises(BlockingIOError):
                accepted.recv(1)
            links.garble(some, random.Random(1))
            assert dialler.stdout is not None
            assert dialler.stdout.read(8) == random.Random(1).randbytes(8)
            links.cut(some)
        assert accepted.recv(1) == b""
        assert dialler.wait(30) == 0
