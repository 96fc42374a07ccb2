"""The guard's decisions, as conversations: what counts as frozen, what is started again, when."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest

from baton.core.lifecycles import WorkerState
from baton.core.limits import Limits
from baton.core.pauses import PAUSE_MAX_S, STEADY_S
from baton.ports.driving import EXIT_ROLE, Exit, Note
from baton.runtime.guarding import (
    COLD_AFTER,
    GRACE_S,
    LOOK_S,
    ORPHANED,
    OWN_GAP_S,
    RESTART,
    TRACE,
    WATCH_S,
    YIELD_S,
    Began,
    Command,
    Condition,
    Event,
    GuardMachine,
    HurryWorker,
    Looked,
    ParentGone,
    Renew,
    RestartAsked,
    SignalWorker,
    StartWorker,
    StopAsked,
    TellManager,
    WorkerEnded,
)
from baton.runtime.starvation import ThreadLook

LIMITS = Limits()
LEASE_S = LIMITS.lease_ttl_ms / 1000
FROZEN_S = LEASE_S + LIMITS.frozen_margin_ms / 1000
PID = 4_321
KILL = SignalWorker(signal.SIGKILL)
READY = TellManager(Condition.READY)


@dataclass
class Talk:
    """A guard, its clock, and a worker whose loop runs or stands still."""

    machine: GuardMachine = field(default_factory=lambda: GuardMachine(LIMITS, kill="stale"))
    now: float = 1000.0
    beat: float = 0.0
    ready: bool = False
    starved: bool = False
    """Of a core, whenever it does not beat."""

    def tell(self, event: Event) -> list[Command]:
        """Give one event; return what is to be done, without what is only logged."""
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return [command for command in commands if not isinstance(command, Note)]

    def look(self) -> list[Command]:
        threads: tuple[ThreadLook, ...] = ()
        if self.machine.watches:
            threads = (ThreadLook(PID, self.starved, 3.0, 0.0),)
        return self.tell(Looked(self.beat, self.ready, PID, threads))

    def pass_time(self, seconds: float, *, beating: bool) -> list[Command]:
        """Let the guard look at its own pace; return everything it did."""
        done: list[Command] = []
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(until, self.machine.deadline())
            if beating:
                self.beat = self.now
            done += self.look()
        return done

    def serve(self) -> None:
        """Have the first worker ready."""
        assert self.tell(Began()) == [StartWorker(yielding=True)]
        self.now, self.ready = self.now + 1.0, True
        self.beat = self.now
        assert self.look() == [READY]
        assert self.machine.state is WorkerState.SERVING


def test_a_start_of_the_whole_cluster_yields_to_nobody() -> None:
    """Nobody serves yet, so there is nothing to be hurried either; a later worker is no other."""
    talk = Talk()
    assert talk.tell(Began(alone=True)) == [StartWorker(yielding=False)]
    assert HurryWorker() not in talk.pass_time(YIELD_S + 1, beating=True)


def test_the_first_worker_yields_and_later_ones_do_not() -> None:
    """A start from nothing lets others run first; after a death requests wait for the next one."""
    talk = Talk()
    talk.serve()
    talk.pass_time(STEADY_S + LOOK_S, beating=True)
    assert talk.tell(WorkerEnded(-9)) == [StartWorker(yielding=False)]


def test_a_running_worker_is_left_alone() -> None:
    """As long as its loop runs nothing is done, for hours."""
    talk = Talk()
    talk.serve()
    assert talk.pass_time(600.0, beating=True) == []


def test_a_frozen_worker_is_asked_where_it_stands_and_killed() -> None:
    """At the lease's length its stacks are asked for; a margin later it is killed, once."""
    talk = Talk()
    talk.serve()
    assert talk.pass_time(LEASE_S - LOOK_S, beating=False) == []
    assert talk.pass_time(2 * LOOK_S, beating=False) == [SignalWorker(TRACE)]
    assert talk.pass_time(FROZEN_S, beating=False) == [KILL]
    assert talk.machine.state is WorkerState.KILLED
    assert talk.now - talk.beat > FROZEN_S
    assert talk.pass_time(60.0, beating=False) == []
    assert talk.tell(WorkerEnded(-9)) == [StartWorker(yielding=False)]


