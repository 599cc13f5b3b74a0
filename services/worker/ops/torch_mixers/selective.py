"""Selective spaces (Mamba-1) and recurrent units (RG-LRU) in PyTorch, on any device: token by token, all channels of
all sequences at once.

What is left of a state differs by channel and by number of its state, so that what tokens make of each other is no
product of matrices, as it is in a state space.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import RecurrentUnit, SelectiveSpace
from services.worker.ops.torch_mixers.convolution import CHUNK, Prompts

_AT_ONCE = 16
"""Tokens of each prompt for which is computed in one operation what they write and leave: memory grows with it."""


class SelectiveRows(NamedTuple):
    """What m rows bring to the states, in float32."""

    space: SelectiveSpace
    gates: Tensor
    """[m, C]"""
    x: Tensor
    """[m, C]"""
    b: Tensor
    """[m, N]"""
    c: Tensor
    """[m, N]"""
    steps: Tensor
    """[m, C]; 0: nothing is written, and nothing lost."""

    @classmethod
    def of(cls, projected: Tensor, space: SelectiveSpace) -> SelectiveRows:
        """Of `projected`, as `StateOps.mix` has it."""
        channels, dim = space.decay.shape
        gates, x, b, c, steps = torch.split(projected, [channels, channels, dim, dim, channels], dim=1)
        return cls(space, gates, x, b, c, F.softplus(steps + space.step_bias))

    def part(self, first: int, end: int) -> SelectiveRows:
        """Of these rows."""
        return SelectiveRows(self.space, *(each[first:end] for each in self[1:]))

    def step(self, state: Tensor) -> Tensor:
        """One row of each sequence → [B, C]. `state` [B, C, N] goes on."""
        torch.addcmul(_written(self.x, self.b, self.steps), _decay_factors(self.space, self.steps), state, out=state)
        return self._gated(_read(state, self.c))

    def scan(self, state: Tensor, prompts: Prompts) -> Tensor:
        """All rows of prompts → [m, C]. `state` [S, C, N] goes on, those of the prompts with the most rows first."""
        x, b, c, steps = (prompts.chunked(each) for each in (self.x, self.b, self.c, self.steps))
        read, first = x.new_empty(x.shape), 0
        for count in prompts.turns:
            turn = slice(first, first + count)
            for place in range(0, CHUNK, _AT_ONCE):
                some = (turn, slice(place, place + _AT_ONCE))
                states, factors = _written(x[some], b[some], steps[some]), _decay_factors(self.space, steps[some])
                before = state[:count]
                for token in range(_AT_ONCE):
                    before = states[:, token].addcmul_(factors[:, token], before)
                state[:count] = before
                read[some] = _read(states, c[some])
            first += count
        return self._gated(read.flatten(0, 1).index_select(0, prompts.from_chunks))

    def _gated(self, read: Tensor) -> Tensor:
        return read.addcmul_(self.x, self.space.skip).mul_(F.silu(self.gates))


class RecurrentRows(NamedTuple):
    """What m rows bring to the states of a recurrent unit, in float32."""

    rates: Tensor
    """[m, C] the logarithm of what is left of a state; 0: nothing is lost."""
    inputs: Tensor
    """[m, C]"""

    @classmethod
    def of(cls, projected: Tensor, unit: RecurrentUnit, begins: Tensor | None) -> RecurrentRows:
        """Of `projected`, as `StateOps.mix` has it. `begins`: bool [m], which rows begin a sequence; None: no row."""
        taken, forgotten, x = projected.chunk(3, dim=1)
        rates = forgotten.sigmoid() * unit.decay
        left = rates.exp()
        share = left.mul_(left).neg_().add_(1.0).clamp_(min=0.0).sqrt_()
        if begins is not None:
            share.masked_fill_(begins.unsqueeze(1), 1.0)
        return cls(rates, share.mul_(taken.sigmoid()).mul_(x))

    def step(self, state: Tensor) -> Tensor:
        """One row of each sequence: state [B, C] → those behind them, [B, C]."""
        return torch.addcmul(self.inputs, self.rates.exp(), state)

    def scan(self, state: Tensor, prompts: Prompts) -> Tensor:
        """All rows of prompts → [m, C]. `state` [S, C] goes on, those of the prompts with the most rows first."""
        factors, states, first = prompts.chunked(self.rates).exp_(), prompts.chunked(self.inputs), 0
        for count in prompts.turns:
            turn, before = slice(first, first + count), state[:count]
            for token in range(CHUNK):
                before = states[turn, token].addcmul_(factors[turn, token], before)
            state[:count] = before
            first += count
        return states.flatten(0, 1).index_select(0, prompts.from_chunks)


def _decay_factors(space: SelectiveSpace, steps: Tensor) -> Tensor:
    """[…, C, N]: how much of each number of a state is left."""
    return torch.exp(steps.unsqueeze(-1) * space.decay)


def _written(x: Tensor, b: Tensor, steps: Tensor) -> Tensor:
    """[…, C, N]"""
    return (x * steps).unsqueeze(-1) * b.unsqueeze(-2)


def _read(states: Tensor, c: Tensor) -> Tensor:
    """[…, C, N] → […, C]"""
    return (states * c.unsqueeze(-2)).sum(-1)
