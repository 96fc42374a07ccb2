"""What a worker may become, where the word is kept, and what comes first when it changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from baton.core.events import PromptsTaken, RoleLeft
from baton.core.ids import Peer, Role, WorkerRole
from baton.ports.ledger import LeaveRole, Leaving, Unavailable
from baton.runtime import logs, roles
from baton.runtime.config import load
from baton.runtime.role_change import RoleChange
from baton.runtime.roles import first_role, kept_role, why_not
from baton.runtime.service import Context
from baton.wire.messages import ChangeRole
from support.runtime_fakes import HeldLedger

ME, OTHER = Peer("decode-1", 7), Peer("decode-0", 8)
W = WorkerRole


def test_what_a_worker_is_before_anybody_says_anything() -> None:
    """The mode decides whether decode workers take prompts; others have no role to change."""
    assert first_role("split", Role.DECODE) is W.DECODE
    assert first_role("adaptive", Role.DECODE) is W.MIXED
    assert first_role("colocated", Role.DECODE) is W.MIXED
    assert first_role("adaptive", Role.PREFILL) is W.PREFILL
    assert first_role("split", Role.ROUTER) is None


def test_the_last_word_is_kept(tmp_path: Path) -> None:
    """Of each worker its own; what nobody can read is nothing."""
    assert kept_role(tmp_path, "decode-0") is None
    roles.keep_role(tmp_path, "decode-0", W.PREFILL)
    roles.keep_role(tmp_path, "decode-0", W.MIXED)
    roles.keep_role(tmp_path, "decode-1", W.PREFILL)
    assert kept_role(tmp_path, "decode-0") is W.MIXED
    assert kept_role(tmp_path, "decode-1") is W.PREFILL
    (tmp_path / roles.FOLDER / "decode-1").write_text("pre")
    assert kept_role(tmp_path, "decode-1") is None
    roles.forget_role(tmp_path, "decode-0")
    roles.forget_role(tmp_path, "decode-0")
    assert kept_role(tmp_path, "decode-0") is None


@pytest.mark.parametrize(
    ("mode", "now", "wanted", "others", "words"),
    [
        ("split", W.DECODE, W.PREFILL, True, ""),
        ("split", W.DECODE, W.PREFILL, False, "last worker that decodes"),
        ("split", W.PREFILL, W.DECODE, False, "last prefill worker"),
        ("split", W.DECODE, W.MIXED, True, "--mode adaptive"),
        ("adaptive", W.PREFILL, W.MIXED, False, ""),
        ("adaptive", W.MIXED, W.PREFILL, False, "last worker that decodes"),
        ("adaptive", W.MIXED, W.DECODE, False, ""),
        ("colocated", W.MIXED, W.PREFILL, True, "all workers are mixed"),
    ],
)
def test_what_stands_against_a_change(
    mode: Any, now: WorkerRole, wanted: WorkerRole, others: bool, words: str
) -> None:
    """The mode, and that the last of a kind stays; between mixed and decode nobody leaves."""
    found = why_not("decode-1", now, wanted, mode, others=others)
    assert bool(found) == bool(words)
    assert words in found


@dataclass
class Worker:
    """One worker's role, and everything it talks to."""

    run_dir: Path
    role: WorkerRole = W.DECODE
    others: tuple[Peer, ...] = (OTHER,)
    mode: str = "split"
    busy: str = ""
    became: list[object] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    ledger: HeldLedger = field(default_factory=HeldLedger)

    def __post_init__(self) -> None:
        unused = cast(Any, None)
        context = Context(
            config=load(None, {"BATON_CLUSTER_MODE": self.mode}),
            role=self.role.process,
            me=ME,
            run_dir=self.run_dir,
            placement=unused,
            clock=unused,
            loop=unused,
            log=logs.configure("info", bound={}),
            feed=unused,
            crash=unused,
            end=unused,
            worker_role=self.role,
        )
        context.ledger = self.ledger
        others = lambda role: self.others if role is context.role else ()  # noqa: E731
        self.change = RoleChange(context, others, lambda: self.busy, self.became.append)

    def ask(self, role: WorkerRole) -> list[str]:
        """Ask for ``role``; return what was answered at once."""
        self.answers.clear()
        self.change.ask(ChangeRole(role), self.answers.append)
        return list(self.answers)

    def reply(self, reply: Leaving | Unavailable) -> str:
        """Let the ledger answer; return what whoever asked is told."""
        assert not self.answers and not self.became
        self.ledger.calls.pop()[1](reply)
        (answer,) = self.answers
        return answer


def test_the_ledger_gives_leave_then_the_word_is_kept_then_the_machine_ends(tmp_path: Path) -> None:
    """Asked again meanwhile, by others too, nothing more happens."""
    worker = Worker(tmp_path)
    others: list[str] = []
    worker.change.ask(ChangeRole(W.PREFILL), others.append)
    assert worker.ask(W.PREFILL) == []
    (other, (op, _)) = worker.ledger.calls
    assert isinstance(op, LeaveRole)
    assert (op.peer, op.others) == (ME, (OTHER,))
    assert kept_role(tmp_path, ME.worker_id) is None
    assert worker.reply(Leaving(granted=True)) == ""
    assert kept_role(tmp_path, ME.worker_id) is W.PREFILL
    assert worker.became == [RoleLeft()]
    other[1](Leaving(granted=True))
    assert others == [""]
    assert worker.ask(W.PREFILL) == [""]
    assert "becoming prefill" in worker.ask(W.DECODE)[0]
    assert worker.became == [RoleLeft()]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Leaving(granted=False, by=OTHER), "decode-0 changes its role"),
        (Leaving(granted=False), "no other worker"),
        (Unavailable("away"), "does not answer"),
    ],
)
def test_without_leave_nothing_changes(
    tmp_path: Path, reply: Leaving | Unavailable, words: str
) -> None:
    """It may be asked again."""
    worker = Worker(tmp_path)
    worker.ask(W.PREFILL)
    assert words in worker.reply(reply)
    assert kept_role(tmp_path, ME.worker_id) is None
    assert worker.ask(W.PREFILL) == []
    assert worker.reply(Leaving(granted=True)) == ""


def test_a_worker_that_ends_while_the_ledger_is_asked_keeps_its_role(tmp_path: Path) -> None:
    """Its stop is a stop."""
    worker = Worker(tmp_path)
    worker.ask(W.PREFILL)
    worker.busy = "decode-1 is ending"
    assert worker.reply(Leaving(granted=True)) == "decode-1 is ending"
    assert kept_role(tmp_path, ME.worker_id) is None


def test_prompts_need_no_leave(tmp_path: Path) -> None:
    """Between mixed and decode nothing ends; the word is kept all the same."""
    worker = Worker(tmp_path, role=W.MIXED, mode="adaptive", others=())
    assert worker.ask(W.MIXED) == [""]
    assert worker.ask(W.DECODE) == [""]
    assert worker.became == [PromptsTaken(mixed=False)]
    assert kept_role(tmp_path, ME.worker_id) is W.DECODE
    assert worker.ledger.calls == []


def test_whom_the_mode_can_do_without_needs_nobody_in_its_place(tmp_path: Path) -> None:
    """The last prefill worker of an adaptive cluster; of a split one it is not even asked for."""
    worker = Worker(tmp_path, role=W.PREFILL, mode="adaptive", others=())
    worker.ask(W.MIXED)
    op = worker.ledger.calls[-1][0]
    assert isinstance(op, LeaveRole) and op.others == ()
    assert "last prefill worker" in Worker(tmp_path, role=W.PREFILL, others=()).ask(W.DECODE)[0]
