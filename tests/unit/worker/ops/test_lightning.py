"""Lightning attention against the recurrence as it is written down, token by token, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import StateCache, StateOps, StateSpace
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.torch_mixers.states import TorchStates
from tests.support.worker.state_spaces import lightning
from tests.support.worker.state_steps import (
    assert_rows_do_not_depend_on_cuts,
    assert_steps_are_the_recurrence,
)

SLOTS = 9


def cache(space: StateSpace, fill: float) -> StateCache:
    windows = torch.full((SLOTS, 0, space.conv_weight.shape[1]), fill)
    return StateCache(windows, torch.full((SLOTS, space.heads, space.head_dim, space.state_dim), fill))


def reference(projected: Tensor, space: StateSpace) -> tuple[Tensor, Tensor]:
    """Outputs of a whole sequence, and its state behind it."""
    heads, dim = space.heads, space.head_dim
    values, keys, queries = F.silu(projected.double()).view(len(projected), 3, heads, dim).unbind(1)
    state, outputs = torch.zeros(heads, dim, dim, dtype=torch.float64), []
    for value, key, query in zip(values, keys, queries, strict=True):
        state = state * space.decay.double().exp()[:, None, None] + value[:, :, None] * key[:, None]
        outputs.append((state * query[:, None]).sum(2).flatten())
    return torch.stack(outputs), state


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> StateOps:
    if request.param == "torch":
        return TorchStates()
    return NativeOps(torch.device("cpu"), torch.float32, threads=2).states


def test_sequences_in_steps_of_every_length_are_the_recurrence(ops: StateOps) -> None:
    """Cut differently, in slots that hold what is no number until they begin. One head forgets nearly nothing."""
    own = lightning(6, 12)
    states = cache(own, torch.nan)
    assert_steps_are_the_recurrence(
        ops, own, states, lambda given: reference(given, own), 3 * 6 * 12, atol=1e-4, state_atol=1e-4, rtol=1e-5
    )


def test_native_rows_are_the_same_to_the_last_bit_however_a_sequence_is_cut() -> None:
    own = lightning(6, 12)
    assert_rows_do_not_depend_on_cuts(own, lambda: cache(own, torch.nan), 3 * 6 * 12)
