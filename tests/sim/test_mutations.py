"""Whether the simulation would see it: each rule is switched off, and a few seeds must object.

A mutation is applied in this process, over the production code, and undone after the test. Every
scenario is made so that the rule matters in it: few blocks, writers that stall, bits that flip.

The turn of a cancel is not among them: a router that lost a request has next to never a reason left
to cancel it. It is held by ``tests/unit/test_decode_machine.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from baton.channel import checksum
from baton.core.blocks import BlockPool
from baton.decode import takeover, work
from baton.decode.ends import Ends
from baton.decode.handover import Handover
from baton.decode.sequence import Sequence
from baton.gateway.attempts import Attempts
from baton.gateway.session import Session
from baton.gateway.unknown import UnknownSweep
from baton.ports.channel import BlockCheck
from baton.router.prefixes import PrefixIndex
from baton.sim.channel import SimArena, SimMapped
from baton.sim.ledger import LedgerModel
from baton.sim.network import Faults
from sim.cluster import Cluster, Scenario

SEEDS = 15
NOISY = Faults(delay_s=(0.00005, 0.03), loss=0.02, duplicate=0.05, reorder=0.1)
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """One rule switched off: how, and where it matters."""

    apply: Callable[[Patch], None]
    scenario: Scenario
    objections: tuple[str, ...]
    """What the failure may say: one for another reason (a mutation that no longer fits the code)
    proves nothing."""


def no_verification(patch: Patch) -> None:
    def verify(self: SimArena, checks: Iterable[BlockCheck]) -> list[int]:
        return []

    patch.setattr(SimArena, "verify", verify)


def no_quarantine(patch: Patch) -> None:
    def nothing(self: BlockPool, blocks: Iterable[int]) -> None:
        pass

    patch.setattr(BlockPool, "hold", nothing)
    patch.setattr(BlockPool, "unhold", nothing)
    # Counting finds it at once; here what follows from it is to be found.
    patch.setattr("sim.process.holdings", lambda machine: None)


def no_fence(patch: Patch) -> None:
    patch.setattr(SimMapped, "may_write", lambda *_: True)


def no_epoch_at_the_gateway(patch: Patch) -> None:
    accept = Session.accept

    def mutant(self: Session, peer: Any, role: Any, run: Any) -> Any:
        return accept(self, peer, role, msgspec.structs.replace(run, epoch=self.epoch))

    patch.setattr(Session, "accept", mutant)


def no_index_at_the_gateway(patch: Patch) -> None:
    take = Session._take

    def mutant(self: Session, run: Any, fresh: Any) -> bool:
        return take(self, msgspec.structs.replace(run, index=len(self.ids)), fresh)

    patch.setattr(Session, "_take", mutant)


def no_epoch_in_the_hand_over(patch: Patch) -> None:
    stopped = Handover.stopped

    def mutant(self: Handover, peer: Any, key: Any) -> Sequence | None:
        same = [each for each in self.tickets if each[0] == key[0]]
        return stopped(self, peer, max(same, default=key))

    patch.setattr(Handover, "stopped", mutant)


def no_proof_of_death(patch: Patch) -> None:
    lost = Handover.writer_lost

    def mutant(self: Handover, peer: Any, now: float) -> list[Sequence]:
        waiting = lost(self, peer, now)
        for key in self._still_writing(peer):
            self.tickets[key].stopped = True
            if self.tickets[key].revoked:
                self._release(key)
        return waiting

    patch.setattr(Handover, "writer_lost", mutant)


def no_end_of_a_drop(patch: Patch) -> None:
    patch.setattr(Ends, "release_dropped", lambda self: self.state.pinned.clear())


def no_verification_of_imports(patch: Patch) -> None:
    def mutant(arena: SimArena, source: Any, target: BlockCheck, named: Any) -> str:
        if named is None:
            return "not there"
        size = len(arena.memory) // arena.blocks_total
        source.copy(named.block, arena.memory[target.block * size : (target.block + 1) * size])
        return ""

    patch.setattr(work, "_bring_one", mutant)


def no_verification_at_a_take_over(patch: Patch) -> None:
    def mutant(former: Any, marks: Any, good: Any, alive: Any) -> takeover.TakenOver:
        named = [mark.block for mark in marks if mark.chain and mark.state in takeover.KEPT]
        return rebuild(former, marks, named, alive)

    rebuild = takeover.rebuild
    patch.setattr(takeover, "rebuild", mutant)


def no_quarantine_at_a_take_over(patch: Patch) -> None:
    def mutant(former: Any, marks: Any, good: Any, alive: Any) -> takeover.TakenOver:
        return rebuild(former, marks, good, ())

    rebuild = takeover.rebuild
    patch.setattr(takeover, "rebuild", mutant)


def no_name_in_the_checksum(patch: Patch) -> None:
    patch.setattr(checksum, "seed_of", lambda chain: 0)


def no_move_of_the_record(patch: Patch) -> None:
    adopt = LedgerModel._adopt

    def mutant(self: LedgerModel, op: Any, now: int) -> Any:
        record = self.records.get(op.spec.request_id)
        if record is None:
            return adopt(self, op, now)
        router, turn = record.router, record.turn
        reply = adopt(self, op, now)
        record.router, record.turn = router, turn
        return reply

    patch.setattr(LedgerModel, "_adopt", mutant)


def no_look_for_unknown_records(patch: Patch) -> None:
    patch.setattr(UnknownSweep, "time_passed", lambda self, now: [])


def any_router_at_the_gateway(patch: Patch) -> None:
    received = Attempts.received

    def mutant(self: Attempts, event: Any, message: Any, now: float) -> Any:
        session = self.state.sessions.get(message.request_id)
        if session is None or session.router is None:
            return received(self, event, message, now)
        router, session.router = session.router, event.peer
        commands = received(self, event, message, now)
        session.router = router
        return commands

    patch.setattr(Attempts, "received", mutant)


def no_gaps_in_the_news(patch: Patch) -> None:
    changed = PrefixIndex.changed

    def mutant(self: PrefixIndex, peer: Any, message: Any, now: float) -> str:
        known = self.known.get(peer)
        if known is not None and known.number is not None:
            known.number = message.number - 1
        return changed(self, peer, message, now)

    patch.setattr(PrefixIndex, "changed", mutant)
    patch.setattr(PrefixIndex, "told", lambda self, peer, number, now: "")


STALLING = Scenario(
    prefills=2, blocks=20, requests=40, spread_s=8.0, cancels=8, stalls=6, freezes=2
)

MUTATIONS = {
    "checksums are not compared": Mutation(
        no_verification,
        Scenario(requests=25, flips=8),
        ("read wrong KV", "wrong tokens"),
    ),
    "imported blocks are not verified on their copy": Mutation(
        no_verification_of_imports,
        Scenario(decodes=2, blocks=200, requests=40, max_tokens=(60, 200), kills=6, rots=200),
        ("read wrong KV", "wrong tokens"),
    ),
    "blocks of a writer are free at once": Mutation(
        no_quarantine,
        STALLING,
        ("read wrong KV", "wrong tokens", "a store without permission"),
    ),
    "prefill does not look at the fence": Mutation(
        no_fence,
        Scenario(prefills=1, blocks=64, requests=40, cancels=30, faults=NOISY),
        ("a store without permission",),
    ),
    "the gateway takes any epoch": Mutation(
        no_epoch_at_the_gateway,
        Scenario(
            prefills=0,
            blocks=200,
            requests=8,
            max_tokens=(200,),
            cuts=3,
            cut_pair=("router-0", "decode-0"),
        ),
        ("effect of a lower epoch",),
    ),
    "the gateway takes every token for the next one": Mutation(
        no_index_at_the_gateway,
        Scenario(requests=25, echoes=30, max_tokens=(30, 60)),
        ("wrong tokens", "gap or duplicate"),
    ),
    "decode takes any epoch from prefill": Mutation(
        no_epoch_in_the_hand_over,
        Scenario(prefills=2, decodes=1, blocks=20, requests=40, stalls=6, faults=NOISY),
        ("effect of a lower epoch", "left behind", "has no owner", "no outcome in bounded time"),
    ),
    "a lost link counts as a writer's death": Mutation(
        no_proof_of_death,
        STALLING,
        ("read wrong KV", "wrong tokens", "a store without permission"),
    ),
    "a take-over trusts what it finds": Mutation(
        no_verification_at_a_take_over,
        Scenario(blocks=200, requests=40, kills=6, victims=("decode-0",), rots=200),
        ("wrong KV", "wrong tokens"),
    ),
    "a take-over keeps a block under a name that is not its own": Mutation(
        no_name_in_the_checksum,
        Scenario(blocks=200, requests=40, kills=6, victims=("decode-0",), mixups=200),
        ("wrong KV", "wrong tokens"),
    ),
    "a take-over frees what a living writer may store into": Mutation(
        no_quarantine_at_a_take_over,
        Scenario(
            prefills=2, blocks=20, requests=60, kills=8, victims=("decode-0",), stalls=12, tears=2
        ),
        ("wrong KV", "wrong tokens"),
    ),
    "an adoption does not move the record": Mutation(
        no_move_of_the_record,
        Scenario(routers=2, decodes=2, blocks=64, requests=40, router_kills=4, kills=4),
        ("no outcome in bounded time", "which is gone"),
    ),
    "any router's word counts at the gateway": Mutation(
        any_router_at_the_gateway,
        Scenario(
            routers=2, decodes=2, requests=40, max_tokens=(200,), isolations=4, isolated="router-0"
        ),
        ("effect of a lower epoch or turn",),
    ),
    "gateways do not look for records that they do not know": Mutation(
        no_look_for_unknown_records,
        Scenario(decodes=2, gateways=2, requests=40, fail_overs=3),
        ('left behind: ["ledger: ',),
    ),
    "routers do not look at the numbers of changes": Mutation(
        no_gaps_in_the_news,
        Scenario(decodes=2, routers=2, blocks=32, requests=40, news_lost=0.3),
        ("does not know its blocks",),
    ),
    "blocks dropped in mid step are lost": Mutation(
        no_end_of_a_drop,
        Scenario(prefills=0, blocks=64, requests=40, cancels=30, spread_s=3.0),
        ("left behind", "is miscounted"),
    ),
}


def objection(scenario: Scenario) -> str | None:
    """Return what the first seed that objects says, ``None`` if none does."""
    for seed in range(SEEDS):
        try:
            Cluster(seed, scenario).run()
        except AssertionError as error:
            return f"seed {seed}: {error}"
    return None


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_objects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rule switched off a bounded number of seeds fails, for the right reason."""
    mutation = MUTATIONS[name]
    mutation.apply(monkeypatch)
    said = objection(mutation.scenario)
    assert said is not None, f"{SEEDS} seeds passed although {name}"
    assert any(words in said for words in mutation.objections), said


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_same_scenario_passes_with_the_rule(name: str) -> None:
    """What objects is the rule's absence, not the scenario."""
    for seed in range(2):
        Cluster(seed, MUTATIONS[name].scenario).run()
