"""Which errors end a test's process, so that the next tests have a GPU that works."""

from __future__ import annotations

import pytest

from tests.support.worker.broken_devices import lasts


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: device-side assert triggered", True),
        ("Triton Error [CUDA]: misaligned address", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("CUDA error: out of memory", False),
        ("out of resource: shared memory, Required: 300000", False),
        ("assert [1] == [2]", False),
    ],
)
def test_errors_that_leave_a_device_broken_are_known(error: str, expected: bool) -> None:
    assert lasts(error) is expected
