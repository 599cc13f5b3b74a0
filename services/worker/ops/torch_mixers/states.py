"""Layers with states in PyTorch, on any device: decodes by one step of their recurrence, prompts by chunks.

A state space, within a chunk: what tokens make of each other is a masked product, as in attention; only from chunk to
chunk a state is handed on ("SSD": Dao and Gu, arXiv:2405.21060, section 6). All chunks of all prompts of a step are
computed together. Gated delta nets: `delta`; Mamba-1 and recurrent units: `selective`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import (
    BatchMeta,
    DeltaNet,
    RecurrentUnit,
    SelectiveSpace,
    ShortConvolution,
    StateCache,
    StateMixer,
    StateRows,
    StateSpace,
)
from services.worker.ops.torch_mixers.convolution import (
    CHUNK,
    Channels,
    Prompts,
    backwards,
    convolve_decodes,
    convolve_prompts,
    lay_out,
    split_channels,
    states_of_decodes,
    states_of_prompts,
)
from services.worker.ops.torch_mixers.delta import DeltaRule
from services.worker.ops.torch_mixers.selective import RecurrentRows, SelectiveRows


class TorchStates:
    """See :class:`services.worker.ops.interface.StateOps`. Computes in float32."""

    def __init__(self) -> None:
        self._prompts: tuple[StateRows, dict[int, Prompts]] | None = None

    def mix(self, projected: Tensor, mixer: StateMixer, cache: StateCache, meta: BatchMeta) -> Tensor:
        """In the dtype of `projected`."""
        assert meta.states is not None, "a model with states has them in every step"
        if isinstance(mixer, ShortConvolution):
            return self._convolved(projected, mixer, cache, meta, meta.states)
        if isinstance(mixer, SelectiveSpace):
            return self._selected(projected, mixer, cache, meta, meta.states)
        if isinstance(mixer, RecurrentUnit):
            return self._recurred(projected, mixer, cache, meta, meta.states)
        rule = DeltaRule(mixer) if isinstance(mixer, DeltaNet) else StateSpaceRecurrence(mixer)
        gates, channels = mixer.gates, mixer.conv_weight.shape[1]
        gate, inputs, steps = projected.float().tensor_split([gates, gates + channels], dim=1)
        decodes, parts = meta.num_decodes, []
        if decodes:
            seen = split_channels(F.silu(convolve_decodes(inputs[:decodes], mixer, cache, meta.states)), mixer)
            state = states_of_decodes(cache, decodes, meta.states)
            parts.append(rule.step(seen, steps[:decodes], state))
            cache.states.index_copy_(0, meta.states.slots[:decodes], state)
        if meta.prefills:
            prompts = self._laid_out(meta.states, meta, mixer.conv_weight.shape[0])
            seen = split_channels(F.silu(convolve_prompts(inputs[decodes:], mixer, cache, prompts)), mixer)
            state = states_of_prompts(cache, prompts)
            parts.append(rule.scan(seen, steps[decodes:], state, prompts))
            cache.states.index_copy_(0, prompts.slots, state)
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rule.normed(mixed, gate).to(projected.dtype)

    def _convolved(
        self, projected: Tensor, mixer: ShortConvolution, cache: StateCache, meta: BatchMeta, states: StateRows
    ) -> Tensor:
        inputs, behind, decodes, parts = projected.float(), None, meta.num_decodes, []
        if mixer.gated:
            before, behind, x = inputs.chunk(3, dim=1)
            inputs = before * x
        if decodes:
            parts.append(convolve_decodes(inputs[:decodes], mixer, cache, states))
        if meta.prefills:
            prompts = self._laid_out(states, meta, mixer.conv_weight.shape[0])
            parts.append(convolve_prompts(inputs[decodes:], mixer, cache, prompts))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (F.silu(mixed) if behind is None else mixed.mul_(behind)).to(projected.dtype)

    def _selected(
        self, projected: Tensor, space: SelectiveSpace, cache: StateCache, meta: BatchMeta, states: StateRows
    ) -> Tensor:
        rows, decodes, parts = SelectiveRows.of(projected.float(), space), meta.num_decodes, []
        if decodes:
            state = states_of_decodes(cache, decodes, states).squeeze(2)
            parts.append(rows.part(0, decodes).step(state))
            cache.states.index_copy_(0, states.slots[:decodes], state.unsqueeze(2))
        if meta.prefills:
            prompts = self._laid_out(states, meta, space.conv_weight.shape[0])
            state = states_of_prompts(cache, prompts).squeeze(2)
            parts.append(rows.part(decodes, len(projected)).scan(state, prompts))
            cache.states.index_copy_(0, prompts.slots, state.unsqueeze(2))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(projected.dtype)

    def _recurred(
        self, projected: Tensor, unit: RecurrentUnit, cache: StateCache, meta: BatchMeta, states: StateRows
    ) -> Tensor:
        given, decodes, parts = projected.float(), meta.num_decodes, []
        if decodes:
            rows = RecurrentRows.of(given[:decodes], unit, states.begins)
            state = rows.step(states_of_decodes(cache, decodes, states).flatten(1))
            cache.states.index_copy_(0, states.slots[:decodes], state.view(decodes, -1, 1, 1))
            parts.append(state)
        if meta.prefills:
            prompts = self._laid_out(states, meta, unit.conv_weight.shape[0])
            state = states_of_prompts(cache, prompts).flatten(1)
            rows = RecurrentRows.of(given[decodes:], unit, prompts.beginning(len(given) - decodes))
            parts.append(rows.scan(state, prompts))
            cache.states.index_copy_(0, prompts.slots, state.view(len(state), -1, 1, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(projected.dtype)

    def _laid_out(self, states: StateRows, meta: BatchMeta, kernel: int) -> Prompts:
        """The same for all layers of a step with such a kernel, which have the same `states`."""
        if self._prompts is None or self._prompts[0] is not states:
            self._prompts = states, {}
        found = self._prompts[1]
        if kernel not in found:
            found[kernel] = lay_out(states.slots[meta.num_decodes :], meta.prefills, kernel)
        return found[kernel]


HandingOn = Callable[[Tensor, Tensor, Tensor, Prompts], Tensor]
"""How much of a state each chunk leaves [chunks, H, 1, 1], what it adds to it [chunks, H, P, N], the states of the S
prompts [S, H, P, N], which go on → the state before each chunk."""


def hand_on_in_turns(kept: Tensor, added: Tensor, state: Tensor, prompts: Prompts) -> Tensor:
    """See `HandingOn`; three operations for each turn."""
    before, first = torch.empty_like(added), 0
    for count in prompts.turns:
        turn = slice(first, first + count)
        before[turn] = state[:count]
        state[:count].mul_(kept[turn]).add_(added[turn])
        first += count
    return before


class StateSpaceRecurrence(NamedTuple):
    """How a state space goes on."""

    space: StateSpace

    def step(self, seen: Channels, steps: Tensor, state: Tensor) -> Tensor:
        """One row of each sequence: steps [B, H], as they are projected → [B, H, P]. `state` [B, H, P, N] goes on."""
        (x, b, c), space, steps = seen, self.space, self._steps(steps)
        state.mul_(torch.exp(steps * space.decay)[..., None, None])
        grouped = state.view(len(x), space.groups, -1, space.state_dim)
        grouped.addcmul_((x * steps.unsqueeze(2)).view(len(x), space.groups, -1, 1), b.unsqueeze(2))
        return torch.matmul(grouped, c.unsqueeze(3)).view(x.shape).addcmul_(x, space.skip.unsqueeze(1))

    def scan(
        self, seen: Channels, steps: Tensor, state: Tensor, prompts: Prompts, hand_on: HandingOn | None = None
    ) -> Tensor:
        """All rows of prompts: steps [m, H], as they are projected → [m, H, P]. `state` [S, H, P, N] goes on, by
        `hand_on` or PyTorch's operations."""
        space = self.space
        chunks = _Chunks.of(seen, self._steps(steps), space, prompts)
        mixed = chunks.within() + chunks.from_before(state, prompts, hand_on or hand_on_in_turns)
        # [chunks, G, heads of a group * P, places] → rows
        flat = mixed.view(len(mixed), space.heads, space.head_dim, CHUNK).permute(0, 3, 1, 2).flatten(0, 1)
        return flat.index_select(0, prompts.from_chunks).addcmul_(seen.x, space.skip.unsqueeze(1))

    def normed(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """mixed [n, H, P] times SiLU(gate), RMS-normed in groups → [n, H * P]; of lightning attention as it is."""
        if self.space.lightning:
            return mixed.flatten(1)
        gated = (mixed.flatten(1) * F.silu(gate)).view(len(mixed), self.space.groups, -1)
        if self.space.norm is None:
            return gated.flatten(1)
        return F.rms_norm(gated, gated.shape[2:], None, self.space.eps).flatten(1) * self.space.norm

    def _steps(self, projected: Tensor) -> Tensor:
        if self.space.lightning:
            return projected.new_ones(len(projected), self.space.heads)
        return F.softplus(projected + self.space.step_bias)


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
    def of(cls, seen: Channels, steps: Tensor, space: StateSpace, prompts: Prompts) -> _Chunks:
        """Places without a row have a time step of 0: they write nothing, and nothing is lost there."""
        x, b, c = map(prompts.chunked, seen)
        steps = prompts.chunked(steps)
        inputs = x * steps.unsqueeze(3)
        return cls(
            inputs.permute(0, 2, 3, 1).reshape(len(x), space.groups, -1, CHUNK),
            b.transpose(1, 2).contiguous(),
            c.permute(0, 2, 3, 1).contiguous(),
            (steps * space.decay).transpose(1, 2).cumsum(2),
            space.head_dim,
        )

    def within(self) -> Tensor:
        """[chunks, G, R, Q]: what the places of a chunk read of those before them, and of themselves, in it."""
        chunks, groups = self.b.shape[:2]
        read = torch.matmul(self.b, self.c)  # [chunks, G, from, to]
        # exp of what lies above the diagonal may be anything: -inf before, 0 behind.
        left = (self.decays.unsqueeze(2) - self.decays.unsqueeze(3)).masked_fill_(backwards(read.device), -torch.inf)
        weights = left.exp_().view(chunks, groups, -1, CHUNK, CHUNK).mul_(read.unsqueeze(2))
        by_head = self.inputs.view(*weights.shape[:3], self.head_dim, CHUNK)
        return torch.matmul(by_head, weights).view(self.inputs.shape)

    def from_before(self, state: Tensor, prompts: Prompts, hand_on: HandingOn) -> Tensor:
        """[chunks, G, R, Q]: what they read of the states that the chunks before have left. `state` [S, H, P, N] is
        that before the first chunk of each prompt, and behind its last one in the end."""
        groups, dim = self.b.shape[1], self.b.shape[3]
        whole = self.decays[:, :, -1:]
        ahead = torch.exp(whole - self.decays)
        shape = (*self.decays.shape[:2], self.head_dim, CHUNK)
        written = (self.inputs.view(shape) * ahead.unsqueeze(2)).view(self.inputs.shape)
        added = torch.matmul(written, self.b).view(*shape[:3], dim)
        before = hand_on(whole.exp().unsqueeze(3), added, state, prompts)
        read = torch.matmul(before.view(len(before), groups, -1, dim), self.c)
        return (read.view(shape) * self.decays.exp().unsqueeze(2)).view(self.inputs.shape)
