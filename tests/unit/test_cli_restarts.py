"""The restart policy: at once after a good run, then slower up to a bound, never after 0 or 78."""

from __future__ import annotations

import pytest

from baton.cli.restarts import ProcessState, RestartPolicy
from baton.core.pauses import PAUSE_MAX_S, pause_s

NAME = "decode-0:decode-0"


def ended(code: int, started: int, stopped: int, state: str = "EXITED") -> ProcessState:
    return ProcessState(NAME, state, code, started, stopped)


def running(started: int) -> ProcessState:
    return ProcessState(NAME, "RUNNING", 0, started, 0)


def test_a_process_killed_after_a_long_run_is_started_at_once() -> None:
    """A kill after a steady run costs no pause."""
    policy = RestartPolicy()
    assert policy.observe([running(0)], 0.0) == []
    (news,) = policy.observe([ended(-1, 0, 60)], 60.0)
    assert (news.failures, news.restart_in_s) == (1, 0.0)
    assert policy.take_due(60.0) == [NAME]
    assert policy.take_due(60.0) == []


@pytest.mark.parametrize("code", [0, 78])
def test_an_asked_for_end_and_a_configuration_error_are_final(code: int) -> None:
    """Exit codes 0 and 78 leave the process down."""
    policy = RestartPolicy()
    (news,) = policy.observe([ended(code, 0, 1)], 1.0)
    assert news.restart_in_s is None
    assert policy.deadline() is None
    assert policy.take_due(1e9) == []


def test_the_same_end_is_news_once() -> None:
    """Looking again at a process that is still down changes nothing."""
    policy = RestartPolicy()
    states = [ended(70, 0, 1)]
    assert len(policy.observe(states, 1.0)) == 1
    assert policy.observe(states, 2.0) == []


def test_two_ends_within_one_second_are_two_failures() -> None:
    """Supervisor's times are whole seconds: a second run may look exactly like the first."""
    policy = RestartPolicy()
    policy.observe([ended(70, 5, 5)], 5.0)
    assert policy.take_due(5.0) == [NAME]
    (news,) = policy.observe([ended(70, 5, 5)], 5.2)
    assert news.failures == 2


def test_pauses_grow_to_a_bound_and_never_end() -> None:
    """A port that is taken for a minute is tried between 4 and 15 times, and for ever after."""
    policy = RestartPolicy()
    now, starts = 0.0, 1
    while now < 60.0:
        policy.observe([ended(75, int(now), int(now))], now)
        due = policy.deadline()
        assert due is not None
        now = max(now, due) + 0.3
        assert policy.take_due(now) == [NAME]
        starts += 1
    assert 4 <= starts <= 15
    assert pause_s(10_000) == PAUSE_MAX_S


def test_a_good_run_forgets_the_failures_before_it() -> None:
    """After a steady run the next failure counts as the first."""
    policy = RestartPolicy()
    for second in range(4):
        policy.observe([ended(70, second, second)], float(second))
        policy.take_due(1e6)
    (news,) = policy.observe([ended(70, 10, 50)], 50.0)
    assert (news.failures, news.restart_in_s) == (1, 0.0)


def test_a_process_started_by_the_operator_is_not_started_twice() -> None:
    """`supervisorctl start` during a pause cancels our own start."""
    policy = RestartPolicy()
    policy.observe([ended(70, 0, 0)], 0.0)
    policy.take_due(0.0)
    policy.observe([ended(70, 0, 1)], 1.0)
    policy.observe([running(1)], 1.1)
    assert policy.take_due(1e6) == []
