"""Drafting token by token: rows of many steps, one for each sequence, prepared at once; and how drafts are drawn."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.rows import Indices, Int32s
from services.worker.ops.interface import BatchMeta
from services.worker.ops.transfer import to_device
from services.worker.sampling.logits_processors import LOGITS_FEATURES
from services.worker.sampling.parameters import Feature, SamplingBatch
from services.worker.sampling.races import Draw
from services.worker.sampling.random_numbers import RejectedDrafts
from services.worker.sampling.sampler import sample_draft
from services.worker.speculation.proposer import SequenceHistories
from services.worker.speculation.verification import DecodePositions
from shared.blocks import blocks_for

_ALIGNED = 16
"""Numbers that each array's start is a multiple of, as in `rows_on_device`."""


class DraftChain(NamedTuple):
    """Rows of `steps` steps, one for each of `sequences`, on the device in one copy."""

    steps: int
    sequences: int
    stride: int
    """Numbers from one step's positions, slots and context lengths to the next one's."""
    numbers: Tensor
    """[3, steps, stride] positions, slots and context lengths; ordinals; block tables."""
    longest: list[int]
    """[steps]"""
    block_size: int

    def meta(self, step: int) -> BatchMeta:
        """The rows of one step, as views of the chain's numbers."""
        steps, count, stride = self.steps, self.sequences, self.stride
        places, slots, lengths = (self.numbers[(kind * steps + step) * stride :][:count] for kind in range(3))
        ordinals = self.numbers[3 * steps * stride :]
        width = blocks_for(max(self.longest), self.block_size)
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
            block_size=self.block_size,
            every_row=True,
        )

    def move_back(self, rejected: RejectedDrafts) -> None:
        """Moves all rows of each sequence back, by its own rejected drafts."""
        by_kind = self.numbers[: 3 * self.steps * self.stride].view(3, self.steps, self.stride)
        positions, slots, lengths = by_kind[..., : self.sequences]
        DecodePositions(positions, slots, lengths, self.meta(0).block_tables).move_back(rejected, self.block_size)


def draft_chain(
    seq_indices: Indices, positions: Int32s, block_tables: Int32s, block_size: int, device: torch.device
) -> DraftChain:
    """The chain of K steps for P sequences; positions [K, P]: which position of each sequence a step computes."""
    steps, count = positions.shape
    longest = positions.max(axis=1) + 1
    width = blocks_for(int(longest.max()), block_size)
    stride = _aligned(count + 1)
    numbers = np.empty((3 * steps + 1) * stride + count * width, dtype=np.int32)
    by_step = numbers[: 3 * steps * stride].reshape(3, steps, stride)[:, :, :count]
    block, offset = np.divmod(positions, block_size)
    by_step[0] = positions
    by_step[1] = block_tables[seq_indices, block] * block_size + offset
    by_step[2] = positions + 1
    numbers[3 * steps * stride :][:stride] = np.arange(stride)
    numbers[(3 * steps + 1) * stride :] = block_tables[seq_indices, :width].ravel()
    return DraftChain(steps, count, stride, to_device(numbers, device), longest.tolist(), block_size)


def _aligned(numbers: int) -> int:
    return -(-numbers // _ALIGNED) * _ALIGNED


class DraftSampler:
    """How the drafts of some sequences are drawn: as the model's tokens are, by the same keys and with the same
    changes of logits, see `DraftTokens`. Only what comes with a batch is left out: masks of grammars, and logits of
    plug-ins."""

    def __init__(
        self,
        seq_indices: Indices,
        histories: SequenceHistories,
        rejected: RejectedDrafts | None = None,
        draw: Draw | None = None,
    ) -> None:
        """`rejected` [P]: see `DraftRequest`."""
        self._seq_indices = seq_indices
        self._histories = histories
        self._rejected = rejected
        self._draw = draw
        self._first = self._choices(0)
        self.greedy = not self._first.features & (Feature.RANDOM | LOGITS_FEATURES)
        """Then every position is drawn in the same way, from logits as they are."""

    def token(self, logits: Tensor, drafted: list[Tensor]) -> Tensor:
        """Draws the draft behind those `drafted` ([P] each): logits [P, vocab] → [P] int32."""
        choices = self._choices(len(drafted)) if drafted and not self.greedy else self._first
        history = partial(self._history, drafted)
        return sample_draft(logits, choices, history, self._draw).to(torch.int32)

    def tokens(self, logits: list[Tensor]) -> Tensor:
        """Draws all drafts; `logits` are those of the first draft, of the second, … → [P, K] int32."""
        if self._first.features & LOGITS_FEATURES:  # a draft may depend on those before it
            drafted: list[Tensor] = []
            for each in logits:
                drafted.append(self.token(each, drafted))
            return torch.stack(drafted, dim=1)
        if self.greedy:
            choices = self._first
        else:
            ahead = np.repeat(np.arange(len(logits), dtype=np.int32), len(self._seq_indices))
            choices = self._choices(ahead, times=len(logits))
        every = logits[0] if len(logits) == 1 else torch.cat(logits)
        drawn = sample_draft(every, choices, partial(self._history, []), self._draw)
        return drawn.view(len(logits), -1).t().to(torch.int32)

    def _choices(self, ahead: Int32s | int, times: int = 1) -> SamplingBatch:
        """`times` over, one behind the other."""
        choices = self._histories.sampling_batch(np.tile(self._seq_indices, times), ahead)
        if self._rejected is None:
            return choices
        return replace(choices, rejected=self._rejected._replace(counts=self._rejected.counts.repeat(times)))

    def _history(self, drafted: list[Tensor], seq_indices: Indices, positions: Int32s) -> tuple[Int32s, Int32s, Int32s]:
        """See `HistoryLookup`: what the host knows of the sequences, and the drafts."""
        prompts = self._first.table.prompt_lengths[seq_indices]
        lengths = prompts + positions
        tokens = self._histories.tokens[seq_indices, : int(lengths.max())]  # a copy
        order = np.argsort(self._seq_indices)
        rows = order[np.searchsorted(self._seq_indices, seq_indices, sorter=order)]
        for back, draft in enumerate(reversed(drafted), start=1):
            tokens[np.arange(len(seq_indices)), lengths - back] = draft.cpu().numpy()[rows]
        return tokens, lengths, prompts
