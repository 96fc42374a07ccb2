"""What one decode step costs beside the kernels: ``scripts/step_profile.py [BATCH] [CONTEXT]``.

The production machine, sampler, codec and metrics do the work of a decode worker in one thread;
the kernels alone are left out, their logits are noise. Prints the CPU time a step of each part,
which a busy machine disturbs less than the time of day, for greedy requests and for drawn ones.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from baton.core.events import LeaseChanged
from baton.core.ids import Member, Peer, Role
from baton.core.lifecycles import LeaseState
from baton.core.limits import Limits
from baton.core.prefix import chain_root
from baton.core.sampling import SamplingParams
from baton.decode.io import RunStep, StepFinished
from baton.decode.machine import DecodeMachine
from baton.engine.native.arenas import Arenas
from baton.engine.sampler import sample_rows
from baton.ports.driving import Measure, Send
from baton.ports.engine import KVLayout, Sampled
from baton.ports.transport import PeerUp, Received
from baton.runtime.metrics import Metrics
from baton.wire import codec
from baton.wire.handover import ArenaRef
from baton.wire.messages import RequestSpec, ReserveDecode

ME, ROUTER, GATEWAY = Peer("decode-0", 1), Peer("router-0", 2), Peer("gateway-0", 3)
ARENA = ArenaRef(path="/a", device=1, inode=1, file_id="f", owner=ME)
#: Of the default model.
LAYOUT = KVLayout(layers=30, heads=3, head_dim=64, block_size=16, dtype="bfloat16", order="lanes")
VOCAB = 49_152
BLOCKS = 8_000
WARM, STEPS = 20, 200


class Profile:
    """A decode worker with ``batch`` sequences that have ``context`` tokens and run."""

    def __init__(self, batch: int, context: int, temperature: float) -> None:
        self.now = 100.0
        self.random = np.random.default_rng(1)
        self.machine = DecodeMachine(
            ME,
            Limits(),
            ARENA,
            blocks_total=BLOCKS,
            block_size=LAYOUT.block_size,
            block_bytes=LAYOUT.block_bytes,
            root=chain_root("profile"),
        )
        self.step: RunStep | None = None
        self.feed(LeaseChanged(LeaseState.HELD))
        for peer, role in ((ROUTER, Role.ROUTER), (GATEWAY, Role.GATEWAY)):
            self.feed(PeerUp(Member(peer=peer, role=role, endpoint="", pid=1, boot_id="b")))
        for number in range(batch):
            self.begin(number, context, temperature)
        self.arenas = Arenas(LAYOUT)
        self.arenas.attach(ARENA.file_id, memoryview(bytearray(LAYOUT.block_bytes)))
        self.logits = self.random.normal(0, 3, (batch, VOCAB)).astype(np.float32)
        self.metrics = Metrics(Role.DECODE, ME.worker_id, "profile")
        self.seconds: dict[str, float] = {}
        while not self.all_run(batch):
            self.feed(self.finished())

    def begin(self, number: int, context: int, temperature: float) -> None:
        spec = RequestSpec(
            request_id=f"{number:032x}",
            gateway=GATEWAY,
            prompt=self.random.integers(1, VOCAB, context, dtype="<u4").tobytes(),
            sampling=SamplingParams(seed=number, temperature=temperature),
            max_tokens=4_000,
            deadline_ms=10**8,
        )
        self.feed(Received(ROUTER, ReserveDecode(spec, 1, None)))

    def feed(self, event: object) -> list[object]:
        self.now += 0.01
        commands = self.machine.handle(event, self.now)  # type: ignore[arg-type]
        steps = [command for command in commands if isinstance(command, RunStep)]
        self.step = steps[0] if steps else self.step
        return commands

    def finished(self) -> StepFinished:
        assert self.step is not None
        results = tuple(Sampled(50) if row.sample else None for row in self.step.rows)
        sums = tuple((7,) * len(seals) for seals in self.step.seals)
        return StepFinished(self.step.step, results, sums, 0.01)

    def all_run(self, batch: int) -> bool:
        rows = self.step.rows if self.step else ()
        return len(rows) == batch and all(len(row.token_ids) == 1 for row in rows)

    def once(self) -> None:
        event, began = self.finished(), time.thread_time()
        commands = self.feed(event)
        began = self.note("machine", began)
        for command in commands:
            if isinstance(command, Send):
                codec.encode(command.message)
        began = self.note("messages", began)
        for command in commands:
            if isinstance(command, Measure):
                self.metrics.measure(command.name, command.value, command.labels)
        began = self.note("metrics", began)
        assert self.step is not None
        self.arenas.lines(self.step.rows)
        np.concatenate([row.token_ids for row in self.step.rows], dtype=np.int32)
        began = self.note("rows for the kernels", began)
        sample_rows(self.step.rows, self.logits, stored=True)
        self.note("sampling", began)

    def note(self, part: str, began: float) -> float:
        now = time.thread_time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - began
        return now


def main() -> int:
    """Print the table."""
    given = [int(word) for word in sys.argv[1:]]
    batch, context = (*given, *(8, 1_000)[len(given) :])
    for temperature in (0.0, 1.0):
        profile = Profile(batch, context, temperature)
        for _ in range(WARM):
            profile.once()
        profile.seconds.clear()
        for _ in range(STEPS):
            profile.once()
        micros = {part: round(s / STEPS * 1e6) for part, s in profile.seconds.items()}
        print(f"batch {batch}, context {context}, temperature {temperature:g}: ", end="")
        print(", ".join(f"{part} {us}" for part, us in micros.items()), end="")
        print(f"; together {sum(micros.values())} us a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
