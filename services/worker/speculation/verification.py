"""Which drafts are accepted: those that the model would have drawn itself; the first other one is replaced.

The token of each position is drawn from the model's own distribution there, by the key of that position, just as
without drafts; a draft is accepted where it is what was drawn. For drafts that are certain, q = 1 at the draft x, that
is rejection sampling (Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318): x is accepted with
probability min(1, p(x) / q(x)) = p(x), and what replaces it has the distribution max(0, p - q), normed, which is p
without x. More than that: the same seed gives the same tokens with drafts and without, however many are tried and
wherever a stream is taken up again, which rejection by random numbers of its own would not.

A proposer with a distribution q of its own draws from it by the same key: both race (`sampling.races`). Its drafts are
then accepted nearly as often as rejection sampling would accept them: always, where q = p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import Batch, DecodeBatch
from services.worker.batch.rows import expand_drafts
from services.worker.ops.drafts import DraftAttempt
from services.worker.ops.gpu import runs_triton
from services.worker.ops.interface import BatchMeta, Ops
from services.worker.ops.transfer import to_device, to_device_together
from services.worker.sampling.logprobs import RowLogprobs, logprobs_by_row
from services.worker.sampling.random_numbers import RejectedDrafts
from shared.messages.scheduler import SampledTokens

Int32s = NDArray[np.int32]


def accepted_counts(drawn: Int32s, drafts: Int32s, counts: Int32s) -> Int32s:
    """How many drafts of each sequence are accepted [Q].

    drawn [Q, K + 1]: what the model draws behind the known tokens, behind the first draft, and so on. drafts [Q, K],
    `counts` [Q] of each row.
    """
    right = (drawn[:, :-1] == drafts) & (np.arange(drafts.shape[1]) < counts[:, None])
    first_ones: Int32s = np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)
    return first_ones


# Verification where the logits are, for the next step that goes on there.


class VerifiedDrafts(NamedTuple):
    """Drafts that were verified, on the device."""

    attempt: DraftAttempt
    outcome: Tensor
    """See `Ops.verify`."""

    def rejected(self) -> RejectedDrafts:
        """[Q + 1] rejected drafts of each sequence; and a 0, for rows of no such sequence."""
        missing = self.attempt.counts + 1 - self.outcome[: len(self.attempt.counts)]
        return RejectedDrafts(F.pad(missing, (0, 1)), self.attempt.max_drafts)

    def last_rows(self) -> Tensor:
        """[Q] the step's row that each sequence's last token was drawn behind."""
        last = self.attempt.first + self.outcome[: len(self.attempt.first)] - 1
        return last if self.attempt.rows is None else self.attempt.rows.index_select(0, last)


def verify_batch(ops: Ops, batch: Batch, ids: Tensor, rows: Tensor | None, drawn: Tensor) -> VerifiedDrafts:
    """Verifies the drafts of a batch: `ids` [n] are its rows' tokens, `drawn` [R] the tokens sampled behind `rows` (see
    `sampled_rows`)."""
    first, counts = to_device_together((batch.first_drawn, batch.drafted), drawn.device)
    attempt = DraftAttempt(drawn, ids, rows, first, counts, int(batch.drafted.max()))
    return VerifiedDrafts(attempt, ops.verify(attempt))


def warm_up_verification(ops: Ops, device: torch.device) -> None:
    """Verifies once, so that kernels are compiled: a grammar may ask for drafts in the middle of serving."""
    numbers = torch.zeros(2, dtype=torch.int32, device=device)
    ops.verify(DraftAttempt(numbers.long(), numbers, None, numbers[:1], torch.ones_like(numbers[:1]), 1))


def sampled_rows(batch: Batch, meta: BatchMeta) -> Tensor | None:
    """[R] the rows that tokens are drawn behind, on the device; None: all."""
    if batch.merged is not None:
        return to_device(batch.drawn_rows, meta.logits_rows.device)
    return None if meta.every_row else meta.logits_rows


# What a step drew, sequence by sequence.


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """What a step drew, and how much of it is accepted. Q sequences, R rows of logits."""

    tokens: Int32s
    """[Q, K + 1] what lies behind a row's count means nothing."""
    counts: Int32s
    """[Q] tokens that each sequence gains: its accepted drafts, and one more."""
    logprobs: tuple[RowLogprobs, ...] = ()
    """Log-probabilities of those rows of logits that asked for them."""
    rows: Int32s | None = None
    """[Q, K + 1] the row of logits that each token was drawn from; None: a sequence's follow each other."""

    @classmethod
    def of_trees(cls, batch: Batch, drawn: Int32s, logprobs: tuple[RowLogprobs, ...] = ()) -> AcceptedTokens:
        """Of a batch with trees, whose rows have `drawn` [R] these tokens."""
        assert batch.trees is not None, "the caller has looked"
        rows, counts = batch.trees.accepted(drawn)
        return cls(drawn[rows], counts, logprobs, rows)

    @classmethod
    def of(cls, outcome: Int32s, drafted: Int32s, logprobs: tuple[RowLogprobs, ...] = ()) -> AcceptedTokens:
        """What came to the host: `Ops.verify`'s numbers, or, of a step without drafts, [Q] tokens. `drafted` [Q]."""
        if len(outcome) == len(drafted):
            return cls(outcome.reshape(-1, 1), np.ones_like(drafted), logprobs)
        return cls(by_sequence(outcome[len(drafted) :], drafted), outcome[: len(drafted)], logprobs)

    def sampled(self, batch: Batch | DecodeBatch) -> tuple[SampledTokens, ...]:
        """Messages for the scheduler, in the batch's order."""
        by_row = logprobs_by_row(self.logprobs) if self.logprobs else {}
        rows = batch.first_drawn[:, None] + np.arange(self.tokens.shape[1]) if self.rows is None else self.rows
        parts = zip(
            batch.sampled, self.tokens.tolist(), self.counts.tolist(), batch.levels.tolist(), rows.tolist(), strict=True
        )
        return tuple(
            SampledTokens(
                sequence,
                tuple(tokens[:count]),
                tuple(by_row[row] for row in of[:count]) if of[0] in by_row else None,
                drafted,
            )
            for sequence, tokens, count, drafted, of in parts
        )

    def by_position(self, batch: Batch | DecodeBatch) -> tuple[int, ...]:
        """How many sequences accepted their first draft, their second, and so on, up to the longest draft."""
        longest = int(batch.levels.max(initial=0))
        return tuple(int(np.count_nonzero(self.counts > position)) for position in range(1, longest + 1))