def test_a_frozen_worker_is_killed_soon_enough() -> None:
    """From the last beat to the kill: the lease, the margin and one look at most."""
    talk = Talk()
    talk.serve()
    while KILL not in talk.pass_time(LOOK_S / 3, beating=False):
        assert talk.now - talk.beat < FROZEN_S + LOOK_S
    assert FROZEN_S <= talk.now - talk.beat <= FROZEN_S + LOOK_S


def test_a_worker_that_gets_no_core_has_one_lease_more() -> None:
    """It is not hung: it would go on by itself. But not for ever, and the log says so once."""
    talk = Talk(starved=True)
    talk.serve()
    assert talk.pass_time(FROZEN_S + LOOK_S, beating=False) == [SignalWorker(TRACE)]
    assert talk.pass_time(LEASE_S - 2 * LOOK_S, beating=False) == []
    assert talk.pass_time(3 * LOOK_S, beating=False) == [KILL]
    assert FROZEN_S + LEASE_S <= talk.now - talk.beat <= FROZEN_S + LEASE_S + 2 * LOOK_S


def test_a_starved_worker_that_went_on_is_spared_again() -> None:
    """Each standstill is judged by itself."""
    talk = Talk(starved=True)
    talk.serve()
    notes: list[str] = []
    for _ in range(3):
        until = talk.now + FROZEN_S + LEASE_S / 2
        while talk.now < until:
            talk.now = talk.machine.deadline()
            threads = (ThreadLook(PID, True, 3.0, 0.0),)
            commands = talk.machine.handle(Looked(talk.beat, True, PID, threads), talk.now)
            assert KILL not in commands
            notes += [each.event for each in commands if isinstance(each, Note)]
        talk.pass_time(1.0, beating=True)
    assert notes == ["worker_starved"] * 3


def test_a_worker_that_hangs_after_it_was_starved_is_killed() -> None:
    """What it is spared is not prolonged; and a standstill that began with a wait is none of it."""
    talk = Talk(starved=True)
    talk.serve()
    talk.pass_time(0.6, beating=False)
    talk.starved = False
    assert KILL in talk.pass_time(FROZEN_S, beating=False)


def test_threads_are_looked_at_only_while_the_loop_stands_still() -> None:
    """Looking costs time, ten times a second."""
    talk = Talk()
    talk.serve()
    talk.pass_time(10.0, beating=True)
    assert not talk.machine.watches
    talk.pass_time(WATCH_S + LOOK_S, beating=False)
    assert talk.machine.watches
    talk.pass_time(LOOK_S, beating=True)
    assert not talk.machine.watches


def test_a_worker_that_goes_on_in_time_is_not_killed() -> None:
    """It stood still for longer than its lease, but not for longer than the margin too."""
    talk = Talk()
    talk.serve()
    assert talk.pass_time(LEASE_S + LOOK_S, beating=False) == [SignalWorker(TRACE)]
    assert talk.pass_time(LEASE_S, beating=True) == []
    assert talk.pass_time(LEASE_S - LOOK_S, beating=False) == []


def test_a_sleep_of_the_machine_is_nobodys_fault() -> None:
    """After a suspend both clocks jumped: the worker has a whole lease from now on to go on."""
    talk = Talk()
    talk.serve()
    talk.now += 3600.0
    assert talk.look() == []
    assert talk.pass_time(LEASE_S - LOOK_S, beating=False) == []
    assert talk.pass_time(60.0, beating=True) == []


@pytest.mark.parametrize("gap_s", [OWN_GAP_S + 0.01, LEASE_S, FROZEN_S, 60.0])
def test_a_guard_that_did_not_run_begins_anew(gap_s: float) -> None:
    """A guard that was stopped or starved does not count what it did not see."""
    talk = Talk()
    talk.serve()
    talk.pass_time(FROZEN_S - 2 * LOOK_S, beating=False)
    talk.now += gap_s
    assert KILL not in talk.look()
    assert KILL not in talk.pass_time(FROZEN_S - 2 * LOOK_S, beating=False)
    assert KILL in talk.pass_time(3 * LOOK_S, beating=False)


