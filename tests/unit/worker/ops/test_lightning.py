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
from tests.support.worker.state_steps import LENGTHS, assert_rows_do_not_depend_on_cuts, meta_of, mixed_in_steps

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
    torch.manual_seed(6)
    rows = {slot: torch.randn(length, 3 * 6 * 12) for slot, length in LENGTHS.items()}
    mixed = mixed_in_steps(lambda given, shares: ops.mix(given, own, states, meta_of(shares)), rows)
    for slot in LENGTHS:
        expected, state = reference(rows[slot], own)
        torch.testing.assert_close(mixed[slot].double(), expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(states.states[slot].double(), state, atol=1e-4, rtol=1e-5)
    others = [slot for slot in range(SLOTS) if slot not in LENGTHS]
    assert states.states[others].isnan().all(), "nobody else's state is written"


def test_native_rows_are_the_same_to_the_last_bit_however_a_sequence_is_cut() -> None:
    own = lightning(6, 12)
    assert_rows_do_not_depend_on_cuts(own, lambda: cache(own, torch.nan), 3 * 6 * 12)
