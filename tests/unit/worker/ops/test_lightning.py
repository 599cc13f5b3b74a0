"""Lightning attention against the recurrence as it is written down, token by token, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import StateCache, StateOps, StateSpace
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.torch_mixers.convolution import CHUNK
from services.worker.ops.torch_mixers.states import TorchStates
from tests.support.worker.state_spaces import lightning
from tests.support.worker.state_steps import Share, meta_of

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
    lengths = {7: 3 * CHUNK + 5, 2: CHUNK + 1, 5: 9}
    rows = {slot: torch.randn(length, 3 * 6 * 12) for slot, length in lengths.items()}
    outputs: dict[int, list[Tensor]] = {slot: [] for slot in lengths}
    for shares in (
        [Share(5, 0, 1), Share(7, 0, CHUNK + 3), Share(2, 0, 2)],
        [Share(5, 1, 1), Share(7, CHUNK + 3, 2), Share(2, 2, CHUNK - 1)],
        [Share(7, CHUNK + 5, 1), Share(5, 2, 7)],
        [Share(7, CHUNK + 6, 2 * CHUNK - 1)],
    ):
        given = torch.cat([rows[share.slot][share.first : share.first + share.count] for share in shares])
        mixed = ops.mix(given, own, states, meta_of(shares))
        for share, part in zip(shares, mixed.split([share.count for share in shares]), strict=True):
            outputs[share.slot].append(part)
    for slot in lengths:
        expected, state = reference(rows[slot], own)
        torch.testing.assert_close(torch.cat(outputs[slot]).double(), expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(states.states[slot].double(), state, atol=1e-4, rtol=1e-5)
    others = [slot for slot in range(SLOTS) if slot not in lengths]
    assert states.states[others].isnan().all(), "nobody else's state is written"


def test_native_rows_are_the_same_to_the_last_bit_however_a_sequence_is_cut() -> None:
    """In one step or in many, alone or beside others, by one thread or two: who is computed again goes on alike."""
    own, length = lightning(6, 12), CHUNK + 7
    rows = torch.randn(length, 3 * 6 * 12)
    one, two = (NativeOps(torch.device("cpu"), torch.float32, threads=threads).states for threads in (1, 2))
    whole, cut = cache(own, torch.nan), cache(own, torch.nan)
    expected = one.mix(rows, own, whole, meta_of([Share(3, 0, length)]))
    parts, first = [], 0
    for count in (1, 2, 5, 1, length - 9):
        shares = [Share(6, 0, 1), Share(4, first, count)]
        given = torch.cat((torch.randn(1, rows.shape[1]), rows[first : first + count]))
        parts.append(two.mix(given, own, cut, meta_of(shares))[1:])
        first += count
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(cut.states[4], whole.states[3])
