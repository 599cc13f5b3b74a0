"""Selective spaces (Mamba-1) and their convolution against the recurrence as it is written down, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.worker.ops.interface import StateCache, StateOps
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.torch_mixers.states import TorchStates
from tests.support.worker.selective_reference import (
    CHANNELS,
    KERNEL,
    SLOTS,
    empty_states,
    selective_reference,
    selective_space,
)
from tests.support.worker.state_steps import LENGTHS, Share, assert_rows_do_not_depend_on_cuts, meta_of, mixed_in_steps

DIMS = (16, 12)
"""One that is whole vectors of every kind, and one that is not."""


def native(threads: int = 2) -> StateOps:
    return NativeOps(torch.device("cpu"), torch.float32, threads=threads).states


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> StateOps:
    return TorchStates() if request.param == "torch" else native()


@pytest.mark.parametrize("dim", DIMS)
def test_sequences_in_steps_of_every_length_are_the_recurrence(ops: StateOps, dim: int) -> None:
    """Four sequences, cut differently, in slots that hold what is no number until they begin."""
    own, cache = selective_space(dim), empty_states(dim)
    rows = {slot: torch.randn(length, 3 * CHANNELS + 2 * dim) for slot, length in LENGTHS.items()}
    mixed = mixed_in_steps(lambda given, shares: ops.mix(given, own, cache, meta_of(shares)), rows)
    for slot in LENGTHS:
        expected, state = selective_reference(rows[slot], own)
        torch.testing.assert_close(mixed[slot].double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(cache.states[slot, :, 0].double(), state, atol=2e-5, rtol=1e-4)
    others = [slot for slot in range(SLOTS) if slot not in LENGTHS]
    assert cache.states[others].isnan().all(), "nobody else's state is written"


@pytest.mark.parametrize("dim", DIMS)
def test_native_rows_are_the_same_to_the_last_bit_however_a_sequence_is_cut(dim: int) -> None:
    assert_rows_do_not_depend_on_cuts(selective_space(dim), lambda: empty_states(dim), 3 * CHANNELS + 2 * dim)


def test_the_convolution_before_it_is_a_sum_through_a_silu(ops: StateOps) -> None:
    """Cut in steps within its width, beside another sequence, and from columns of wider rows."""
    own, length = selective_space(12).convolution, 21
    cache = StateCache(torch.full((SLOTS, KERNEL - 1, CHANNELS), torch.nan), torch.empty(SLOTS, CHANNELS, 1, 0))
    rows, outputs, first = torch.randn(length, CHANNELS), [], 0
    for count in (1, 1, 2, 1, 7, 1, 1, length - 14):
        given = torch.cat((torch.randn(1, CHANNELS), rows[first : first + count]))
        wide = torch.cat((given, torch.randn(len(given), 5)), dim=1)
        outputs.append(ops.mix(wide[:, :CHANNELS], own, cache, meta_of([Share(6, 0, 1), Share(4, first, count)]))[1:])
        first += count
    line = torch.cat((torch.zeros(KERNEL - 1, CHANNELS), rows)).double()
    seen = torch.stack([(line[token : token + KERNEL] * own.conv_weight).sum(0) for token in range(length)])
    torch.testing.assert_close(torch.cat(outputs).double(), F.silu(seen + own.conv_bias), atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.windows[4], rows[1 - KERNEL :])
    assert cache.windows[0].isnan().all(), "nobody else's window is written"
