"""The gated delta rule in PyTorch, on any device: a step of the recurrence for decodes, chunks for prompts; and that of
Kimi Delta Attention (arXiv:2510.26692), where each element of a key is forgotten at a rate of its own.

Within a chunk each token corrects what those before it in the chunk have written, which is a triangular system that is
solved for all chunks of all prompts of a step together; only from chunk to chunk a state is handed on (Yang et al.,
"Gated Delta Networks", arXiv:2412.06464, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import DeltaNet
from services.worker.ops.torch_mixers.convolution import Channels, Prompts, backwards

_LENGTH_EPS = 1e-6
"""What is added to a squared length; all checkpoints are trained with this one."""
_PLACES = 16
"""Of a chunk whose pairs are looked at element by element."""


class DeltaRule(NamedTuple):
    """How a gated delta net goes on."""

    net: DeltaNet

    def step(self, seen: Channels, steps: Tensor, state: Tensor) -> Tensor:
        """One row of each sequence: steps [B, 2 * H] or [B, H * N + H], as they are projected → [B, H, P]. `state`
        [B, H, P, N] goes on."""
        net, values = self.net, seen.x
        decays, rates = self._decays_and_rates(steps)
        keys, queries = self._keys_and_queries(seen)
        state.mul_(decays.exp_().view(len(values), net.heads, 1, -1))
        grouped = state.view(len(values), net.groups, -1, net.state_dim)
        known = torch.matmul(grouped, keys.unsqueeze(3)).view(values.shape)
        written = (values - known).mul_(rates.unsqueeze(2))
        grouped.addcmul_(written.view(len(values), net.groups, -1, 1), keys.unsqueeze(2))
        return torch.matmul(grouped, queries.unsqueeze(3)).view(values.shape)

    def scan(
        self, seen: Channels, steps: Tensor, state: Tensor, prompts: Prompts, over_chunks: OverChunks | None = None
    ) -> Tensor:
        """All rows of prompts: steps [m, 2 * H] or [m, H * N + H], as they are projected → [m, H, P]. `state`
        [S, H, P, N] goes on, by `over_chunks` or PyTorch's operations."""
        keys, queries = self._keys_and_queries(seen)
        decays, rates = self._decays_and_rates(steps)
        made = DeltaChunks.by_element if self.net.by_element else DeltaChunks.of
        chunks = made(*map(prompts.chunked, (seen.x, keys, queries, decays, rates)))
        mixed = (over_chunks or DeltaChunks.scan)(chunks, state, prompts)
        # [chunks, H, Q, P] → rows
        return mixed.transpose(1, 2).flatten(0, 1).index_select(0, prompts.from_chunks)

    def normed(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """mixed [n, H, P], each head RMS-normed, times SiLU(gate), or its sigmoid → [n, H * P]."""
        normed = F.rms_norm(mixed, mixed.shape[2:], self.net.norm, self.net.eps)
        return normed.flatten(1).mul_(gate.sigmoid() if self.net.by_element else F.silu(gate))

    def _keys_and_queries(self, seen: Channels) -> tuple[Tensor, Tensor]:
        """[m, G, N] of length 1, and divided by the square root of N."""
        return _unit(seen.b), _unit(seen.c).mul_(self.net.state_dim**-0.5)

    def _decays_and_rates(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """[m, H] or [m, H, N] the logarithm of what is left of a state, and [m, H] how much of what is missing is
        written."""
        net = self.net
        times, rates = torch.split(steps, [steps.shape[1] - net.heads, net.heads], dim=1)
        times = times.view(-1, *net.step_bias.shape) + net.step_bias
        decay = net.decay.unsqueeze(1) if net.by_element else net.decay
        if net.lower_bound is None:
            left = F.softplus(times).mul_(decay)
        else:
            left = torch.sigmoid(times * -decay).mul_(net.lower_bound)
        return left, rates.sigmoid() * net.most_written


class DeltaChunks(NamedTuple):
    """What all chunks read and write. Q is CHUNK; i is a place, j one before it."""

    values: Tensor
    """[chunks, H, Q, P] what is written where the state before the chunk is zero."""
    forgotten: Tensor
    """[chunks, H, Q, N] what the state before the chunk is read by, for what it knows to be taken off that."""
    reading: Tensor
    """[chunks, H, Q, N] what the state before the chunk is read by for outputs."""
    within: Tensor
    """[chunks, H, Q (i), Q (j)] how much of what is written at j is read at i."""
    writing: Tensor
    """[chunks, H, Q, N] by which keys what is written is in the state behind the chunk."""
    left: Tensor
    """[chunks, H, 1, 1] or [chunks, H, 1, N] how much of the state before the chunk is left behind it."""

    @classmethod
    def of(cls, values: Tensor, keys: Tensor, queries: Tensor, decays: Tensor, rates: Tensor) -> DeltaChunks:
        """Of [chunks, Q, …]. Places without a row have zeros: they write nothing, and nothing is lost there."""
        each = values.shape[2] // keys.shape[2]
        values, keys, queries = (part.transpose(1, 2) for part in (values, keys, queries))
        rates, decays = rates.transpose(1, 2).unsqueeze(3), decays.transpose(1, 2).cumsum(2)
        # exp of what lies above the diagonal may be anything: -inf before, 0 behind.
        above = backwards(keys.device).T
        lasting = (decays.unsqueeze(3) - decays.unsqueeze(2)).masked_fill_(above, -torch.inf).exp_()
        within = torch.matmul(queries, keys.mT).repeat_interleave(each, 1).mul_(lasting)
        alike = torch.matmul(keys, keys.mT).repeat_interleave(each, 1).mul_(lasting).mul_(rates)
        keys, queries = keys.repeat_interleave(each, 1), queries.repeat_interleave(each, 1)
        since, whole = decays.exp().unsqueeze(3), decays[:, :, -1:]
        asked = torch.cat((values * rates, keys * (rates * since)), dim=3)
        solved = torch.linalg.solve_triangular(alike, asked, upper=False, unitriangular=True)
        own, forgotten = torch.split(solved, [values.shape[3], keys.shape[3]], dim=3)
        return cls(
            own,
            forgotten,
            queries.mul_(since),
            within,
            keys.mul_((whole - decays).exp_().unsqueeze(3)),
            whole.exp().unsqueeze(3),
        )

    @classmethod
    def by_element(cls, values: Tensor, keys: Tensor, queries: Tensor, decays: Tensor, rates: Tensor) -> DeltaChunks:
        """The same, of decays [chunks, Q, H, N]. Of two places, what is left of the earlier one's key is another number
        for each element. For places of different blocks it is split at the beginning of the later one's, as the paper
        does it: no exponent is positive, and products do the rest. Those of one block are multiplied one by one."""
        values, keys, queries = (part.transpose(1, 2) for part in (values, keys, queries))
        rates, decays = rates.transpose(1, 2).unsqueeze(3), decays.transpose(1, 2).cumsum(2)
        within, alike = _left_between(torch.stack((queries, keys)), keys, decays)
        whole, asked = decays[:, :, -1:], torch.cat((values * rates, keys * rates * decays.exp()), dim=3)
        solved = torch.linalg.solve_triangular(alike * rates, asked, upper=False, unitriangular=True)
        own, forgotten = torch.split(solved, [values.shape[3], keys.shape[3]], dim=3)
        return cls(own, forgotten, queries * decays.exp(), within, keys * (whole - decays).exp(), whole.exp())

    def scan(self, state: Tensor, prompts: Prompts) -> Tensor:
        """[chunks, H, Q, P]. `state` [S, H, P, N] is that before the first chunk of each prompt, and behind its last
        one in the end."""
        mixed, first = torch.empty_like(self.values), 0
        for count in prompts.turns:
            turn, own = slice(first, first + count), state[:count]
            written = self.values[turn] - torch.matmul(self.forgotten[turn], own.mT)
            mixed[turn] = torch.matmul(self.reading[turn], own.mT) + torch.matmul(self.within[turn], written)
            own.mul_(self.left[turn]).add_(torch.matmul(written.mT, self.writing[turn]))
            first += count
        return mixed


OverChunks = Callable[[DeltaChunks, Tensor, Prompts], Tensor]
"""As `DeltaChunks.scan`."""


def _left_between(readers: Tensor, keys: Tensor, decays: Tensor) -> Tensor:
    """readers [2, chunks, H, Q (i), N], keys and decays [chunks, H, Q (j), N] → [2, chunks, H, Q (i), Q (j)]: the sums
    over elements of reader i times key j times what is left of that at i; 0 where j is behind i."""
    product = readers.new_zeros(*readers.shape[:-1], keys.shape[2])
    behind = torch.ones(_PLACES, _PLACES, dtype=torch.bool, device=keys.device).triu_(1).unsqueeze(2)
    for first in range(0, keys.shape[2], _PLACES):
        block = slice(first, first + _PLACES)
        reading, own = readers[..., block, :], decays[:, :, block]
        if first:
            begin = decays[:, :, first - 1 : first]
            before = keys[:, :, :first] * (begin - decays[:, :, :first]).exp()
            product[..., block, :first] = torch.matmul(reading * (own - begin).exp(), before.mT)
        left = (
            (own.unsqueeze(3) - own.unsqueeze(2)).masked_fill_(behind, -torch.inf).exp_().mul_(keys[:, :, None, block])
        )
        product[..., block, block] = torch.matmul(left, reading.unsqueeze(5)).squeeze(5)
    return product


def _unit(rows: Tensor) -> Tensor:
    """[m, G, N] each of length 1, but for those of nearly none."""
    return rows * (rows.square().sum(2, keepdim=True) + _LENGTH_EPS).rsqrt()