def test_a_start_may_block_the_loop_but_not_for_ever() -> None:
    """Before its first beat a worker loads and allocates: only the limit of the start counts."""
    talk = Talk()
    talk.tell(Began())
    done = talk.pass_time(LIMITS.start_ms / 1000 - 1, beating=False)
    assert done == [HurryWorker()]
    assert talk.pass_time(2.0, beating=False) == [KILL]


def test_a_start_does_not_yield_for_ever() -> None:
    """On a machine without idle time a yielding start would never end; one that is over is over."""
    talk = Talk()
    talk.tell(Began())
    assert talk.pass_time(YIELD_S - LOOK_S, beating=False) == []
    assert talk.pass_time(2 * LOOK_S, beating=False) == [HurryWorker()]
    other = Talk()
    other.serve()
    assert other.pass_time(2 * YIELD_S, beating=True) == []


def test_with_kill_never_it_only_tells() -> None:
    """Nothing is killed; the log says once that the worker stands still."""
    talk = Talk(GuardMachine(LIMITS, kill="never"))
    talk.serve()
    notes = []
    for _ in range(600):
        talk.now += LOOK_S
        commands = talk.machine.handle(Looked(talk.beat, True), talk.now)
        notes += [command.event for command in commands if isinstance(command, Note)]
        assert KILL not in commands
    assert notes == ["worker_frozen"]


@pytest.mark.parametrize("code", [0, 78])
def test_final_codes_end_the_guard(code: int) -> None:
    """Somebody asked the worker itself, or its settings are wrong: no other one is started."""
    talk = Talk()
    talk.serve()
    (end,) = talk.tell(WorkerEnded(code))
    assert isinstance(end, Exit)
    assert end.code == code


