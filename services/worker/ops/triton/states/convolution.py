"""The causal convolution before states, of decodes and of prompts, and the windows that it leaves: one launch for each.

Bytes moved, n rows of C channels and a window of K tokens, S sequences: n * C * (itemsize of inputs + of outputs), as
what a program reads again lies in the caches, and 8 * S * (K - 1) * C of windows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import BatchMeta, StateMixer, StateRows
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs

CHANNELS_AT_ONCE = 128
TOKENS_AT_ONCE = 16
"""Of a prompt, in one program."""


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); below -88 the power would overflow, and the quotient is 0 all the same."""
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -88.0)))


@triton.jit
def _inputs_of(inputs, at, there, channels, GATED: tl.constexpr):
    """What is convolved, float32: of a gated convolution the product of its first gate and its input."""
    value = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(inputs + at + 2 * channels, mask=there, other=0.0).to(tl.float32)
    return value


@triton.jit
def _leave_window(
    inputs,
    window,
    channel,
    first,
    count,
    length,
    stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    GATED: tl.constexpr,
):
    """The last inputs behind a sequence's `count` rows; nothing behind a padding row."""
    written = channel < tl.where(length > 0, CHANNELS, 0)
    for place in tl.static_range(KERNEL - 1):
        latest = count + (place - KERNEL + 1)
        at = (first + latest).to(tl.int64) * stride + channel
        new = channel < tl.where(latest >= 0, CHANNELS, 0)
        carried = channel < tl.where((latest < 0) & (length > count), CHANNELS, 0)
        value = _inputs_of(inputs, at, new, CHANNELS, GATED)
        value += tl.load(window + (place + count) * CHANNELS, mask=carried, other=0.0)
        # What moves up is read by all threads before it is overwritten: places rise.
        tl.debug_barrier()
        tl.store(window + place * CHANNELS, value, mask=written)


@triton.jit(
    do_not_specialize=["stride", "out_stride"],
    do_not_specialize_on_alignment=["inputs", "slots", "starts", "lengths", "out"],
)
def convolution_kernel(
    inputs,
    weight,
    bias,
    windows,
    slots,
    starts,
    lengths,
    out,
    stride,
    out_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (blocks of channels, runs of TOKENS rows, sequences). The program of a sequence's first rows, which alone
    reads its window, also writes it."""
    wait_for_inputs(DEPENDENT)
    sequence = tl.program_id(2)
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    begin = tl.program_id(1) * TOKENS
    if begin >= count:
        return
    length = tl.load(lengths + sequence)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    held = channel < tl.where(length > count, CHANNELS, 0)  # where it begins, what the slot holds is nobody's
    own = windows + tl.load(slots + sequence) * (KERNEL - 1) * CHANNELS + channel
    token = begin + tl.arange(0, TOKENS)
    real = (token < count)[:, None] & inside[None, :]
    summed = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL):
        place = token + (tap - KERNEL + 1)
        at = (first + place).to(tl.int64)[:, None] * stride + channel[None, :]
        value = _inputs_of(inputs, at, real & (place >= 0)[:, None], CHANNELS, GATED)
        if tap < KERNEL - 1:
            if begin == 0:
                before = own[None, :] + (place + KERNEL - 1)[:, None] * CHANNELS
                value += tl.load(
                    before, mask=(place < 0)[:, None] & (token < count)[:, None] & held[None, :], other=0.0
                )
        factor = tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0)
        summed += value * factor[None, :]
    summed += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    row = (first + token).to(tl.int64)[:, None]
    if GATED:
        behind = tl.load(inputs + row * stride + (CHANNELS + channel)[None, :], mask=real, other=0.0)
        summed *= behind.to(tl.float32)
    else:
        summed *= sigmoid(summed)
    tl.store(out + row * out_stride + channel[None, :], summed.to(out.dtype.element_ty), mask=real)
    if begin == 0:
        _leave_window(inputs, own, channel, first, count, length, stride, CHANNELS, KERNEL, GATED)


def convolve(
    inputs: Tensor,
    mixer: StateMixer,
    windows: Tensor,
    meta: BatchMeta,
    states: StateRows,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> Tensor:
    """inputs [n, C], or [n, 3 * C] of a `gated` one, its rows any distance apart → [n, C] in `dtype`, computed in
    float32: through a SiLU, or times the second gate. `windows` [slots, K - 1, C] are those behind the rows then.
    A row whose context is 0 leaves nothing. Nothing is read from the device."""
    kernel, channels = mixer.conv_weight.shape
    assert inputs.stride(1) == 1, "a row's elements lie together"
    assert windows.is_contiguous(), "so do those of a slot"
    out = torch.empty(len(inputs), channels, dtype=dtype, device=inputs.device)
    decodes, blocks = meta.num_decodes, triton.cdiv(channels, CHANNELS_AT_ONCE)
    for first, end, rows in ((0, decodes, 1), (decodes, decodes + len(meta.prefills), TOKENS_AT_ONCE)):
        if first == end:
            continue
        longest = 1 if rows == 1 else max(count for count, _ in meta.prefills)
        convolution_kernel[(blocks, triton.cdiv(longest, rows), end - first)](
            *(inputs, mixer.conv_weight, mixer.conv_bias, windows),
            *(states.slots[first:], meta.query_starts[first:], meta.context_lens[first:], out),
            *(inputs.stride(0), out.stride(0)),
            CHANNELS=channels,
            KERNEL=kernel,
            GATED=gated,
            TOKENS=rows,
            BLOCK=CHANNELS_AT_ONCE,
            num_warps=1 if rows == 1 else 4,
            **launch_options(inputs.device),
        )
    return out
