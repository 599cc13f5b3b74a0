"""Decodes of state spaces (Mamba-2) and gated delta nets: one token's step of the recurrence, one launch for all.

A program has some of a head's elements, whose states nobody else reads. Bytes moved, S sequences of H heads with P
elements, each with a state of N numbers: 8 * S * H * P * N.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import BatchMeta, DeltaNet, StateRows, StateSpace
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.states.convolution import sigmoid
from services.worker.ops.triton.states.selective import softplus

_NUMBERS_AT_ONCE = 4096
_LENGTH_EPS = tl.constexpr(1e-6)
"""As `torch_mixers.delta` has it."""


@triton.jit
def _unit(row):
    """A row of length 1, but for one of nearly none."""
    return row * tl.rsqrt(tl.sum(row * row, 0) + _LENGTH_EPS)


@triton.jit
def _left(steps, step_bias, decay, lower_bound, number, in_state, BOUNDED: tl.constexpr):
    """The share of each element of a head's keys that is left of the state after a token."""
    times = tl.load(steps + number, mask=in_state, other=0.0).to(tl.float32)
    times += tl.load(step_bias + number, mask=in_state, other=0.0)
    if BOUNDED:
        times = lower_bound * sigmoid(-times * tl.load(decay))
    else:
        times = softplus(times) * tl.load(decay)
    return tl.exp(times)


@triton.jit(
    do_not_specialize=["steps_stride", "root", "most_written", "lower_bound"],
    do_not_specialize_on_alignment=["steps", "slots", "lengths"],
)
def one_token_kernel(
    seen,
    steps,
    decay,
    step_bias,
    skip,
    states,
    slots,
    lengths,
    out,
    steps_stride,
    root,
    most_written,
    lower_bound,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
    EVEN: tl.constexpr,
    BY_ELEMENT: tl.constexpr,
    BOUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (blocks of a head's elements, heads, sequences). EVEN: time steps are 1; BY_ELEMENT: those of a head's keys'
    elements are each another; BOUNDED: what is left of one has a lower bound."""
    wait_for_inputs(DEPENDENT)
    head, sequence = tl.program_id(1), tl.program_id(2)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, STATE_PAD)
    inside, in_state = element < DIM, number < STATE
    length = tl.load(lengths + sequence)
    own = states + (tl.load(slots + sequence) * HEADS + head) * DIM * STATE
    own += element[:, None] * STATE + number[None, :]
    # Where it begins, what the slot holds is nobody's.
    held = inside[:, None] & (number < tl.where(length > 1, STATE, 0))[None, :]
    state = tl.load(own, mask=held, other=0.0)
    row = seen + sequence.to(tl.int64) * (HEADS * DIM + 2 * GROUPS * STATE)
    x = tl.load(row + head * DIM + element, mask=inside, other=0.0)
    group = row + HEADS * DIM + head // (HEADS // GROUPS) * STATE + number
    b = tl.load(group, mask=in_state, other=0.0)
    c = tl.load(group + GROUPS * STATE, mask=in_state, other=0.0)
    step = steps + sequence.to(tl.int64) * steps_stride + head
    time = 1.0
    if BY_ELEMENT:
        bias = step_bias + head * STATE
        state *= _left(step + head * (STATE - 1), bias, decay + head, lower_bound, number, in_state, BOUNDED)[None, :]
        step += HEADS * (STATE - 1)
    else:
        if not EVEN:
            time = softplus(tl.load(step).to(tl.float32) + tl.load(step_bias + head))
        state *= tl.exp(time * tl.load(decay + head))
    if DELTA:
        b, c = _unit(b), _unit(c) * root
        rate = sigmoid(tl.load(step + HEADS).to(tl.float32)) * most_written
        written = (x - tl.sum(state * b[None, :], 1)) * rate
        state += written[:, None] * b[None, :]
        read = tl.sum(state * c[None, :], 1)
    else:
        state += (x * time)[:, None] * b[None, :]
        read = tl.sum(state * c[None, :], 1) + x * tl.load(skip + head)
    tl.store(out + (sequence.to(tl.int64) * HEADS + head) * DIM + element, read, mask=inside)
    left = inside[:, None] & (number < tl.where(length > 0, STATE, 0))[None, :]
    tl.store(own, state, mask=left)  # nothing is left behind a padding row


def elements_at_once(state_dim: int) -> int:
    """Of a head, in one program."""
    return max(1, _NUMBERS_AT_ONCE // int(triton.next_power_of_2(state_dim)))


def step_decodes(
    seen: Tensor, steps: Tensor, mixer: StateSpace | DeltaNet, states: Tensor, meta: BatchMeta, rows: StateRows
) -> Tensor:
    """The decodes of a step: seen float32 [n, C], what the convolution gives, and steps [n, H], [n, 2 * H] or
    [n, H * N + H], as they are projected, rows any distance apart → float32 [num_decodes, H, P] that is yet to be gated
    and normed. `states` [slots, H, P, N] go on. A row whose context is 0 leaves nothing. Nothing is read from the
    device."""
    assert seen.is_contiguous(), "rows are contiguous"
    assert steps.stride(1) == 1, "rows are contiguous"
    assert states.is_contiguous(), "a head's numbers lie together"
    decodes, block = meta.num_decodes, min(elements_at_once(mixer.state_dim), triton.next_power_of_2(mixer.head_dim))
    out = torch.empty(decodes, mixer.heads, mixer.head_dim, dtype=torch.float32, device=seen.device)
    delta = isinstance(mixer, DeltaNet)
    one_token_kernel[(triton.cdiv(mixer.head_dim, block), mixer.heads, decodes)](
        *(seen, steps, mixer.decay, mixer.step_bias, mixer.decay if isinstance(mixer, DeltaNet) else mixer.skip),
        *(states, rows.slots, meta.context_lens, out, steps.stride(0), mixer.state_dim**-0.5),
        mixer.most_written if isinstance(mixer, DeltaNet) else 0.0,
        (mixer.lower_bound or 0.0) if isinstance(mixer, DeltaNet) else 0.0,
        HEADS=mixer.heads,
        GROUPS=mixer.groups,
        DIM=mixer.head_dim,
        STATE=mixer.state_dim,
        STATE_PAD=triton.next_power_of_2(mixer.state_dim),
        BLOCK=block,
        DELTA=delta,
        EVEN=isinstance(mixer, StateSpace) and mixer.lightning,
        BY_ELEMENT=isinstance(mixer, DeltaNet) and mixer.by_element,
        BOUNDED=isinstance(mixer, DeltaNet) and mixer.lower_bound is not None,
        num_warps=4,
        **launch_options(seen.device),
    )
    return out
