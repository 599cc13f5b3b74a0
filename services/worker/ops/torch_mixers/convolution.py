"""What layers with states have in common in PyTorch: how prompts fall into chunks, and the convolution before heads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.ops.interface import DeltaNet, StateCache, StateMixer, StateRows, StateSpace
from services.worker.ops.transfer import to_device

CHUNK = 64
"""Tokens of a chunk: work within chunks grows with it, and the number of states that are handed on shrinks."""


class Prompts(NamedTuple):
    """How the m rows of a step's S prompts, the longest first, fall into chunks and into the convolution's input. That
    has, for each prompt, K - 1 rows of what was before, then its own. All tensors are on the device."""

    slots: Tensor
    """[S]"""
    goes_on: Tensor
    """float32 [S] 0 where a prompt begins, and what its slot holds is nobody's."""
    before: Tensor
    """[S, K - 1] where in the convolution's input each prompt's window lies."""
    rows: Tensor
    """[m] where each row lies there."""
    after: Tensor
    """[S, K - 1] where the window lies that is left behind each prompt."""
    in_chunks: Tensor
    """[chunks * CHUNK] the row of each place of each chunk; m: none."""
    from_chunks: Tensor
    """[m] the place of each row."""
    turn_starts: Tensor
    """int32 [turns] the first chunk of each turn; that of the prompt that is the n-th here is n behind it."""
    chunk_counts: Tensor
    """int32 [S] chunks of each prompt."""
    turns: tuple[int, ...]
    """How many prompts have a first chunk, a second one, and so on. Chunks lie in this order: all first ones, then all
    second ones."""

    def beginning(self, rows: int) -> Tensor:
        """bool [m]: which of the `rows` begin a sequence."""
        firsts = self.in_chunks.view(-1, CHUNK)[: len(self.slots), 0]
        return self.in_chunks.new_zeros(rows, dtype=torch.bool).index_copy_(0, firsts, self.goes_on == 0)

    def chunked(self, rows: Tensor) -> Tensor:
        """[m, …] → [chunks, CHUNK, …], zeros where a place has no row."""
        padded = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
        return padded.index_select(0, self.in_chunks).view(-1, CHUNK, *rows.shape[1:])


