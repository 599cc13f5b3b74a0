"""Selective spaces (Mamba-1): the recurrence of each channel's state, token by token in registers.

Decodes and short runs of rows take one launch. Longer prompts are cut into chunks, which are computed beside each
other: a pass finds what each chunk makes of no state at all and how long its time steps are together, which says what
it leaves of a state; a second one hands states on from chunk to chunk; a third gives outputs. So a prompt is as long
as two chunks and its number of chunks, where "Mamba" (Gu and Dao, arXiv:2312.00752, section 3.3.2) scans a prompt in
one program for each channel.

Bytes moved, n rows of C channels with states of N numbers: n * (3 * C + 2 * N) * itemsize in one pass; where there are
chunks n * 2 * C * itemsize more, and 16 * C * N for each. Powers: n * C * N in each pass over rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import BatchMeta, SelectiveSpace, StateRows
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.states.convolution import sigmoid

CHUNK = 64
"""Rows of a chunk: time grows with it, and the number of states that are handed on shrinks."""
CHANNELS_OF_PROGRAM = 16
BLOCK = 256
"""Numbers of states of a program that hands them on."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    """log(1 + exp(x)). With t = exp(-|x|), log(1 + t) is twice the inverse hyperbolic tangent of t / (2 + t), which is
    1/3 at the most: a short series, exact where log(1 + t) of a GPU is not."""
    t = tl.exp(-tl.abs(x))
    s = t / (2.0 + t)
    squared = s * s
    series = 1.0 / 13.0 * squared + 1.0 / 11.0
    series = series * squared + 1.0 / 9.0
    series = series * squared + 1.0 / 7.0
    series = series * squared + 1.0 / 5.0
    series = series * squared + 1.0 / 3.0
    series = series * squared + 1.0
    return 2.0 * s * series + tl.maximum(x, 0.0)


@triton.jit
def _row(row, channel, inside, number, in_state, CHANNELS: tl.constexpr, DIM: tl.constexpr, READS: tl.constexpr):
    """(x, B, time step as it is projected, gate, C) of a row. Not READS: anything for the last two."""
    x = tl.load(row + CHANNELS + channel, mask=inside, other=0.0)
    b = tl.load(row + 2 * CHANNELS + number, mask=in_state, other=0.0)
    step = tl.load(row + 2 * CHANNELS + 2 * DIM + channel, mask=inside, other=0.0)
    gate, c = x, b
    if READS:
        gate = tl.load(row + channel, mask=inside, other=0.0)
        c = tl.load(row + 2 * CHANNELS + DIM + number, mask=in_state, other=0.0)
    return x, b, step, gate, c


@triton.jit
def _read(state, x, gate, c, skip):
    """What a row gives: what it reads of the state, and itself, as far as its gate is open."""
    read = tl.sum(state * c.to(tl.float32)[None, :], 1) + skip * x
    opening = gate.to(tl.float32)
    return read * (opening * sigmoid(opening))


@triton.jit(
    do_not_specialize=["stride", "out_stride"],
    do_not_specialize_on_alignment=["projected", "slots", "starts", "lengths", "out"],
)
def selective_kernel(
    projected,
    decay,
    skip,
    step_bias,
    states,
    slots,
    starts,
    lengths,
    chunks,
    times,
    out,
    stride,
    out_stride,
    CHANNELS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    READS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (blocks of channels, chunks, sequences).

    CHUNK None: all rows of a sequence from the state in its slot, which goes on. Else one chunk. Not READS: from no
    state, and what is left goes to `chunks`, the sum of time steps to `times`. READS: from the state in `chunks`.
    """
    wait_for_inputs(DEPENDENT)
    sequence = tl.program_id(2)
    begin = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, DIM_PAD)
    inside, in_state = channel < CHANNELS, number < DIM
    both = inside[:, None] & in_state[None, :]
    of_state = channel[:, None] * DIM + number[None, :]
    length = tl.load(lengths + sequence)
    state = tl.zeros([BLOCK, DIM_PAD], tl.float32)
    if CHUNK is None:
        own = states + tl.load(slots + sequence) * CHANNELS * DIM + of_state
        # Where it begins, what the slot holds is nobody's.
        before = inside[:, None] & (number < tl.where(length > end - begin, DIM, 0))[None, :]
        state = tl.load(own, mask=before, other=0.0)
    else:
        chunk = chunk_of(starts, begin, sequence, CHUNK) + tl.program_id(1)
        begin += tl.program_id(1) * CHUNK
        if begin >= end:
            return
        end = tl.minimum(end, begin + CHUNK)
        at_chunk = chunks + chunk.to(tl.int64) * CHANNELS * DIM + of_state
        if READS:
            state = tl.load(at_chunk, mask=both, other=0.0)
    rates = tl.load(decay + of_state, mask=both, other=0.0) * _LOG2_E
    bias = tl.load(step_bias + channel, mask=inside, other=0.0)
    through = tl.load(skip + channel, mask=inside, other=0.0)
    together = tl.zeros([BLOCK], tl.float32)
    # The next row is on its way while one is computed.
    row = projected + begin.to(tl.int64) * stride
    x, b, step, gate, c = _row(row, channel, inside, number, in_state, CHANNELS, DIM, READS)
    to = out + begin.to(tl.int64) * out_stride + channel
    for at in tl.range(begin, end):
        row += tl.where(at + 1 < end, stride, 0)  # the last one is read twice
        following = _row(row, channel, inside, number, in_state, CHANNELS, DIM, READS)
        time = softplus(step.to(tl.float32) + bias)
        wide = x.to(tl.float32)
        written = (time * wide)[:, None] * b.to(tl.float32)[None, :]
        state = tl.exp2(time[:, None] * rates) * state + written
        if READS:
            tl.store(to, _read(state, wide, gate, c, through).to(out.dtype.element_ty), mask=inside)
        else:
            together += time
        to += out_stride
        x, b, step, gate, c = following
    if CHUNK is None:
        left = inside[:, None] & (number < tl.where(length > 0, DIM, 0))[None, :]
        tl.store(own, state, mask=left)  # nothing is left behind a padding row
    elif not READS:
        tl.store(at_chunk, state, mask=both)
        tl.store(times + chunk.to(tl.int64) * CHANNELS + channel, together, mask=inside)


