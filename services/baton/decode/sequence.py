"""One sequence on decode: its tokens, its block table, where it stands.

Decides nothing about others; the scheduler and the hand-over move it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from baton.core.ids import Peer
from baton.core.outcomes import FinishReason
from baton.core.prefix import chain_next
from baton.core.stopping import finish_of
from baton.ports.engine import TokenIds
from baton.wire.fields import TokenLogprob
from baton.wire.messages import RequestSpec, ReserveDecode


class Stage(Enum):
    """Where a sequence stands inside this worker."""

    REMOTE = "remote"
    """A ticket is out: prefill fills its blocks."""
    IMPORTING = "importing"
    """A thread copies its blocks from another worker's arena."""
    LOCAL = "local"
    """This worker computes (or, pre-empted, recomputes) its tokens in chunks."""
    RUNNING = "running"
    """Everything but its last token is in the blocks: it takes part in every step."""
    MOVED = "moved"
    """Stopped, its blocks kept until another worker has imported them."""
    PAUSED = "paused"
    """It has gone as far as it may while nobody reads; without blocks until somebody does."""
    FINISHED = "finished"
    """Complete; kept without blocks until the gateway has said how it ended."""


def ids_of(raw: bytes) -> TokenIds:
    """Return uint32 LE bytes as int32 ids."""
    return np.frombuffer(raw, dtype="<u4").astype(np.int32)


@dataclass(slots=True)
class Sequence:
    """One request's attempt on this worker."""

    spec: RequestSpec
    epoch: int
    router: Peer
    turn: int
    """Of that router; it grows when another one adopts the request."""
    alone: bool
    """Suspected of ending workers: its steps are its own."""
    order: int
    """Arrival number: the younger gives way to the older."""
    forced: int
    """Leading output ids that came with the reservation."""
    tokens: TokenIds
    """int32 [prompt + max_tokens]; the first ``length`` are known."""
    length: int
    block_size: int
    stage: Stage = Stage.LOCAL
    computed: int = 0
    """Leading tokens whose K and V are in the blocks."""
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    chains: list[bytes] = field(default_factory=list)
    """Names of the full blocks of the first ``length`` tokens, extended as they fill."""
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each id of ``output[forced:]`` if the request wants them."""
    finish: FinishReason | None = None
    """Why it is complete; set at creation if the forced ids are the whole answer."""
    stepped: int = 0
    """The last step it had to itself."""
    running_since: float | None = None
    """When its prompt was complete here, for the first time."""
    joined_at: float | None = None
    """When its hand-over was complete, until it has had a step."""
    paused_since: float | None = None
    """When its prompt first waited for streams that it would have disturbed."""
    finished_at: float = 0.0
    sent_first: bool = False
    offered: bool = False
    """Its router was told that it may move."""
    gateway: Peer = field(init=False)
    """Who reads its tokens."""
    held: int = field(init=False)
    """Leading output ids that the gateway has from elsewhere."""
    away_since: float | None = None
    """Since when it has no gateway."""
    upto: int | None = None
    """It may not have more output ids than that for now."""

    def __post_init__(self) -> None:
        self.gateway = self.spec.gateway
        self.held = self.forced

    @classmethod
    def create(
        cls, message: ReserveDecode, router: Peer, *, order: int, block_size: int
    ) -> Sequence:
        """Return a sequence that knows its prompt and its forced output."""
        spec = message.spec
        prompt, forced = ids_of(spec.prompt), ids_of(message.output)
        tokens = np.empty(len(prompt) + max(spec.max_tokens, len(forced)), dtype=np.int32)
        length = len(prompt) + len(forced)
        tokens[: len(prompt)] = prompt
        tokens[len(prompt) : length] = forced
        finish = None
        if len(forced):
            last = len(forced) - 1
            finish = finish_of(spec.sampling, spec.max_tokens, last, int(forced[last]))
        return cls(
            spec=spec,
            epoch=message.epoch,
            router=router,
            turn=message.turn,
            alone=message.alone,
            order=order,
            forced=len(forced),
            tokens=tokens,
            length=length,
            block_size=block_size,
            output=[int(token) for token in forced],
            finish=finish,
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.spec.request_id, self.epoch

    @property
    def prompt(self) -> TokenIds:
        return self.tokens[: self.spec.prompt_tokens]

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def extend_chains(self, root: bytes, tokens: int) -> None:
        """Name every full block of the first ``tokens`` tokens."""
        while len(self.chains) < tokens // self.block_size:
            at = len(self.chains) * self.block_size
            ids = self.tokens[at : at + self.block_size].astype("<u4").tobytes()
            self.chains.append(chain_next(self.chains[-1] if self.chains else root, ids))

    def name_of(self, root: bytes, logical: int) -> bytes:
        """Return the name of a block with known tokens, full or not."""
        begin = logical * self.block_size
        self.extend_chains(root, min(begin + self.block_size, self.length))
        if logical < len(self.chains):
            return self.chains[logical]
        before = self.chains[logical - 1] if logical else root
        return chain_next(before, self.tokens[begin : self.length].astype("<u4").tobytes())

    def append(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Add a sampled token."""
        self.tokens[self.length] = token_id
        self.length += 1
        self.output.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)

    def table(self) -> TokenIds:
        """Return the block table as int32."""
        return np.array(self.blocks, dtype=np.int32)

    def filled_in(self, logical: int) -> int:
        """Number of known tokens in block ``logical``."""
        return min(self.length - logical * self.block_size, self.block_size)
