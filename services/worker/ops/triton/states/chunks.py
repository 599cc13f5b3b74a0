"""States from chunk to chunk of prompts: the part of state spaces' and gated delta nets' prompts that goes in order, in
one launch for all chunks of all prompts. What chunks are made of is computed by PyTorch, for all of them together.

A program goes through the chunks of one prompt with some of a head's states, whose rows are independent of each other.
Bytes moved for each chunk of a head with P elements, each with a state of N numbers: 8 * P * N of a state space; of a
delta net 4 * (P / BLOCK * Q * (3 * N + Q) + 2 * Q * P) with Q rows, most of them from the caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.torch_mixers.convolution import CHUNK, Prompts
from services.worker.ops.torch_mixers.delta import DeltaChunks
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.products import dot

NUMBERS_AT_ONCE = 1024
ELEMENTS_AT_ONCE = 32
"""Of a head of a delta net, in one program."""
COLUMNS_AT_ONCE = 32
DELTA_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["turn_starts", "chunk_counts"])
def hand_on_chunks_kernel(
    states,
    decay_factors,
    added,
    turn_starts,
    chunk_counts,
    HEADS: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (blocks of a head's numbers, heads, prompts). What a chunk adds is replaced by the state before it."""
    wait_for_inputs(DEPENDENT)
    head, prompt = tl.program_id(1), tl.program_id(2)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < NUMBERS
    own = states + (prompt.to(tl.int64) * HEADS + head) * NUMBERS + number
    state = tl.load(own, mask=inside, other=0.0)
    turn = turn_starts
    for _ in tl.range(0, tl.load(chunk_counts + prompt)):
        of_head = (tl.load(turn) + prompt).to(tl.int64) * HEADS + head
        at = added + of_head * NUMBERS + number
        more = tl.load(at, mask=inside, other=0.0)
        tl.store(at, state, mask=inside)
        state = state * tl.load(decay_factors + of_head) + more
        turn += 1
    tl.store(own, state, mask=inside)


def hand_on(decay_factors: Tensor, added: Tensor, state: Tensor, prompts: Prompts) -> Tensor:
    """See `torch_mixers.states.HandingOn`. In the place of `added`."""
    heads, numbers = state.shape[1], state.shape[2] * state.shape[3]
    assert added.is_contiguous(), "states lie one after the other"
    assert state.is_contiguous(), "so do those that go on"
    hand_on_chunks_kernel[(triton.cdiv(numbers, NUMBERS_AT_ONCE), heads, len(state))](
        *(state, decay_factors.contiguous(), added, prompts.turn_starts, prompts.chunk_counts),
        HEADS=heads,
        NUMBERS=numbers,
        BLOCK=NUMBERS_AT_ONCE,
        num_warps=4,
        **launch_options(state.device),
    )
    return added


@triton.jit
def _columns_of(matrix, at, row, column, WIDTH: tl.constexpr):
    """Columns of one head's matrix [rows, WIDTH] of a chunk; zeros beyond it."""
    from_row = matrix + at * row.shape[0] * WIDTH + row[:, None] * WIDTH
    there = (row >= 0)[:, None] & (column < WIDTH)[None, :]
    return tl.load(from_row + column[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["turn_starts", "chunk_counts"])
def delta_chunks_kernel(
    states,
    values,
    forgotten,
    reading,
    within,
    writing,
    left,
    out,
    turn_starts,
    chunk_counts,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERS: tl.constexpr,
    BY_ELEMENT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (blocks of a head's elements, heads, prompts); see `DeltaChunks`, whose chunks have ROWS places. States stay
    in memory, as do the factors that they meet, of which NUMBERS columns are looked at together: whole ones are more
    than registers hold."""
    wait_for_inputs(DEPENDENT)
    head, prompt = tl.program_id(1), tl.program_id(2)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, numbers = tl.arange(0, ROWS), tl.arange(0, NUMBERS)
    inside = (row >= 0)[:, None] & (element < DIM)[None, :]
    own = states + (prompt.to(tl.int64) * HEADS + head) * DIM * STATE + element[:, None] * STATE
    turn = turn_starts
    for _ in tl.range(0, tl.load(chunk_counts + prompt), num_stages=1):
        at = (tl.load(turn) + prompt).to(tl.int64) * HEADS + head
        of_values = at * ROWS * DIM + row[:, None] * DIM + element[None, :]
        known, read = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
        for first in tl.range(0, STATE, NUMBERS, num_stages=1):
            number = first + numbers
            both = (element < DIM)[:, None] & (number < STATE)[None, :]
            state = tl.trans(tl.load(own + number[None, :], mask=both, other=0.0))
            known = dot(_columns_of(forgotten, at, row, number, STATE), state, known)
            read = dot(_columns_of(reading, at, row, number, STATE), state, read)
        written = tl.load(values + of_values, mask=inside, other=0.0) - known
        read = dot(_columns_of(within, at, row, row, ROWS), written, read)
        tl.store(out + of_values, read, mask=inside)
        written = tl.trans(written)
        if not BY_ELEMENT:
            decay_factor = tl.load(left + at)
        tl.debug_barrier()  # all threads have read the states that are now written
        for first in tl.range(0, STATE, NUMBERS, num_stages=1):
            number = first + numbers
            both = (element < DIM)[:, None] & (number < STATE)[None, :]
            if BY_ELEMENT:
                decay_factor = tl.load(left + at * STATE + number, mask=number < STATE, other=0.0)[None, :]
            state = tl.load(own + number[None, :], mask=both, other=0.0) * decay_factor
            state = dot(written, _columns_of(writing, at, row, number, STATE), state)
            tl.debug_barrier()
            tl.store(own + number[None, :], state, mask=both)
        tl.debug_barrier()  # and all have written what is read next
        turn += 1


def scan_delta(chunks: DeltaChunks, state: Tensor, prompts: Prompts) -> Tensor:
    """See `DeltaChunks.scan`."""
    (_, heads, rows, dim), state_dim = chunks.values.shape, state.shape[3]
    assert rows == CHUNK, "whole chunks"
    assert state.is_contiguous(), "states lie one after the other"
    out = torch.empty(chunks.values.shape, dtype=torch.float32, device=state.device)
    block = min(ELEMENTS_AT_ONCE, max(16, triton.next_power_of_2(dim)))
    delta_chunks_kernel[(triton.cdiv(dim, block), heads, len(state))](
        *(state, *(each.contiguous() for each in chunks), out, prompts.turn_starts, prompts.chunk_counts),
        HEADS=heads,
        DIM=dim,
        STATE=state_dim,
        ROWS=rows,
        BLOCK=block,
        NUMBERS=COLUMNS_AT_ONCE,
        BY_ELEMENT=chunks.left.shape[3] > 1,
        num_warps=DELTA_WARPS,
        num_stages=1,
        **launch_options(state.device),
    )
    return out
