"""State-space layers in PyTorch, on any device: decodes by one step of the recurrence, prompts by chunks.

Within a chunk what tokens make of each other is a masked product, as in attention; only from chunk to chunk a state is
handed on ("SSD": Dao and Gu, arXiv:2405.21060, section 6). All chunks of all prompts of a step are computed together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import BatchMeta, StateCache, StateRows, StateSpace
from services.worker.ops.transfer import to_device

CHUNK = 64
"""Tokens of a chunk: work within chunks grows with it, and the number of states that are handed on shrinks."""


class TorchStates:
    """See :class:`services.worker.ops.interface.StateOps`. Computes in float32."""

    def __init__(self) -> None:
        self._prompts: tuple[StateRows, _Prompts] | None = None

    def mix(self, projected: Tensor, space: StateSpace, cache: StateCache, meta: BatchMeta) -> Tensor:
        """In the dtype of `projected`."""
        assert meta.states is not None, "a model with states has them in every step"
        inner, channels = space.heads * space.head_dim, space.conv_weight.shape[1]
        gate, inputs, steps = torch.split(projected.float(), [inner, channels, space.heads], dim=1)
        steps = F.softplus(steps + space.step_bias)
        decodes = meta.num_decodes
        parts = []
        if decodes:
            parts.append(_decode(inputs[:decodes], steps[:decodes], space, cache, meta.states))
        if meta.prefills:
            prompts = self._laid_out(meta.states, meta, space.conv_weight.shape[0])
            parts.append(_prefill(inputs[decodes:], steps[decodes:], space, cache, prompts))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _gated_norm(mixed.flatten(1), gate, space).to(projected.dtype)

    def _laid_out(self, states: StateRows, meta: BatchMeta, kernel: int) -> _Prompts:
        """The same for all layers of a step, which have the same `states`."""
        if self._prompts is None or self._prompts[0] is not states:
            self._prompts = states, _prompts(states.slots[meta.num_decodes :], meta.prefills, kernel)
        return self._prompts[1]


class _Prompts(NamedTuple):
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
    turns: tuple[int, ...]
    """How many prompts have a first chunk, a second one, and so on. Chunks lie in this order: all first ones, then all
    second ones."""


def _prompts(slots: Tensor, prefills: tuple[tuple[int, int], ...], kernel: int) -> _Prompts:
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
    return _Prompts(
        slots=slots.index_select(0, to_device(order, device)),
        goes_on=to_device(goes_on, device),
        before=to_device(starts[:, None] + window, device),
        rows=to_device(places, device),
        after=to_device((starts + counts)[:, None] + window, device),
        in_chunks=to_device(in_chunks.ravel(), device),
        from_chunks=to_device(from_chunks[:rows], device),
        turns=turns,
    )


def _decode(inputs: Tensor, steps: Tensor, space: StateSpace, cache: StateCache, states: StateRows) -> Tensor:
    """One row of each sequence: inputs [B, C] and steps [B, H] → [B, H, P]."""
    rows = len(inputs)
    slots = states.slots[:rows]
    window, state = cache.windows.index_select(0, slots), cache.states.index_select(0, slots)
    if states.begins is not None:
        window.masked_fill_(states.begins.view(-1, 1, 1), 0.0)
        state.masked_fill_(states.begins.view(-1, 1, 1, 1), 0.0)
    window = torch.cat((window, inputs.unsqueeze(1)), dim=1)
    cache.windows.index_copy_(0, slots, window[:, 1:])
    x, b, c = _split(F.silu((window * space.conv_weight).sum(1).add_(space.conv_bias)), space)
    state.mul_(torch.exp(steps * space.decay)[..., None, None])
    grouped = state.view(rows, space.groups, -1, space.state_dim)
    grouped.addcmul_((x * steps.unsqueeze(2)).view(rows, space.groups, -1, 1), b.unsqueeze(2))
    cache.states.index_copy_(0, slots, state)
    return torch.matmul(grouped, c.unsqueeze(3)).view(x.shape).addcmul_(x, space.skip.unsqueeze(1))


def _prefill(inputs: Tensor, steps: Tensor, space: StateSpace, cache: StateCache, prompts: _Prompts) -> Tensor:
    """All rows of prompts: inputs [m, C] and steps [m, H] → [m, H, P]."""
    x, b, c = _split(_convolved(inputs, space, cache, prompts), space)
    state = cache.states.index_select(0, prompts.slots)
    state = torch.where(prompts.goes_on.view(-1, 1, 1, 1) > 0, state, 0.0)
    chunks = _Chunks.of(x, b, c, steps, space, prompts)
    mixed = chunks.within() + chunks.from_before(state, prompts.turns)
    cache.states.index_copy_(0, prompts.slots, state)
    # [chunks, G, heads of a group * P, places] → rows
    flat = mixed.view(len(mixed), space.heads, space.head_dim, CHUNK).permute(0, 3, 1, 2).flatten(0, 1)
    return flat.index_select(0, prompts.from_chunks).addcmul_(x, space.skip.unsqueeze(1))


def _convolved(inputs: Tensor, space: StateSpace, cache: StateCache, prompts: _Prompts) -> Tensor:
    """[m, C] through the convolution and a SiLU; the windows are those behind the last rows then."""
    (kernel, channels), rows = space.conv_weight.shape, len(inputs)
    windows = torch.where(prompts.goes_on.view(-1, 1, 1) > 0, cache.windows.index_select(0, prompts.slots), 0.0)
    line = inputs.new_empty(rows + windows.shape[0] * (kernel - 1), channels)
    line.index_copy_(0, prompts.before.flatten(), windows.flatten(0, 1))
    line.index_copy_(0, prompts.rows, inputs)
    cache.windows.index_copy_(0, prompts.slots, line.index_select(0, prompts.after.flatten()).view(windows.shape))
    ends = len(line) - kernel + 1
    summed = line[:ends] * space.conv_weight[0]
    for place in range(1, kernel):
        summed.addcmul_(line[place : ends + place], space.conv_weight[place])
    return F.silu(summed.index_select(0, prompts.rows - (kernel - 1)).add_(space.conv_bias))


class _Chunks(NamedTuple):
    """What all chunks read and write. Q is CHUNK, R a group's heads times P."""

    inputs: Tensor
    """[chunks, G, R, Q] each head's input times its time step."""
    b: Tensor
    """[chunks, G, Q, N]"""
    c: Tensor
    """[chunks, G, N, Q]"""
    decays: Tensor
    """[chunks, H, Q] the logarithm of what is left of a state behind each place; it falls."""
    head_dim: int

    @classmethod
    def of(cls, x: Tensor, b: Tensor, c: Tensor, steps: Tensor, space: StateSpace, prompts: _Prompts) -> _Chunks:
        """Places without a row have a time step of 0: they write nothing, and nothing is lost there."""
        places, count = prompts.in_chunks, len(prompts.in_chunks) // CHUNK

        def chunked(rows: Tensor) -> Tensor:
            """[m, …] → [chunks, Q, …]"""
            padded = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
            return padded.index_select(0, places).view(count, CHUNK, *rows.shape[1:])

        steps = chunked(steps)
        inputs = chunked(x) * steps.unsqueeze(3)
        return cls(
            inputs.permute(0, 2, 3, 1).reshape(count, space.groups, -1, CHUNK),
            chunked(b).transpose(1, 2).contiguous(),
            chunked(c).permute(0, 2, 3, 1).contiguous(),
            (steps * space.decay).transpose(1, 2).cumsum(2),
            space.head_dim,
        )

    def within(self) -> Tensor:
        """[chunks, G, R, Q]: what the places of a chunk read of those before them, and of themselves, in it."""
        chunks, groups = self.b.shape[:2]
        read = torch.matmul(self.b, self.c)  # [chunks, G, from, to]
        # exp of what lies above the diagonal may be anything: -inf before, 0 behind.
        left = (self.decays.unsqueeze(2) - self.decays.unsqueeze(3)).masked_fill_(_backwards(read.device), -torch.inf)
        weights = left.exp_().view(chunks, groups, -1, CHUNK, CHUNK).mul_(read.unsqueeze(2))
        by_head = self.inputs.view(*weights.shape[:3], self.head_dim, CHUNK)
        return torch.matmul(by_head, weights).view(self.inputs.shape)

    def from_before(self, state: Tensor, turns: tuple[int, ...]) -> Tensor:
        """[chunks, G, R, Q]: what they read of the states that the chunks before have left. `state` [S, H, P, N] is
        that before the first chunk of each prompt, and behind its last one in the end."""
        groups, dim = self.b.shape[1], self.b.shape[3]
        whole = self.decays[:, :, -1:]
        ahead = torch.exp(whole - self.decays)
        shape = (*self.decays.shape[:2], self.head_dim, CHUNK)
        written = (self.inputs.view(shape) * ahead.unsqueeze(2)).view(self.inputs.shape)
        added = torch.matmul(written, self.b).view(*shape[:3], dim)
        kept, before, first = whole.exp().unsqueeze(3), torch.empty_like(added), 0
        for prompts in turns:
            before[first : first + prompts] = state[:prompts]
            state[:prompts].mul_(kept[first : first + prompts]).add_(added[first : first + prompts])
            first += prompts
        read = torch.matmul(before.view(len(before), groups, -1, dim), self.c)
        return (read.view(shape) * self.decays.exp().unsqueeze(2)).view(self.inputs.shape)


def _backwards(device: torch.device) -> Tensor:
    """bool [from, to]: places that lie behind who would read them."""
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril_(-1)


def _split(convolved: Tensor, space: StateSpace) -> tuple[Tensor, Tensor, Tensor]:
    """[m, C] → x [m, H, P], B and C [m, G, N]."""
    inner, shared = space.heads * space.head_dim, space.groups * space.state_dim
    x, b, c = torch.split(convolved, [inner, shared, shared], dim=1)
    return (
        x.reshape(-1, space.heads, space.head_dim),
        b.reshape(-1, space.groups, space.state_dim),
        c.reshape(-1, space.groups, space.state_dim),
    )


def _gated_norm(mixed: Tensor, gate: Tensor, space: StateSpace) -> Tensor:
    """[n, H * P] times SiLU(gate), RMS-normed in groups."""
    gated = (mixed * F.silu(gate)).view(len(mixed), space.groups, -1)
    return F.rms_norm(gated, gated.shape[2:], None, space.eps).view(mixed.shape) * space.norm
