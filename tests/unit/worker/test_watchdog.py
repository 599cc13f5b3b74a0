"""When a step counts as hung, and what does not count against it."""

from __future__ import annotations

import pytest

from services.worker.distributed.lockstep import LatestStep
from services.worker.watchdog import CHECK_EVERY, MAX_COUNTED, MIN_TIMEOUT, StepHung, StepWatchdog
from shared.ids import Incarnation, SequenceId
from shared.messages.worker import SequenceWork, StepPlan


def plan(step: int, tokens: int = 1) -> StepPlan:
    return StepPlan(epoch=Incarnation(1), step=step, work=(SequenceWork(SequenceId(1), tokens, b"", True),))


def watch(watchdog: StepWatchdog, begin: float, end: float) -> None:
    """Checks as the worker does, until `end`."""
    now = begin
    while now < end:
        now = min(now + CHECK_EVERY, end)
        watchdog.check(now)


def warm() -> StepWatchdog:
    watchdog = StepWatchdog(None, 600.0)
    watchdog.start(plan(0), 0.0)
    watchdog.finish(0.01, computed=True)
    return watchdog


def test_a_step_past_its_deadline_is_named() -> None:
    watchdog = warm()
    watchdog.start(plan(1), 5.0)
    watch(watchdog, 5.0, 5.0 + MIN_TIMEOUT)
    with pytest.raises(StepHung, match=r"step 1 of 1 tokens had no result after 2.0 s"):
        watchdog.check(5.0 + MIN_TIMEOUT + 0.1)


def test_idle_time_counts_for_nothing() -> None:
    watchdog = warm()
    watch(watchdog, 0.0, 100.0)
    assert watchdog.seconds_allowed() == 0.0
    watchdog.start(plan(1), 100.0)
    watch(watchdog, 100.0, 101.9)


def test_each_step_has_a_time_of_its_own() -> None:
    watchdog = warm()
    for step in range(1, 4):
        watchdog.start(plan(step), 10.0)
    for step in range(1, 4):
        watch(watchdog, 10.0 + 1.9 * (step - 1), 10.0 + 1.9 * step)
        watchdog.finish(10.0 + 1.9 * step, computed=True)
    assert not len(watchdog)


def test_a_process_that_was_stopped_is_not_called_hung_when_it_goes_on() -> None:
    watchdog = warm()
    watchdog.start(plan(1), 5.0)
    watchdog.check(5.1)
    watchdog.check(605.0)
    watch(watchdog, 605.0, 605.0 + MIN_TIMEOUT - MAX_COUNTED - 0.2)


def test_slow_devices_have_long_deadlines_and_what_was_left_out_has_no_part_in_them() -> None:
    watchdog = StepWatchdog(None, 600.0)
    watchdog.start(plan(0), 0.0)
    assert watchdog.seconds_allowed() == 600.0
    watchdog.start(plan(1), 0.0)
    watchdog.finish(7.0, computed=True)
    assert watchdog.seconds_allowed() == 70.0
    watchdog.finish(8.0, computed=False)
    watchdog.start(plan(2), 9.0)
    assert watchdog.seconds_allowed() == 70.0


def test_a_device_whose_kernels_are_compiled_is_given_more_time() -> None:
    watchdog = warm()
    watchdog.compiles_kernels = True
    watchdog.start(plan(1), 1.0)
    assert watchdog.seconds_allowed() == 20.0
    watchdog = StepWatchdog(0.5, 600.0)
    watchdog.start(plan(0), 0.0)
    watchdog.finish(0.01, computed=True)
    watchdog.start(plan(1), 1.0)
    assert watchdog.seconds_allowed() == 0.5, "a setting is taken as it is"


def test_time_that_has_a_deadline_of_its_own_does_not_count() -> None:
    watchdog = warm()
    watchdog.start(plan(1), 5.0)
    for check in range(1, 100):
        watchdog.check(5.0 + check * 0.25, excused=True)
    with pytest.raises(StepHung):
        watch(watchdog, 30.0, 30.0 + MIN_TIMEOUT + MAX_COUNTED)


def test_a_step_of_a_group_may_take_as_long_as_all_its_rows_do() -> None:
    """A decode that is computed beside another engine's long prompt, and behind one."""
    watchdog, group = warm(), [LatestStep(1, 0.0)]
    watchdog.latest = lambda: group[-1]
    watchdog.start(plan(1), 5.0)
    group.append(LatestStep(2048, 5.1))  # others' step, into which the plan has come
    watch(watchdog, 5.0, 60.0)
    group.append(LatestStep(1025, 60.0))
    watch(watchdog, 60.0, 110.0)
    watchdog.finish(111.0, computed=True, shared=group[-1])
    group.append(LatestStep(1, 112.0))
    watchdog.start(plan(2), 112.0)
    watch(watchdog, 112.0, 113.9)
    with pytest.raises(StepHung):
        watch(watchdog, 113.9, 114.2)
