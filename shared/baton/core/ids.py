"""Who is who: roles, workers, incarnations.

Decides how a process is named on every wire, in the ledger and in logs. A ``worker_id`` is the
stable name an operator knows (``decode-0``); an ``incarnation`` is new at every start, so a
message meant for the process that died is never obeyed by the one that took its name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

#: Incarnations must leave room for the lock byte at ``2**62 + incarnation`` (DESIGN 4.5), whose
#: offset must stay below ``2**63``.
INCARNATION_MAX = 2**62 - 1


class Role(StrEnum):
    """What a process does in the cluster."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    CLI = "cli"


class WorkerRole(StrEnum):
    """What a worker that computes is there for; it can be told another one while it serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    """It computes a prompt only where no prefill worker does."""
    MIXED = "mixed"
    """It decodes, and computes prompts itself where that is the better way."""

    @property
    def process(self) -> Role:
        """Which machine does it."""
        return Role.PREFILL if self is WorkerRole.PREFILL else Role.DECODE


class Peer(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One run of one process: its stable name and its incarnation."""

    worker_id: str
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=INCARNATION_MAX)]

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}"


class Compat(msgspec.Struct, frozen=True):
    """What two processes must agree on before one may compute from the other's bytes.

    Every field is a digest or a plain value; the pair is refused unless all are equal.
    """

    model: str
    """Digest of the weights and the model configuration."""
    tokenizer: str
    """Digest of the tokenizer file."""
    dtype: str
    """``float32`` or ``bfloat16``: of weights, activations and KV."""
    block_size: int
    """Tokens a block."""
    layout: str
    """The KV layout in words: order of axes, layers, heads, head size."""
    kernels: str
    """The kernel set: values computed by different sets may differ in the last bit."""

    def differences(self, other: Compat) -> list[str]:
        """Return one ``field: mine != theirs`` line for each field that differs."""
        return [
            f"{name}: {getattr(self, name)!r} != {getattr(other, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


class Member(msgspec.Struct, frozen=True):
    """A process as it announces itself: in the ledger's registry and in the first frame."""

    peer: Peer
    role: Role
    endpoint: str
    """ZeroMQ address of its inbox, ``ipc://...`` or ``tcp://...``; empty if it accepts nobody."""
    pid: int
    boot_id: str
    """Kernel boot id and pid namespace: a pid means something only where these are equal."""
    compat: Compat | None = None
    """``None`` for processes that never touch KV or token ids (the CLI)."""
