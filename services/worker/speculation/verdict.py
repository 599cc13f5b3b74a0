"""What a step drew, sequence by sequence: tokens, log-probabilities, and how many drafts stood. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.batch import Batch
from services.worker.rows import drafts_apart
from services.worker.sampling.logprobs import Told, by_row
from shared.messages.generation import TokenLogprobs
from shared.messages.scheduler import Sampled

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step drew, and how much of it stands. Q sequences, R rows of logits."""

    tokens: Int32s
    """[Q, K + 1] what lies behind a row's count means nothing."""
    counts: Int32s
    """[Q] tokens that each sequence gains: the drafts that stand, and one more."""
    told: tuple[Told, ...] = ()
    """Log-probabilities of those rows of logits that asked."""

    @classmethod
    def of(cls, outcome: Int32s, drafted: Int32s, told: tuple[Told, ...] = ()) -> Verdict:
        """What came to the host: `Ops.verify`'s numbers, or, of a step without drafts, [Q] tokens. `drafted` [Q]."""
        if len(outcome) == len(drafted):
            return cls(outcome.reshape(-1, 1), np.ones_like(drafted), told)
        return cls(by_sequence(outcome[len(drafted) :], drafted), outcome[: len(drafted)], told)

    def kept(self, drafted: Int32s) -> NDArray[np.bool_]:
        """[R] whether each row of logits drew a token that stands."""
        owner, ahead = drafts_apart(drafted)
        kept: NDArray[np.bool_] = ahead < self.counts[owner]
        return kept

    def sampled(self, batch: Batch) -> tuple[Sampled, ...]:
        """For the scheduler, in the batch's order."""
        logprobs = by_row(self.told)
        first = (np.cumsum(batch.drafted + 1) - (batch.drafted + 1)).tolist()
        parts = zip(
            batch.sampled, self.tokens.tolist(), self.counts.tolist(), batch.drafted.tolist(), first, strict=True
        )
        return tuple(
            Sampled(sequence, tuple(tokens[:count]), _of(logprobs, row, count), drafted)
            for sequence, tokens, count, drafted, row in parts
        )

    def by_position(self, batch: Batch) -> tuple[int, ...]:
        """How many sequences accepted their first draft, their second, and so on, up to the longest draft."""
        longest = int(batch.drafted.max(initial=0))
        return tuple(int(np.count_nonzero(self.counts > position)) for position in range(1, longest + 1))


def _of(logprobs: dict[int, TokenLogprobs], row: int, count: int) -> tuple[TokenLogprobs, ...] | None:
    return tuple(logprobs[at] for at in range(row, row + count)) if row in logprobs else None


NOTHING_DRAWN = Verdict(np.zeros((0, 1), dtype=np.int32), np.zeros(0, dtype=np.int32))


def by_sequence(drawn: Int32s, drafted: Int32s) -> Int32s:
    """drawn [R], a token for each row of logits → [Q, K + 1], zeros behind the last of each sequence."""
    if len(drawn) == len(drafted):  # nobody has a draft
        return drawn.reshape(-1, 1)
    tokens = np.zeros((len(drafted), int(drafted.max(initial=0)) + 1), dtype=np.int32)
    tokens[drafts_apart(drafted)] = drawn
    return tokens
