"""Drafting token by token: rows of many steps, one for each sequence, prepared at once; and how drafts are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from services.worker.crossing import sent
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import KvCaches, Weights
from services.worker.ops import BatchMeta
from services.worker.rows import Int32s, Slots
from services.worker.sampling.parameters import Choices, Feature
from services.worker.sampling.sampler import draw_plainly
from services.worker.shortfall import Places, Shortfall
from services.worker.speculation.proposer import Histories
from shared.blocks import BLOCK_SIZE, blocks_for

_ALIGNED = 16
"""Numbers that each array's start is a multiple of, as in `rows_on_device`."""


class Chain(NamedTuple):
    """Rows of `steps` steps, one for each of `sequences`, on the device in one copy."""

    steps: int
    sequences: int
    stride: int
    """Numbers from one step's positions, slots and context lengths to the next one's."""
    numbers: Tensor
    """[3, steps, stride] positions, slots and context lengths; ordinals; block tables."""
    longest: list[int]
    """[steps]"""

    def meta(self, step: int) -> BatchMeta:
        steps, count, stride = self.steps, self.sequences, self.stride
        places, slots, lengths = (self.numbers[(kind * steps + step) * stride :][:count] for kind in range(3))
        ordinals = self.numbers[3 * steps * stride :]
        width = blocks_for(max(self.longest))
        return BatchMeta(
            query_starts=ordinals[: count + 1],
            context_lens=lengths,
            block_tables=ordinals[stride:][: count * width].view(count, width),
            slots=slots,
            positions=places,
            logits_rows=ordinals[:count],
            num_decodes=count,
            prefills=(),
            max_query=1,
            max_context=self.longest[step],
            every_row=True,
        )

    def move_back(self, shortfall: Shortfall) -> None:
        """All rows of each sequence, by its own."""
        by_kind = self.numbers[: 3 * self.steps * self.stride].view(3, self.steps, self.stride)
        positions, slots, lengths = by_kind[..., : self.sequences]
        Places(positions, slots, lengths, self.meta(0).block_tables).move_back(shortfall)


def chain(slots: Slots, positions: Int32s, block_tables: Int32s, device: torch.device) -> Chain:
    """positions [K, P]: of each of P sequences the one that each of K steps computes."""
    steps, count = positions.shape
    longest = positions.max(axis=1) + 1
    width = blocks_for(int(longest.max()))
    stride = _aligned(count + 1)
    numbers = np.empty((3 * steps + 1) * stride + count * width, dtype=np.int32)
    by_step = numbers[: 3 * steps * stride].reshape(3, steps, stride)[:, :, :count]
    block, offset = np.divmod(positions, BLOCK_SIZE)
    by_step[0] = positions
    by_step[1] = block_tables[slots, block] * BLOCK_SIZE + offset
    by_step[2] = positions + 1
    numbers[3 * steps * stride :][:stride] = np.arange(stride)
    numbers[(3 * steps + 1) * stride :] = block_tables[slots, :width].ravel()
    return Chain(steps, count, stride, sent(numbers, device), longest.tolist())


@runtime_checkable
class DraftsOn(Protocol):
    """A forward pass that can make a whole chain of greedy drafts by itself."""

    def draft_on(self, first: Tensor, rows: Chain, caches: KvCaches, given: Tensor | None = None) -> Tensor:
        """first [P] int32, the drafts that the chain begins with → [steps + 1, P] those and what follows them. `given`:
        the features that EAGLE begins with [P, hidden]."""


@runtime_checkable
class FusesDrafts(Protocol):
    """An `Ops` that has such a pass for models."""

    def fuse_drafts(self, config: ModelConfig, weights: Weights) -> DraftsOn | None:
        """None where the model's operations must do."""


def _aligned(numbers: int) -> int:
    return -(-numbers // _ALIGNED) * _ALIGNED


class Draws:
    """How the drafts of some sequences are drawn: by the random numbers of their positions, see `proposer.Drafts`."""

    def __init__(self, slots: Slots, histories: Histories, shortfall: Shortfall | None = None) -> None:
        """`shortfall` [P]: see `proposer.Asked`."""
        self._slots = slots
        self._histories = histories
        self._shortfall = shortfall
        self._first = self._choices(0)
        self.greedy = not self._first.features & Feature.RANDOM
        """Then every position is drawn in the same way."""

    def token(self, logits: Tensor, ahead: int) -> Tensor:
        """logits [P, vocab] of the draft with `ahead` before it → [P] int32."""
        return draw_plainly(logits, self._first if self.greedy else self._choices(ahead)).to(torch.int32)

    def tokens(self, logits: list[Tensor]) -> Tensor:
        """Of all drafts at once, the first's logits first → [P, K] int32."""
        if self.greedy:
            choices = self._first
        else:
            ahead = np.repeat(np.arange(len(logits), dtype=np.int32), len(self._slots))
            choices = self._choices(ahead, times=len(logits))
        drawn = draw_plainly(logits[0] if len(logits) == 1 else torch.cat(logits), choices)
        return drawn.view(len(logits), -1).t().to(torch.int32)

    def _choices(self, ahead: Int32s | int, times: int = 1) -> Choices:
        """`times` over, one behind the other."""
        choices = self._histories.choose(np.tile(self._slots, times), ahead)
        if self._shortfall is None:
            return choices
        return replace(choices, shortfall=self._shortfall._replace(tokens=self._shortfall.tokens.repeat(times)))
