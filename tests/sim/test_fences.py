"""Whether a test of its own would see it: each fence is switched off, and that test must fail.

What the simulation sees is in ``test_mutations.py``. These fences stand behind others (a link has a
number, a block in quarantine is given to nobody), so that a cluster without one of them goes on as
if nothing had been, until the other one fails as well. So each has a test that looks at it alone,
named here, which is run with the fence switched off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.channel.layout import Records
from baton.core.lifecycles import LeaseState
from baton.decode.admission import Admission as DecodeAdmission
from baton.decode.handover import Handover
from baton.gateway.machine import GatewayMachine
from baton.ledger.scripts import Script
from baton.prefill.admission import Admission as PrefillAdmission
from baton.router.attempts import Attempts
from baton.sim.ledger import LedgerModel
from baton.transport.switchboard import Switchboard

TESTS = Path(__file__).resolve().parents[1]
Patch = pytest.MonkeyPatch


def any_epoch_in_the_scripts(patch: Patch) -> None:
    begin = Script.__init__

    def mutant(self: Script, name: str, prelude: str) -> None:
        begin(self, name, prelude)
        self.source = self.source.replace(b"record.epoch ~= epoch or ", b"")
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()

    patch.setattr(Script, "__init__", mutant)


def any_epoch_in_the_model(patch: Patch) -> None:
    move = LedgerModel._move

    def mutant(self: LedgerModel, op: Any, record: Any, now: int) -> Any:
        return move(self, msgspec.structs.replace(op, epoch=record.epoch), record, now)

    patch.setattr(LedgerModel, "_move", mutant)


def frames_for_anybody(patch: Patch) -> None:
    on_frame = Switchboard.on_frame

    def mutant(self: Switchboard, route: Any, parts: list[bytes], now: float) -> Any:
        header, *rest = parts
        if len(header) == 48:
            here = self.member.peer.incarnation.to_bytes(8, "big")
            header = header[:32] + here + header[40:]
        return on_frame(self, route, [header, *rest], now)

    patch.setattr(Switchboard, "on_frame", mutant)


def any_generation_in_the_records(patch: Patch) -> None:
    writable_by = Records.writable_by

    def mutant(self: Records, writer: int, epoch: int, block: int, generation: int) -> bool:
        if 0 <= block < self._blocks_total:
            generation = self.load(block).generation
        return writable_by(self, writer, epoch, block, generation)

    patch.setattr(Records, "writable_by", mutant)


def any_generation_in_an_announcement(patch: Patch) -> None:
    verify = Handover._verify

    def mutant(self: Handover, peer: Any, request_id: str, epoch: int, sums: Any) -> Any:
        record = self.tickets.get((request_id, epoch))
        generations = {} if record is None else record.generations
        told = [
            msgspec.structs.replace(each, generation=generations.get(each.logical, each.generation))
            for each in sums
        ]
        return verify(self, peer, request_id, epoch, tuple(told))

    patch.setattr(Handover, "_verify", mutant)


def without_a_lease(owner: type, name: str) -> Callable[[Patch], None]:
    """Let ``owner.name`` decide as if the lease were held."""
    method = getattr(owner, name)

    def mutant(self: Any, *given: Any) -> Any:
        before, self.state.lease = self.state.lease, LeaseState.HELD
        try:
            return method(self, *given)
        finally:
            self.state.lease = before

    return lambda patch: patch.setattr(owner, name, mutant)


@dataclass(frozen=True)
class Fence:
    """How it is switched off, and who sees that."""

    switch_off: Callable[[Patch], None]
    test: str


FENCES = {
    "the ledger's scripts compare epochs": Fence(
        any_epoch_in_the_scripts,
        "conformance/test_ledger.py::test_another_epoch_changes_nothing[redis]",
    ),
    "the simulated ledger compares epochs": Fence(
        any_epoch_in_the_model,
        "conformance/test_ledger.py::test_another_epoch_changes_nothing[sim]",
    ),
    "a frame names the incarnation that it is for": Fence(
        frames_for_anybody,
        "conformance/test_transport.py::test_a_dial_to_an_incarnation_that_is_gone_is_lost[sim]",
    ),
    "a store is for one generation of its block": Fence(
        any_generation_in_the_records,
        "conformance/test_channel.py::test_a_writer_may_write_exactly_what_is_filling_for_it[real]",
    ),
    "an announcement is of one generation of its block": Fence(
        any_generation_in_an_announcement,
        "unit/test_decode_handover.py"
        "::test_an_announcement_that_does_not_fit_its_ticket_ends_the_attempt",
    ),
    "a gateway without a lease takes no request": Fence(
        without_a_lease(GatewayMachine, "_refusal"),
        "unit/test_gateway_machine.py"
        "::test_suspect_lease_takes_nothing_new_and_goes_on_with_the_rest",
    ),
    "a router without a lease makes no transition": Fence(
        without_a_lease(Attempts, "ask_again"),
        "unit/test_router_adoption.py::test_without_a_lease_no_transition_is_made",
    ),
    "a decode worker without a lease takes no request": Fence(
        without_a_lease(DecodeAdmission, "why_not"),
        "unit/test_decode_machine.py"
        "::test_a_suspect_worker_takes_nothing_new_and_goes_on_with_what_it_has",
    ),
    "a prefill worker without a lease takes no request": Fence(
        without_a_lease(PrefillAdmission, "_why_not"),
        "unit/test_prefill_machine.py::test_a_suspect_or_draining_worker_takes_nothing_new",
    ),
}


class Outcomes:
    """What became of the tests of a run within this one."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            (self.passed if report.passed else self.failed).append(report.nodeid)


def outcomes(test: str) -> Outcomes:
    """Run ``test`` in this process."""
    found = Outcomes()
    arguments = ["-o", "addopts=", "-p", "no:terminal", "-p", "no:cacheprovider", "-s"]
    pytest.main([*arguments, f"{TESTS}/{test}"], plugins=[found])
    assert found.passed or found.failed, f"there is no {test}"
    return found


@pytest.mark.parametrize("name", FENCES)
def test_the_fences_own_test_objects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes with the fence, and fails without it."""
    fence = FENCES[name]
    assert not outcomes(fence.test).failed
    fence.switch_off(monkeypatch)
    assert outcomes(fence.test).failed, f"{fence.test} passes although nothing sees that {name}"
