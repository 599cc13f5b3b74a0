"""Drafts by looking up: what followed the last tokens when they occurred before will follow again.

Saxena, "Prompt lookup decoding" (2023), with the most recent of the longest matches. No weights, no memory of its own.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.worker.batch.batch import DraftTokens
from services.worker.speculation.proposer import HISTORY_WINDOW, DraftRequest, Int32s, StatelessProposer


class NgramProposer(StatelessProposer, Struct, frozen=True, kw_only=True):
    """Drafts by looking up. Pure: drafts depend on the sequences' tokens alone, so every rank drafts the same."""

    most: int
    longest: int
    """Tokens that a match should have: fewer only where so many occur nowhere else."""
    shortest: int
    """Tokens that a match must have."""

    def propose(self, request: DraftRequest) -> DraftTokens:
        """No drafts for sequences whose last tokens occurred nowhere before."""
        lengths = request.histories.lengths[request.seq_indices]
        window = min(HISTORY_WINDOW, int(lengths.max()))
        # The sequences' last tokens, aligned at their ends; before the beginning of a short one, its first token.
        at = np.maximum(lengths[:, None] - window + np.arange(window), 0)
        tokens = request.histories.tokens[request.seq_indices[:, None], at]
        ends, found = last_match(tokens, np.minimum(lengths, window), self.longest, self.shortest)
        return DraftTokens(
            continue_match(tokens, ends, self.most), np.where(found, np.minimum(request.limits, self.most), 0)
        )


class NgramDrafter(Struct, frozen=True):
    """See `Drafter`. Has no weights."""

    longest: int
    shortest: int
    most: int
    kv_block_bytes: int = 0

    def proposer(self, num_blocks: int, max_sequences: int) -> NgramProposer:
        """A proposer; it needs no memory, whatever the sizes."""
        return NgramProposer(most=self.most, longest=self.longest, shortest=self.shortest)


def last_match(
    tokens: Int32s, lengths: Int32s, longest: int, shortest: int
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Of each row's last tokens, the most recent place where the most of them, `longest` at the most, occurred before.

    tokens [P, window], each row's `lengths` last ones being its own → (ends [P], the index behind that place; found
    [P], whether at least `shortest` tokens match).
    """
    rows, window = tokens.shape
    ends = np.full(rows, window, dtype=np.intp)
    if min(longest, window - 1) < shortest:
        return ends, np.zeros(rows, dtype=np.bool_)
    # Where the last token occurred before: few places, of which each round keeps those that match one token more.
    row, last = np.nonzero(tokens[:, :-1] == tokens[:, -1:])
    first = (window - lengths)[row]
    reached = (last >= first).astype(np.intp)
    left = np.flatnonzero(reached)
    for n in range(2, min(longest, window - 1) + 1):
        begin = last[left] - n + 1
        left = left[(begin >= first[left]) & (tokens[row[left], begin] == tokens[row[left], window - n])]
        if not len(left):
            break
        reached[left] = n
    enough = reached >= shortest
    best = np.zeros(rows, dtype=np.intp)
    # The longest match, of equals the most recent one.
    np.maximum.at(best, row[enough], (reached * window + last)[enough])
    found = best > 0
    ends[found] = best[found] % window + 1
    return ends, found


def continue_match(tokens: Int32s, ends: NDArray[np.intp], count: int) -> Int32s:
    """The `count` tokens behind `ends` of each row [P, count]; where the row ends, its period goes on."""
    window = tokens.shape[1]
    period = np.maximum(window - ends, 1)[:, None]
    at = np.minimum(ends[:, None] + np.arange(count) % period, window - 1)
    following: Int32s = tokens[np.arange(len(tokens))[:, None], at]
    return following
