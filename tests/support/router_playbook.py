"""A conversation partner for the router machine: workers, gateway and ledger around it."""

from __future__ import annotations

from typing import Any

from baton.core.events import LeaseChanged
from baton.core.ids import Peer, Role
from baton.core.lifecycles import LeaseState, RequestState
from baton.core.limits import Limits
from baton.core.outcomes import Ending, FinishReason, Outcome, Reason
from baton.core.prefix import chain_of, short_names
from baton.core.slo import Slo
from baton.ports.driving import CallLedger, LedgerAnswered, Send
from baton.ports.ledger import AdmitRequest, Done, PlaceRequest, RetryRequest
from baton.router.balance import Policy
from baton.router.machine import RouterMachine
from baton.router.placement import BlockNaming
from baton.router.spread import PlacementRule
from baton.wire.messages import (
    AssignPrefill,
    BlocksListed,
    CancelWork,
    FenceRequest,
    RequestFenced,
    RequestPlaced,
    RequestSpec,
    ReserveDecode,
    SubmitRequest,
    WorkerStatus,
    WorkFailed,
)
from support.machine_playbook import Like, Playbook, ids, request, sent

ME, G = Peer("router-0", 1), Peer("gateway-0", 2)
P, P1 = Peer("prefill-0", 3), Peer("prefill-1", 4)
D, D1 = Peer("decode-0", 5), Peer("decode-1", 6)
D_AGAIN, D1_AGAIN = Peer("decode-0", 7), Peer("decode-1", 8)
ROLES = {
    **{G: Role.GATEWAY, P: Role.PREFILL, P1: Role.PREFILL},
    **{D: Role.DECODE, D1: Role.DECODE, D_AGAIN: Role.DECODE, D1_AGAIN: Role.DECODE},
}
SIZE, ROOT = 16, b"root"
R = RequestState


def call(kind: type, **values: object) -> Like:
    return Like(CallLedger, op=Like(kind, **values))


class Router(Playbook):
    """A router with the given workers linked and ready."""

    def __init__(
        self,
        workers: tuple[Peer, ...] = (P, D),
        *,
        blocks: int = 64,
        slo: Slo | None = None,
        roles: Policy | None = None,
        rule: PlacementRule = "prefix",
        split: bool = True,
        **limits: Any,
    ) -> None:
        machine = RouterMachine(
            ME,
            Limits(**limits),
            split=split and slo is None,
            slo=slo,
            roles=roles,
            naming=BlockNaming(ROOT, SIZE),
            rule=rule,
        )
        super().__init__(machine)
        self.feed(LeaseChanged(LeaseState.HELD))
        self.up(G, Role.GATEWAY)
        for worker in workers:
            self.ready(worker, blocks=blocks)

    def ready(
        self,
        worker: Peer,
        *expected: object,
        blocks: int = 64,
        free: int | None = None,
        host: str = "b",
        **f: Any,
    ) -> None:
        """Link a worker and let it say what it has."""
        if worker not in self.machine.state.placement.workers:
            self.up(worker, ROLES[worker], host=host)
        status: dict[str, Any] = {"accepting": True, "block_size": SIZE, **f}
        if self.machine.state.placement.workers[worker].role is Role.DECODE:
            status |= {"blocks_total": blocks, "blocks_free": blocks if free is None else free}
            status = {"writers": (P, P1), "mixed": not self.machine.split, **status}
        self.hear(worker, WorkerStatus(**status), *expected)

    def stores(self, worker: Peer, tokens: int, number: int = 1) -> None:
        """It lists the full blocks of the prompt of :func:`spec` as what it has cached."""
        names = short_names(chain_of(ROOT, ids(*range(tokens)), SIZE))
        self.do_hear(worker, BlocksListed(number, 0, names))

    def submit(self, spec: RequestSpec, *expected: object) -> None:
        self.hear(G, SubmitRequest(spec), *expected)

    def answered(self, reply: Any, *expected: object) -> None:
        """The ledger answers the last call."""
        self.feed(LedgerAnswered(self.last(CallLedger).op, reply), *expected)

    def admit(self, spec: RequestSpec, *expected: object) -> None:
        """Submit, and let the ledger admit."""
        self.submit(spec, call(AdmitRequest))
        self.answered(Done(1, R.ADMITTED), *expected)

    def place(
        self,
        spec: RequestSpec,
        decode: Peer = D,
        prefill: Peer | None = P,
    ) -> None:
        """Submit and place at epoch 1."""
        self.admit(spec, call(PlaceRequest, decode=decode, prefill=prefill))
        self.counted(spec.request_id, decode, prefill)

    def counted(
        self,
        request_id: str,
        decode: Peer = D,
        prefill: Peer | None = P,
        *,
        epoch: int = 1,
        source: str = "",
    ) -> None:
        """The ledger has counted the attempt: everybody is told."""
        values = {"epoch": epoch}
        reserve = sent(decode, ReserveDecode, prefill=prefill, source=source, **values)
        told: list[Like] = [reserve]
        if prefill is not None:
            told.append(sent(prefill, AssignPrefill, decode=decode, **values))
        placed = sent(G, RequestPlaced, request_id=request_id, decode=decode, **values)
        self.answered(Done(epoch, R.PLACED), *told, placed)

    def fenced(self, *expected: object, epoch: int = 2, output: bytes = b"") -> None:
        self.hear(G, RequestFenced("r", epoch, output), *expected)

    def retried(self, *expected: object, epoch: int = 2, output: bytes = b"") -> None:
        """The gateway is fenced and the ledger has the next epoch."""
        self.fenced(call(RetryRequest, epoch=epoch - 1), epoch=epoch, output=output)
        self.answered(Done(epoch, R.ADMITTED), *expected)

    def failed(self, peer: Peer, reason: Reason, *expected: object, **values: Any) -> None:
        values = {"epoch": 1, **values}
        self.hear(peer, WorkFailed("r", reason=reason, **values), *expected)


def spec(request_id: str = "r", tokens: int = 20, **fields: Any) -> RequestSpec:
    return request(request_id, tuple(range(tokens)), gateway=G, **fields)


def cancels(*peers: Peer, epoch: int = 1) -> list[Like]:
    return [sent(peer, CancelWork, request_id="r", epoch=epoch) for peer in peers]


FENCE = Send(G, FenceRequest("r", 2))
PLACED_AGAIN = call(PlaceRequest, epoch=2)
COMPLETED = Outcome(Ending.COMPLETED, finish=FinishReason.STOP)
CANCELLED = Outcome(Ending.CANCELLED, reason=Reason.CLIENT_DISCONNECTED)