def test_pauses_between_failures_grow_and_then_the_guard_ends() -> None:
    """The first restart is at once, later ones wait; at last everything is started from nothing,
    after a pause too, since whoever starts it knows nothing of its worker's failures."""
    talk = Talk()
    talk.tell(Began())
    pauses = []
    while True:
        ended = talk.now
        done = talk.tell(WorkerEnded(70))
        while not done:
            talk.now = talk.machine.deadline()
            done = talk.look()
        pauses.append(round(talk.now - ended, 1))
        if isinstance(done[0], Exit):
            assert done[0].code == 70
            break
        assert done == [StartWorker(yielding=False)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.0
    assert len(pauses) == COLD_AFTER
    assert PAUSE_MAX_S / 2 < pauses[-1] <= PAUSE_MAX_S


def test_a_long_start_that_fails_is_no_good_run() -> None:
    """What never became ready has not run, however long it tried."""
    talk = Talk()
    talk.tell(Began())
    talk.pass_time(2 * STEADY_S, beating=False)
    assert talk.tell(WorkerEnded(75)) == [StartWorker(yielding=False)]
    talk.pass_time(2 * STEADY_S, beating=False)
    assert talk.tell(WorkerEnded(75)) == []
    assert talk.machine.failures == 2


def test_a_good_run_forgets_failures() -> None:
    """A worker that ran for a while and dies is started at once, however often that was needed."""
    talk = Talk()
    talk.serve()
    for _ in range(3 * COLD_AFTER):
        talk.pass_time(STEADY_S + LOOK_S, beating=True)
        assert talk.tell(WorkerEnded(-11)) == [StartWorker(yielding=False)]
        assert talk.machine.failures == 1


def test_a_stop_is_passed_on_and_its_end_followed() -> None:
    """SIGTERM goes to the worker, each time; the guard ends as it ends and starts nothing."""
    talk = Talk()
    talk.serve()
    stopping = TellManager(Condition.STOPPING)
    assert talk.tell(StopAsked(15)) == [stopping, SignalWorker(15)]
    assert talk.pass_time(20.0, beating=True) == []
    assert talk.tell(StopAsked(15)) == [SignalWorker(15)]
    assert talk.tell(WorkerEnded(0)) == [Exit(0, "stopped")]


def test_a_worker_that_freezes_in_its_drain_is_killed_and_not_started_again() -> None:
    """A stop does not wait for a process that stands still; its code is that of a killed one."""
    talk = Talk()
    talk.serve()
    talk.tell(StopAsked(15))
    assert KILL in talk.pass_time(FROZEN_S + LOOK_S, beating=False)
    assert talk.tell(WorkerEnded(-9)) == [Exit(137, "stopped")]


def test_a_stop_between_two_workers_ends_at_once() -> None:
    """Nobody is there to drain."""
    talk = Talk()
    talk.tell(Began())
    talk.tell(WorkerEnded(70))
    talk.tell(WorkerEnded(70))
    assert talk.machine.state is WorkerState.ABSENT
    assert talk.tell(StopAsked(15)) == [Exit(0, "stopped")]


def test_an_orphan_may_end_in_order_and_is_killed_after_that() -> None:
    """The death of the supervisor: the worker is told, and has three seconds."""
    talk = Talk()
    talk.serve()
    assert talk.tell(ParentGone()) == [SignalWorker(ORPHANED)]
    assert talk.pass_time(GRACE_S - LOOK_S, beating=True) == []
    assert talk.pass_time(2 * LOOK_S, beating=True) == [KILL]
    (end,) = talk.tell(WorkerEnded(-9))
    assert isinstance(end, Exit)
    assert end.code == 75


def test_an_orphaned_start_is_killed_too() -> None:
    """Also a worker that does not listen yet ends within the grace."""
    talk = Talk()
    talk.tell(Began())
    assert talk.tell(ParentGone()) == [SignalWorker(ORPHANED)]
    assert talk.pass_time(GRACE_S + LOOK_S, beating=False) == [KILL]


def test_a_restart_renews_the_guard_and_then_replaces_the_worker() -> None:
    """The new guard finds a worker, asks it to make room, and starts its successor at once."""
    talk = Talk()
    talk.serve()
    assert talk.tell(RestartAsked()) == [Renew()]
    new = Talk(now=talk.now + 3.0, beat=talk.now + 2.9, ready=True)
    assert new.tell(Began(adopts=True)) == [SignalWorker(RESTART)]
    assert new.look() == [READY]
    assert new.pass_time(60.0, beating=True) == []
    assert new.tell(WorkerEnded(75)) == [StartWorker(yielding=False)]
    assert new.machine.failures == 0


def test_an_adopted_worker_that_fails_instead_is_a_failure() -> None:
    """Killed or frozen while it makes room, it is replaced like any other."""
    talk = Talk(beat=999.0)
    talk.tell(Began(adopts=True))
    assert KILL in talk.pass_time(FROZEN_S + LOOK_S, beating=False)
    assert talk.tell(WorkerEnded(-9)) == [StartWorker(yielding=False)]
    assert talk.machine.failures == 1


def test_a_stop_is_stronger_than_a_restart() -> None:
    """Who ends is not renewed."""
    talk = Talk()
    talk.serve()
    talk.tell(StopAsked(15))
    assert talk.tell(RestartAsked()) == []


def test_a_worker_that_leaves_its_role_is_started_again_at_once() -> None:
    """In the role that is kept for it; as often as somebody says so, it counts as no failure."""
    talk = Talk()
    talk.serve()
    for _ in range(2 * COLD_AFTER):
        assert talk.tell(WorkerEnded(EXIT_ROLE)) == [StartWorker(yielding=False)]
        talk.pass_time(0.5, beating=True)
    assert talk.machine.failures == 0


def test_a_stop_that_meets_a_change_of_roles_is_a_stop() -> None:
    """It had drained already, for the other reason: nobody starts it again."""
    talk = Talk()
    talk.serve()
    talk.tell(StopAsked(signal.SIGTERM))
    assert talk.tell(WorkerEnded(EXIT_ROLE)) == [Exit(0, "stopped")]


def test_a_restart_that_meets_a_change_of_roles_is_both() -> None:
    """The new guard's worker leaves its role, and its successor is started as any other."""
    talk = Talk()
    assert talk.tell(Began(adopts=True)) == [SignalWorker(RESTART)]
    assert talk.tell(WorkerEnded(EXIT_ROLE)) == [StartWorker(yielding=False)]
