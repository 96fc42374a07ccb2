"""What a decode worker has learned of its own work: steps, hand-overs, answers.

Decides how the newest weighs against what was before; who uses the figures decides what follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.step_times import SharedStepTimes, Step
from baton.decode.sequence import Sequence, Stage
from baton.ports.engine import Row

#: The last so many hand-overs and answers count.
MEMORY = 32
#: A hand-over that took longer, by the clock of the prefill worker that began it, counts as this: a
#: wrong clock there must not turn all prompts away from here.
HANDOVER_MAX_S = 10.0

#: Sequences that will not grow any more, or not here.
_DONE = (Stage.FINISHED, Stage.PAUSED, Stage.MOVED)


@dataclass(slots=True)
class Mean:
    """A moving mean."""

    count: int = 0
    value: float = 0.0

    def learn(self, value: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        self.value += (value - self.value) / self.count


@dataclass(slots=True)
class Figures:
    """Of one decode worker."""

    steps: SharedStepTimes = field(default_factory=SharedStepTimes)
    handover_s: Mean = field(default_factory=Mean)
    """From the end of prefill's last step to the sequence that runs."""
    answer_tokens: Mean = field(default_factory=Mean)

    def stepped(self, rows: Iterable[Row], seconds: float, borrowed: float) -> None:
        """A step of ``rows`` took ``seconds``, from its start to the next event, and for a share of
        it had ``borrowed`` cores."""
        step = Step.of((row.start, len(row.token_ids)) for row in rows)
        self.steps.learn(step, seconds, borrowed)

    def handed_over(self, seconds: float) -> None:
        """A hand-over took ``seconds``, from prefill's last step to the sequence that runs."""
        self.handover_s.learn(min(seconds, HANDOVER_MAX_S))

    def growth_blocks(self, sequences: Iterable[Sequence], growth_tokens: int) -> int:
        """Return how many more blocks what is here will probably want: each answer as long as the
        last ones were, a longer one a little longer still. Before any answer is known,
        ``growth_tokens`` more."""
        blocks = 0
        for seq in sequences:
            if seq.stage in _DONE:
                continue
            output = len(seq.output)
            if self.answer_tokens.count:
                whole = max(round(self.answer_tokens.value), output + seq.block_size)
            else:
                whole = output + growth_tokens
            whole = seq.spec.prompt_tokens + min(whole, max(seq.spec.max_tokens, output))
            blocks += max(0, seq.blocks_for(whole) - len(seq.blocks))
        return blocks
