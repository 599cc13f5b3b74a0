"""Steps that are prepared before the host knows how many drafts of the one before stand.

It assumes that all do, and makes rows, blocks and positions for that; the device, which knows by the time that it comes
to them, moves them back by what is missing. No clock, no plans.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.ops import BatchMeta
from services.worker.sampling.kernel_draws import draws_by_kernel
from shared.blocks import BLOCK_SIZE


class Shortfall(NamedTuple):
    """Of P rows or sequences: how many tokens fewer there are than assumed. On the device."""

    tokens: Tensor
    """int32 [P]"""
    most: int
    """None of them is more."""

    def of(self, which: Tensor) -> Shortfall:
        """Those with these numbers."""
        return Shortfall(self.tokens.index_select(0, which), self.most)

    def part(self, first: int, last: int) -> Shortfall:
        return Shortfall(self.tokens[first:last], self.most)


class Places(NamedTuple):
    """Of P decodes in each of K steps, int32 [K, P]: as in `ops.BatchMeta`."""

    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    block_tables: Tensor
    """[P, width]"""

    def move_back(self, shortfall: Shortfall, cells: Tensor | None = None) -> None:
        """Each decode by its own [P], in all steps; its cell [P], too, where K is 1. See `TokenTable`."""
        if draws_by_kernel(self.positions.device):
            from services.worker.kernels.moving_back import move_back

            move_back(shortfall.tokens, *self, cells)
            return
        self.positions.sub_(shortfall.tokens)
        self.context_lens.sub_(shortfall.tokens)
        if cells is not None:
            cells.sub_(shortfall.tokens)
        number = torch.div(self.positions, BLOCK_SIZE, rounding_mode="floor")
        block = self.block_tables.gather(1, number.t().long()).t()
        self.slots.copy_((block - number) * BLOCK_SIZE + self.positions)


def move_back(cells: Tensor, meta: BatchMeta, shortfall: Shortfall) -> None:
    """The rows of a step [n], each by its own; only decodes fall short. `cells` [n]: see `TokenTable`."""
    decodes = meta.num_decodes
    positions, slots, lengths = (
        part[:decodes].unsqueeze(0) for part in (meta.positions, meta.slots, meta.context_lens)
    )
    Places(positions, slots, lengths, meta.block_tables[:decodes]).move_back(
        shortfall.part(0, decodes), cells[:decodes]
    )


def move_back_once(device: torch.device) -> None:
    """Pays what that costs the first time."""
    one = torch.zeros(1, 1, dtype=torch.int32, device=device)
    Places(one, one.clone(), one.clone(), one.clone()).move_back(Shortfall(one[0].clone(), 0))
