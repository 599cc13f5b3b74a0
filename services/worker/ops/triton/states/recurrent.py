"""Recurrent units (RG-LRU): the recurrence of each channel's number, token by token in registers, in one launch.

Bytes moved, n rows of C channels: n * 4 * C * itemsize; 8 * S * C of the states of S sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import BatchMeta, RecurrentUnit, StateRows
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.states.convolution import sigmoid

CHANNELS_OF_PROGRAM = 128


@triton.jit(
    do_not_specialize=["stride", "out_stride"],
    do_not_specialize_on_alignment=["projected", "slots", "starts", "lengths", "out"],
)
def recurrent_kernel(
    projected,
    decay,
    states,
    slots,
    starts,
    lengths,
    out,
    stride,
    out_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (blocks of channels, sequences): all rows of a sequence from the state in its slot, which goes on."""
    wait_for_inputs(DEPENDENT)
    sequence = tl.program_id(1)
    begin = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    length = tl.load(lengths + sequence)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    own = states + tl.load(slots + sequence) * CHANNELS + channel
    # Where it begins, what the slot holds is nobody's.
    state = tl.load(own, mask=channel < tl.where(length > end - begin, CHANNELS, 0), other=0.0)
    row = projected + begin.to(tl.int64) * stride + channel
    to = out + begin.to(tl.int64) * out_stride + channel
    rate = tl.load(decay + channel, mask=inside, other=0.0)
    fresh = tl.where(length == end - begin, begin, -1)  # the row that begins the sequence
    for at in tl.range(begin, end):
        taken = sigmoid(tl.load(row, mask=inside, other=0.0).to(tl.float32))
        taken *= tl.load(row + 2 * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        left = tl.exp(sigmoid(tl.load(row + CHANNELS, mask=inside, other=0.0).to(tl.float32)) * rate)
        state = left * state + taken * tl.where(at == fresh, 1.0, tl.sqrt(tl.maximum(1.0 - left * left, 0.0)))
        tl.store(to, state.to(out.dtype.element_ty), mask=inside)
        row += stride
        to += out_stride
    # Nothing is left behind a padding row.
    tl.store(own, state, mask=channel < tl.where(length > 0, CHANNELS, 0))


def recur(projected: Tensor, unit: RecurrentUnit, states: Tensor, meta: BatchMeta, rows: StateRows) -> Tensor:
    """projected [n, 3 * C] → [n, C] in its dtype, as `StateOps.mix` has it; computed in float32. `states`
    [slots, C, 1, 1] are those behind the rows then. A row whose context is 0 leaves nothing. Nothing is read from the
    device."""
    assert projected.stride(1) == 1, "a row's elements lie together"
    assert states.is_contiguous(), "so do those of a slot"
    channels = states.shape[1]
    out = torch.empty(len(projected), channels, dtype=projected.dtype, device=projected.device)
    recurrent_kernel[(triton.cdiv(channels, CHANNELS_OF_PROGRAM), meta.num_decodes + len(meta.prefills))](
        *(projected, unit.decay, states, rows.slots, meta.query_starts, meta.context_lens, out),
        *(projected.stride(0), out.stride(0)),
        CHANNELS=channels,
        BLOCK=CHANNELS_OF_PROGRAM,
        num_warps=1,
        **launch_options(projected.device),
    )
    return out