@triton.jit
def chunk_of(starts, begin, sequence, CHUNK: tl.constexpr):
    """Where a sequence's first chunk lies among all: as each sequence has at most one chunk more than whole ones."""
    return (begin - tl.load(starts)) // CHUNK + sequence


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths"])
def hand_on_kernel(
    decay,
    states,
    slots,
    starts,
    lengths,
    chunks,
    times,
    CHANNELS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (blocks of numbers of states, sequences). What a chunk makes of no state is replaced by the state before
    it, and the state behind the last one goes to the sequence's slot."""
    wait_for_inputs(DEPENDENT)
    sequence = tl.program_id(1)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    first = chunk_of(starts, begin, sequence, CHUNK)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < CHANNELS * DIM
    own = states + tl.load(slots + sequence) * CHANNELS * DIM + number
    held = tl.where(tl.load(lengths + sequence) > count, CHANNELS * DIM, 0)
    state = tl.load(own, mask=number < held, other=0.0)
    rate = tl.load(decay + number, mask=inside, other=0.0) * _LOG2_E
    at = chunks + first.to(tl.int64) * CHANNELS * DIM + number
    of_time = times + first.to(tl.int64) * CHANNELS + number // DIM
    for _ in tl.range(0, tl.cdiv(count, CHUNK)):
        made = tl.load(at, mask=inside, other=0.0)
        time = tl.load(of_time, mask=inside, other=0.0)
        tl.store(at, state, mask=inside)
        state = tl.exp2(time * rate) * state + made
        at += CHANNELS * DIM
        of_time += CHANNELS
    tl.store(own, state, mask=inside)


def select(projected: Tensor, space: SelectiveSpace, states: Tensor, meta: BatchMeta, rows: StateRows) -> Tensor:
    """projected [n, 3 * C + 2 * N] → [n, C] in its dtype, as `StateOps.mix` has it; computed in float32. `states`
    [slots, C, 1, N] are those behind the rows then. A row whose context is 0 leaves nothing. Nothing is read from the
    device."""
    assert projected.stride(1) == 1, "a row's elements lie together"
    assert states.is_contiguous(), "so do those of a slot"
    channels, _ = space.decay.shape
    out = torch.empty(len(projected), channels, dtype=projected.dtype, device=projected.device)
    decodes, sequences = meta.num_decodes, meta.num_decodes + len(meta.prefills)
    if decodes:
        _launch(projected, space, states, meta, rows, out, slice(0, decodes))
    if meta.prefills:
        prompts = slice(decodes, sequences)
        counts = [count for count, _ in meta.prefills]
        if max(counts) <= CHUNK:
            _launch(projected, space, states, meta, rows, out, prompts)
        else:
            _scan(projected, space, states, meta, rows, out, prompts, counts)
    return out


def _scan(
    projected: Tensor,
    space: SelectiveSpace,
    states: Tensor,
    meta: BatchMeta,
    rows: StateRows,
    out: Tensor,
    sequences: slice,
    counts: list[int],
) -> None:
    """Prompts of these `counts` by chunks."""
    channels, dim = space.decay.shape
    most = sum(counts) // CHUNK + len(counts)
    chunks = torch.empty(most, channels, dim, dtype=torch.float32, device=out.device)
    times = torch.empty(most, channels, dtype=torch.float32, device=out.device)
    longest = triton.cdiv(max(counts), CHUNK)
    _launch(projected, space, states, meta, rows, out, sequences, (chunks, times), longest, reads=False)
    hand_on_kernel[(triton.cdiv(channels * dim, BLOCK), len(counts))](
        *(space.decay, states, rows.slots[sequences], meta.query_starts[sequences.start :]),
        *(meta.context_lens[sequences], chunks, times),
        CHANNELS=channels,
        DIM=dim,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        num_warps=4,
        **launch_options(out.device),
    )
    _launch(projected, space, states, meta, rows, out, sequences, (chunks, times), longest)


def _launch(
    projected: Tensor,
    space: SelectiveSpace,
    states: Tensor,
    meta: BatchMeta,
    rows: StateRows,
    out: Tensor,
    sequences: slice,
    cut: tuple[Tensor, Tensor] | None = None,
    chunks: int = 1,
    *,
    reads: bool = True,
) -> None:
    """One pass over the rows of these sequences."""
    channels, dim = space.decay.shape
    handed_on = (states, states) if cut is None else cut
    selective_kernel[(triton.cdiv(channels, CHANNELS_OF_PROGRAM), chunks, sequences.stop - sequences.start)](
        *(projected, space.decay, space.skip, space.step_bias, states),
        *(rows.slots[sequences], meta.query_starts[sequences.start :], meta.context_lens[sequences]),
        *(*handed_on, out, projected.stride(0), out.stride(0)),
        CHANNELS=channels,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        BLOCK=CHANNELS_OF_PROGRAM,
        CHUNK=None if cut is None else CHUNK,
        READS=reads,
        num_warps=1,
        **launch_options(projected.device),
    )
