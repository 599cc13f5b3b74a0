"""When a device was where, told by events of which it knows only how far they are apart."""

from __future__ import annotations

import threading
import time

import pytest

from services.worker.executor.timing import CudaClock, HostClock


class Device:
    """Passes an event a second after the one before; the host's clock is `now`."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.now = 100.0
        self.busy_until = 100.0 + ahead

        self.entered: list[str] = []
        """Threads that have it as their current device."""

    def event(self) -> SecondLater:
        return SecondLater(self)

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)

    def clock(self) -> CudaClock:
        return CudaClock(self.enter, self.event, lambda: self.now)


class SecondLater:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._device.busy_until = max(self._device.busy_until, self._device.now) + 1.0
        self.at = self._device.busy_until

    def query(self) -> bool:
        assert threading.current_thread().name in self._device.entered, "it would ask GPU 0"
        return self._device.now >= self.at

    def synchronize(self) -> None:
        self._device.now = max(self._device.now, self.at)

    def elapsed_time(self, end_event: SecondLater) -> float:
        assert self.at <= end_event.at, "CUDA says nothing of the other way around"
        return (end_event.at - self.at) * 1000


def test_a_mark_that_is_awaited_tells_when_others_were_passed_that_nobody_awaited_in_time() -> None:
    device = Device()
    clock = device.clock()
    marks = [clock.mark() for _ in range(3)]
    marks[0].wait()
    assert marks[0].when() == 101.0
    device.now = 110.0
    for mark in marks[1:]:
        mark.wait()
    assert [mark.when() for mark in marks] == [101.0, 102.0, 103.0]
    assert marks[2].seconds_since(marks[0]) == 2.0


def test_the_first_mark_is_passed_when_it_is_found_to_be() -> None:
    device = Device()
    clock = device.clock()
    mark = clock.mark()
    device.now = 104.0
    mark.wait()
    assert mark.when() == 104.0


def test_marks_are_compared_with_one_that_is_not_much_older_though_nobody_waits() -> None:
    device = Device()
    clock = device.clock()
    clock.mark().wait()
    for _ in range(5):
        device.now += 50.0
        mark = clock.mark()
        device.now += 5.0
        mark.wait()
        assert mark.when() == device.now - 4.0
    assert clock._awaited is not None
    assert device.now - clock._awaited[1] < 70.0


def test_each_thread_that_waits_has_the_device_as_its_own_from_then_on() -> None:
    device = Device()
    clock = device.clock()
    marks = [clock.mark() for _ in range(4)]

    def answer() -> None:
        for mark in marks[:2]:
            mark.wait()

    waiting = threading.Thread(target=answer, name="answer")
    waiting.start()
    waiting.join()
    for mark in marks[2:]:
        mark.wait()
    assert device.entered == ["answer", threading.current_thread().name]
    assert marks[3].when() == 104.0


def test_a_device_that_computes_at_once_is_where_the_host_is() -> None:
    clock = HostClock()
    before = time.perf_counter()
    first, second = clock.mark(), clock.mark()
    second.wait()
    assert before <= first.when() <= second.when() <= time.perf_counter()
    assert second.seconds_since(first) == pytest.approx(second.when() - first.when())
