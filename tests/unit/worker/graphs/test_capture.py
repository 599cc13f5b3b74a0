"""The double that stands for CUDA's captures refuses what they would refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.worker.emulated_graphs import Forbidden, RunAgain

X = torch.arange(6, dtype=torch.float32)


@pytest.mark.parametrize(
    "work",
    [
        lambda: X.max().item(),
        lambda: X.tolist() and bool(X.sum() > 3),
        lambda: X[X > 3],
        lambda: X * torch.tensor(3.0),
        lambda: torch.bincount(X.int()),
    ],
)
def test_what_waits_for_the_device_is_refused(work: Callable[[], object]) -> None:
    def captured() -> None:
        work()

    with pytest.raises(Forbidden):
        RunAgain().capture(captured)


def test_what_only_launches_is_captured_and_run_again() -> None:
    capture, out = RunAgain(), torch.zeros(6)

    def add() -> None:
        out.add_((X * 2.0).to(torch.float64))

    capture.capture(add)()
    assert torch.equal(out, 6 * X)
    assert (capture.captured, capture.replayed) == (1, 1)
