"""Whatever is said of a resumable request, in whatever order, its gateway keeps its promises.

A seed that fails is named with the command that runs it again and tells its story. Each promise is
also seen to be looked at: with a rule switched off a bounded number of seeds must object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from baton.core.outcomes import Ending
from baton.gateway.keeping import Keeping
from baton.gateway.kept import Kept
from baton.gateway.remaking import Remaking
from baton.gateway.resuming import Resuming
from sim.conversations import ME, Conversation

BATCH = 250
SEEDS = range(0, 1000, BATCH)
SEEDS_SLOW = range(1000, 11_000, BATCH)
SEEDS_MUTATED = 1000

Patch = pytest.MonkeyPatch


def again(seed: int) -> str:
    """Return the one command that runs ``seed`` again."""
    return f"PYTHONPATH=shared:services:tests python -m sim.run --resuming --story --seed {seed}"


def run(seed: int) -> None:
    """Run one seed; whatever it raises names the seed."""
    try:
        Conversation(seed).run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}: {type(error).__name__}: {error}\n{again(seed)}"
        ) from error


@pytest.mark.parametrize("first", SEEDS)
def test_the_gateway_keeps_its_promises(first: int) -> None:
    """Nobody waits for ever, one outcome each, only its own ids, nothing twice, nothing left."""
    for seed in range(first, first + BATCH):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", SEEDS_SLOW)
def test_more_seeds(first: int) -> None:
    """The same, for longer."""
    for seed in range(first, first + BATCH):
        run(seed)


def test_the_same_seed_is_the_same_conversation() -> None:
    """A failing seed can be run again: its story is the same, word for word."""
    stories = []
    for _ in range(2):
        conversation = Conversation(17)
        conversation.run()
        stories.append(conversation.story)
    assert stories[0] == stories[1]


def test_the_conversations_come_to_something() -> None:
    """Answers are completed, requests come from elsewhere and are made again: not only refused."""
    completed, elsewhere, again = 0, 0, 0
    for seed in range(100):
        conversation = Conversation(seed)
        conversation.run()
        ends = [end.ending for reader in conversation.readers for end in reader.ended.values()]
        completed += ends.count(Ending.COMPLETED)
        elsewhere += sum(claim > 0 for _, claim in conversation.begun)
        again += sum("~" in request_id for request_id, _ in conversation.begun)
    assert min(completed, elsewhere, again) > 5, (completed, elsewhere, again)


# --- with a rule switched off -----------------------------------------------------------------


def asked_again_by_turn(patch: Patch) -> None:
    """What the ledger is asked with is named by the turn, which any other claim raises."""
    named = property(lambda kept: f"{ME}:{kept.resumable_id}:{kept.turn}", lambda kept, name: None)
    patch.setattr(Kept, "again_claim", named)


def no_word_to_who_comes_late(patch: Patch) -> None:
    patch.setattr(Resuming, "reader_back", _if_here(Resuming.reader_back))


def _if_here(back: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(self: Resuming, event: Any, now: float) -> Any:
        return back(self, event, now) if event.resumable_id in self.state.kept else []

    return mutant


def begun_though_it_is_complete(patch: Patch) -> None:
    submitted = Resuming.submitted

    def mutant(self: Resuming, event: Any, refusal: Any, now: float) -> Any:
        kept, choice = self.state.kept.get(event.resumable_id), event.spec.request_id
        if kept is None or kept.closing is not None or choice not in kept.answers:
            return submitted(self, event, refusal, now)
        kept.specs[choice] = event.spec
        return self.attempts.begin(self.keeping.session(kept, choice, now), now)

    patch.setattr(Resuming, "submitted", mutant)


def begun_by_each_who_submits(patch: Patch) -> None:
    submitted = Resuming.submitted

    def mutant(self: Resuming, event: Any, refusal: Any, now: float) -> Any:
        kept, choice = self.state.kept.get(event.resumable_id), event.spec.request_id
        if kept is not None and choice not in kept.answers:
            kept.specs.pop(choice, None)
        return submitted(self, event, refusal, now)

    patch.setattr(Resuming, "submitted", mutant)


def made_again_though_a_part_is_told(patch: Patch) -> None:
    lost = Remaking.lost

    def mutant(self: Remaking, session: Any, now: float) -> Any:
        kept = self.state.kept[session.kept]
        kept.answers.clear()
        for each in self.keeping.sessions(kept):
            del each.ids[:]
        return lost(self, session, now)

    patch.setattr(Remaking, "lost", mutant)


def told_from_the_first_id_at_each_claim(patch: Patch) -> None:
    ready = Resuming._ready

    def mutant(self: Resuming, claim: str, kept: Any, way: str, now: float, **how: Any) -> Any:
        told = [] if how["submit"] or kept.ended else self.keeping.tell(kept, now)
        return [*told, *ready(self, claim, kept, way, now, **how)]

    patch.setattr(Resuming, "_ready", mutant)


def nobody_looks_at_what_is_not_submitted(patch: Patch) -> None:
    def mutant(self: Keeping, kept: Any, now: float) -> Any:
        return []

    patch.setattr(Keeping, "unsubmitted", mutant)


@dataclass(frozen=True)
class Mutation:
    """One rule switched off, and what the failure may say."""

    apply: Callable[[Patch], None]
    objections: tuple[str, ...]


MUTATIONS = {
    "a claim stops what is to be made again": Mutation(asked_again_by_turn, ("waits for ever",)),
    "who comes when it has left is told nothing": Mutation(
        no_word_to_who_comes_late, ("waits for ever",)
    ),
    "what is complete is begun": Mutation(
        begun_though_it_is_complete, ("a choice of nothing", "begun twice")
    ),
    "each who submits it begins it": Mutation(begun_by_each_who_submits, ("begun twice",)),
    "it is made again for who has a part": Mutation(
        made_again_though_a_part_is_told, ("gap or duplicate", "ids of another answer")
    ),
    "who reads is told all at each claim": Mutation(
        told_from_the_first_id_at_each_claim, ("gap or duplicate",)
    ),
    "what nobody submits stays": Mutation(nobody_looks_at_what_is_not_submitted, ("left behind",)),
}


def objection() -> str | None:
    """Return what the first seed that objects says, ``None`` if none does."""
    for seed in range(SEEDS_MUTATED):
        try:
            run(seed)
        except AssertionError as error:
            return str(error)
    return None


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_conversations_object(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rule switched off a bounded number of seeds fails, for the right reason."""
    MUTATIONS[name].apply(monkeypatch)
    said = objection()
    assert said is not None, f"{SEEDS_MUTATED} seeds passed although {name}"
    assert any(words in said for words in MUTATIONS[name].objections), said