def lay_out(slots: Tensor, prefills: tuple[tuple[int, int], ...], kernel: int) -> Prompts:
    """Prompts of (rows, context length) whose states are in `slots`, for a convolution that sees `kernel` tokens."""
    counts = np.array([count for count, _ in prefills], dtype=np.int64)
    order = np.argsort(-counts, kind="stable")
    firsts = (np.cumsum(counts) - counts)[order]
    goes_on = np.array([float(context > count) for count, context in prefills], dtype=np.float32)[order]
    counts, rows = counts[order], int(counts.sum())
    window = np.arange(kernel - 1)
    starts = np.cumsum(counts) - counts + np.arange(len(counts)) * (kernel - 1)
    places = np.empty(rows, dtype=np.int64)
    turns = tuple(int((counts > turn * CHUNK).sum()) for turn in range(-(-int(counts[0]) // CHUNK)))
    chunk_of_turn = np.cumsum((0, *turns))
    in_chunks = np.full((int(chunk_of_turn[-1]), CHUNK), rows, dtype=np.int64)
    for number, (first, count, start) in enumerate(zip(firsts.tolist(), counts.tolist(), starts.tolist(), strict=True)):
        places[first : first + count] = start + kernel - 1 + np.arange(count)
        for turn in range(-(-count // CHUNK)):
            held = min(CHUNK, count - turn * CHUNK)
            in_chunks[chunk_of_turn[turn] + number, :held] = first + turn * CHUNK + np.arange(held)
    from_chunks = np.empty(rows + 1, dtype=np.int64)
    from_chunks[in_chunks.ravel()] = np.arange(in_chunks.size)
    device = slots.device
    return Prompts(
        slots=slots.index_select(0, to_device(order, device)),
        goes_on=to_device(goes_on, device),
        before=to_device(starts[:, None] + window, device),
        rows=to_device(places, device),
        after=to_device((starts + counts)[:, None] + window, device),
        in_chunks=to_device(in_chunks.ravel(), device),
        from_chunks=to_device(from_chunks[:rows], device),
        turn_starts=to_device(chunk_of_turn[:-1].astype(np.int32), device),
        chunk_counts=to_device((-(-counts // CHUNK)).astype(np.int32), device),
        turns=turns,
    )


def convolve_decodes(inputs: Tensor, mixer: StateMixer, cache: StateCache, states: StateRows) -> Tensor:
    """One row of each sequence, [B, C], through the convolution; the windows are those behind them then. By the same
    operations as rows of prompts, in the same order."""
    slots = states.slots[: len(inputs)]
    window = cache.windows.index_select(0, slots)
    if states.begins is not None:
        window.masked_fill_(states.begins.view(-1, 1, 1), 0.0)
    window = torch.cat((window, inputs.unsqueeze(1)), dim=1)
    cache.windows.index_copy_(0, slots, window[:, 1:])
    summed = window[:, 0] * mixer.conv_weight[0]
    for place in range(1, window.shape[1]):
        summed.addcmul_(window[:, place], mixer.conv_weight[place])
    return summed.add_(mixer.conv_bias)


def states_of_decodes(cache: StateCache, rows: int, states: StateRows) -> Tensor:
    """[rows, H, P, N] a copy of the states that decodes go on with."""
    state = cache.states.index_select(0, states.slots[:rows])
    return state if states.begins is None else state.masked_fill_(states.begins.view(-1, 1, 1, 1), 0.0)


def states_of_prompts(cache: StateCache, prompts: Prompts) -> Tensor:
    """[S, H, P, N] a copy of the states that prompts go on with."""
    return torch.where(prompts.goes_on.view(-1, 1, 1, 1) > 0, cache.states.index_select(0, prompts.slots), 0.0)


def convolve_prompts(inputs: Tensor, mixer: StateMixer, cache: StateCache, prompts: Prompts) -> Tensor:
    """[m, C] through the convolution; the windows are those behind the last rows then."""
    (kernel, channels), rows = mixer.conv_weight.shape, len(inputs)
    windows = torch.where(prompts.goes_on.view(-1, 1, 1) > 0, cache.windows.index_select(0, prompts.slots), 0.0)
    line = inputs.new_empty(rows + windows.shape[0] * (kernel - 1), channels)
    line.index_copy_(0, prompts.before.flatten(), windows.flatten(0, 1))
    line.index_copy_(0, prompts.rows, inputs)
    cache.windows.index_copy_(0, prompts.slots, line.index_select(0, prompts.after.flatten()).view(windows.shape))
    ends = len(line) - kernel + 1
    summed = line[:ends] * mixer.conv_weight[0]
    for place in range(1, kernel):
        summed.addcmul_(line[place : ends + place], mixer.conv_weight[place])
    return summed.index_select(0, prompts.rows - (kernel - 1)).add_(mixer.conv_bias)


class Channels(NamedTuple):
    """What the convolution gives, by what it is for: in a delta net values, keys and queries."""

    x: Tensor
    """[m, H, P]"""
    b: Tensor
    """[m, G, N]"""
    c: Tensor
    """[m, G, N]"""


def split_channels(convolved: Tensor, mixer: StateSpace | DeltaNet) -> Channels:
    """Of [m, C]."""
    inner, shared = mixer.heads * mixer.head_dim, mixer.groups * mixer.state_dim
    x, b, c = torch.split(convolved, [inner, shared, shared], dim=1)
    return Channels(
        x.reshape(-1, mixer.heads, mixer.head_dim),
        b.reshape(-1, mixer.groups, mixer.state_dim),
        c.reshape(-1, mixer.groups, mixer.state_dim),
    )


def backwards(device: torch.device) -> Tensor:
    """bool [from, to]: places that lie behind who would read them."""
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril_(-1)
