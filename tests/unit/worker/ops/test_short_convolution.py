"""Gated short convolutions against the sum as it is written down, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.ops.interface import ShortConvolution, StateCache, StateOps
from services.worker.ops.torch_mixers.states import TorchStates
from tests.support.worker.native_batches import native
from tests.support.worker.state_steps import Share, meta_of

KERNEL, LENGTH = 3, 21


def convolution(channels: int) -> ShortConvolution:
    torch.manual_seed(5)
    return ShortConvolution(torch.randn(KERNEL, channels), torch.randn(channels))


def reference(projected: Tensor, own: ShortConvolution) -> Tensor:
    before, behind, x = projected.double().chunk(3, dim=1)
    line = torch.cat((torch.zeros(KERNEL - 1, own.heads, dtype=torch.float64), before * x))
    seen = [(line[token : token + KERNEL] * own.conv_weight).sum(0) for token in range(len(projected))]
    return behind * (torch.stack(seen) + own.conv_bias)


@pytest.mark.parametrize("channels", [37, 300])
@pytest.mark.parametrize("name", ["torch", "native"])
def test_a_sequence_in_steps_of_every_length_is_the_sum_and_the_same_to_the_last_bit(name: str, channels: int) -> None:
    """Beside another sequence, in slots that hold what is no number until they begin."""
    ops: StateOps = TorchStates() if name == "torch" else native(torch.float32).states
    own = convolution(channels)
    states = StateCache(torch.full((9, KERNEL - 1, channels), torch.nan), torch.empty(9, channels, 1, 0))
    rows, first = torch.randn(LENGTH, 3 * channels), 0
    whole = ops.mix(rows, own, states, meta_of([Share(3, 0, LENGTH)]))
    torch.testing.assert_close(whole.double(), reference(rows, own), atol=1e-5, rtol=1e-5)
    for count in (1, 1, 2, 1, 7, 1, 1, LENGTH - 14):
        given = torch.cat((torch.randn(1, 3 * channels), rows[first : first + count]))
        mixed = ops.mix(given, own, states, meta_of([Share(6, 0, 1), Share(4, first, count)]))
        assert torch.equal(mixed[1:], whole[first : first + count])
        first += count
    assert torch.equal(states.windows[4], states.windows[3])
    assert states.windows[0].isnan().all(), "nobody else's window is written"
