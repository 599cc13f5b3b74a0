"""State spaces in PyTorch against the recurrence as it is written down, token by token, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import StateCache, StateOps, StateSpace
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.torch_mixers.convolution import CHUNK
from services.worker.ops.torch_mixers.states import TorchStates
from tests.support.worker.state_steps import (
    LENGTHS,
    Share,
    assert_rows_do_not_depend_on_cuts,
    assert_steps_are_the_recurrence,
    meta_of,
)

HEADS, DIM, GROUPS, STATE, KERNEL, SLOTS = 6, 8, 2, 12, 4, 9
CHANNELS = HEADS * DIM + 2 * GROUPS * STATE


def space() -> StateSpace:
    torch.manual_seed(5)
    return StateSpace(
        heads=HEADS,
        head_dim=DIM,
        groups=GROUPS,
        state_dim=STATE,
        conv_weight=torch.randn(KERNEL, CHANNELS) * 0.5,
        conv_bias=torch.randn(CHANNELS) * 0.1,
        decay=-torch.rand(HEADS) * 8,
        skip=torch.randn(HEADS),
        step_bias=torch.randn(HEADS) - 1,
        norm=torch.rand(HEADS * DIM) + 0.5,
        eps=1e-5,
    )


def cache(fill: float) -> StateCache:
    return StateCache(torch.full((SLOTS, KERNEL - 1, CHANNELS), fill), torch.full((SLOTS, HEADS, DIM, STATE), fill))


def reference(projected: Tensor, space: StateSpace) -> tuple[Tensor, Tensor]:
    """Outputs of a whole sequence, and its state behind it."""
    own = [each.double() if isinstance(each, Tensor) else each for each in space]
    wide = StateSpace(*own)  # type: ignore[arg-type]
    gate, inputs, steps = torch.split(projected.double(), [HEADS * DIM, CHANNELS, HEADS], dim=1)
    steps = F.softplus(steps + wide.step_bias)
    line = torch.cat((torch.zeros(KERNEL - 1, CHANNELS, dtype=torch.float64), inputs))
    state, outputs = torch.zeros(HEADS, DIM, STATE, dtype=torch.float64), []
    for token, step in enumerate(steps):
        seen = F.silu((line[token : token + KERNEL] * wide.conv_weight).sum(0) + wide.conv_bias)
        x, b, c = torch.split(seen, [HEADS * DIM, GROUPS * STATE, GROUPS * STATE])
        x = x.view(HEADS, DIM)
        b, c = (each.view(GROUPS, STATE).repeat_interleave(HEADS // GROUPS, 0) for each in (b, c))
        state = state * torch.exp(step * wide.decay)[:, None, None] + (x * step[:, None])[:, :, None] * b[:, None]
        outputs.append(((state * c[:, None]).sum(2) + x * wide.skip[:, None]).flatten())
    gated = (torch.stack(outputs) * F.silu(gate)).view(len(steps), GROUPS, -1)
    normed = gated * (gated.pow(2).mean(2, keepdim=True) + wide.eps).rsqrt()
    return normed.flatten(1) * wide.norm, state


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> StateOps:
    if request.param == "torch":
        return TorchStates()
    return NativeOps(torch.device("cpu"), torch.float32, threads=2).states


def test_sequences_in_steps_of_every_length_are_the_recurrence(ops: StateOps) -> None:
    """Four sequences, cut differently, in slots that hold what is no number until they begin."""
    own, states = space(), cache(torch.nan)
    width = HEADS * DIM + CHANNELS + HEADS
    rows = assert_steps_are_the_recurrence(ops, own, states, lambda given: reference(given, own), width)
    for slot in LENGTHS:
        inputs = rows[slot][1 - KERNEL :, HEADS * DIM : HEADS * DIM + CHANNELS]
        assert torch.equal(states.windows[slot], inputs)


def test_states_do_not_overflow_where_much_is_forgotten(ops: StateOps) -> None:
    """Whatever a chunk has forgotten is exp of a large negative number, never of a positive one."""
    own = space()._replace(decay=torch.full((HEADS,), -80.0), step_bias=torch.full((HEADS,), 5.0))
    rows = torch.randn(2 * CHUNK, HEADS * DIM + CHANNELS + HEADS)
    mixed = ops.mix(rows, own, cache(0.0), meta_of([Share(1, 0, len(rows))]))
    torch.testing.assert_close(mixed.double(), reference(rows, own)[0], atol=2e-5, rtol=1e-4)


def test_native_rows_are_the_same_to_the_last_bit_however_a_sequence_is_cut() -> None:
    assert_rows_do_not_depend_on_cuts(space(), lambda: cache(torch.nan), HEADS * DIM + CHANNELS + HEADS)