NO_TOKENS = AcceptedTokens(np.zeros((0, 1), dtype=np.int32), np.zeros(0, dtype=np.int32))


def by_sequence(drawn: Int32s, drafted: Int32s) -> Int32s:
    """drawn [R], a token for each row of logits → [Q, K + 1], zeros behind the last of each sequence."""
    if len(drawn) == len(drafted):  # no sequence has a draft
        return drawn.reshape(-1, 1)
    tokens = np.zeros((len(drafted), int(drafted.max(initial=0)) + 1), dtype=np.int32)
    tokens[expand_drafts(drafted)] = drawn
    return tokens


# Steps that are prepared before the host knows how many drafts of the one before are accepted. It assumes that all are,
# and makes rows, blocks and positions for that; the device, which knows by the time that it comes to them, moves them
# back by what is missing.


class DecodePositions(NamedTuple):
    """Where P decodes read and write in each of K steps, int32 [K, P]; fields as in `BatchMeta`."""

    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    block_tables: Tensor
    """[P, width]"""

    def move_back(self, rejected: RejectedDrafts, block_size: int, cells: Tensor | None = None) -> None:
        """Moves each decode back by its own rejected drafts [P], in all steps; its cell [P], too, where K is 1."""
        if runs_triton(self.positions.device):
            from services.worker.ops.triton.decode_inputs import move_back

            move_back(rejected.counts, *self, block_size, cells)
            return
        self.positions.sub_(rejected.counts)
        self.context_lens.sub_(rejected.counts)
        if cells is not None:
            cells.sub_(rejected.counts)
        number = torch.div(self.positions, block_size, rounding_mode="floor")
        block = self.block_tables.gather(1, number.t().long()).t()
        self.slots.copy_((block - number) * block_size + self.positions)


def move_back(cells: Tensor, meta: BatchMeta, rejected: RejectedDrafts) -> None:
    """Moves a step's rows [n] back, each by its own rejected drafts; only decodes have any.

    `cells` [n]: see `TokenTable`."""
    decodes = meta.num_decodes
    positions, slots, lengths = (
        part[:decodes].unsqueeze(0) for part in (meta.positions, meta.slots, meta.context_lens)
    )
    DecodePositions(positions, slots, lengths, meta.block_tables[:decodes]).move_back(
        rejected.part(0, decodes), meta.block_size, cells[:decodes]
    )


def warm_up_move_back(device: torch.device, block_size: int) -> None:
    """Moves one decode by nothing, so that the kernel is compiled."""
    one = torch.zeros(1, 1, dtype=torch.int32, device=device)
    DecodePositions(one, one.clone(), one.clone(), one.clone()).move_back(RejectedDrafts(one[0].clone(), 0), block_size)
