"""Drafts by counting: what followed the last tokens most often, in the sequence itself and in answers before it.

Oliaro et al., "SuffixDecoding: Extreme speculative decoding for emerging AI applications", arXiv:2411.04975. The paper
keeps suffix trees; here the last tokens are compared with a text each time, which numpy does for 64 Ki tokens in some
ten microseconds, and no tree has to be kept.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.worker.batch.batch import DraftTokens
from services.worker.speculation.proposer import (
    HISTORY_WINDOW,
    DraftRequest,
    Int32s,
    SequenceHistories,
    StatelessProposer,
)
from services.worker.speculation.settings import SpeculationSettings
from shared.messages.worker import NewSequence

MAX_TEXT = 65_536
"""Tokens of answers under one salt that are looked through, the latest: bounds the cost for each sequence."""
MAX_ANSWER_TOKENS = 1 << 20
"""Tokens of all answers together: 4 MiB."""
MAX_COUNTED = 256
"""Places where the last tokens occurred that are counted, the latest."""
END = -1
"""Between two answers: no token."""


class Draft(NamedTuple):
    """A continuation, and how many of its tokens are expected to be drawn."""

    tokens: list[int]
    score: float


NO_DRAFT = Draft([], 0.0)


class SuffixDrafter(Struct, frozen=True, kw_only=True):
    """See `Drafter`. Has no weights; its fields are those of `SpeculationSettings`."""

    most: int
    max_match: int
    max_answers: int
    max_spec_factor: float
    min_token_prob: float
    kv_block_bytes: int = 0

    @classmethod
    def of(cls, settings: SpeculationSettings, most: int) -> SuffixDrafter:
        """As `settings` want it, with `most` drafts of a step and sequence."""
        return cls(
            most=most,
            max_match=settings.suffix_decoding_max_tree_depth,
            max_answers=settings.suffix_decoding_max_cached_requests,
            max_spec_factor=settings.suffix_decoding_max_spec_factor,
            min_token_prob=settings.suffix_decoding_min_token_prob,
        )

    def proposer(self, num_blocks: int, max_sequences: int) -> SuffixProposer:
        """A proposer without any answer yet."""
        return SuffixProposer(self)

    def draft(self, text: Int32s, context: Int32s, limit: int) -> Draft:
        """The continuation in `text` with the best score behind `context`, which is the end of a sequence, for any
        number of matching tokens. Of equals the one behind the longest match."""
        ends, lengths = match_ends(text, context)
        best = NO_DRAFT
        for length in np.unique(lengths).tolist():
            most = min(limit, int(length * self.max_spec_factor))
            found = continuation(text, ends[lengths >= length][-MAX_COUNTED:], most, self.min_token_prob)
            if found.score >= best.score:
                best = found
        return best


class SuffixProposer(StatelessProposer):
    """Drafts for the sequences of a rank, and remembers the answers of those that have ended."""

    __slots__ = ("_answers", "_began", "_drafter")

    def __init__(self, drafter: SuffixDrafter) -> None:
        self._drafter = drafter
        self._answers = RecentAnswers(drafter.max_answers)
        self._began: dict[int, tuple[int, str | None]] = {}
        """Of each sequence: how many tokens it had when it came, and its cache salt."""

    def propose(self, request: DraftRequest) -> DraftTokens:
        """No drafts for sequences whose last tokens occurred nowhere before."""
        drafter, histories = self._drafter, request.histories
        tokens = np.zeros((len(request.seq_indices), drafter.most), dtype=np.int32)
        counts = np.zeros(len(request.seq_indices), dtype=np.int32)
        for row, (seq_index, limit) in enumerate(zip(request.seq_indices, request.limits, strict=True)):
            if not limit:
                continue
            length = int(histories.lengths[seq_index])
            own = histories.tokens[seq_index, max(0, length - HISTORY_WINDOW) : length]
            context, most = own[-drafter.max_match :], min(int(limit), drafter.most)
            others = self._answers.text(self._began[int(seq_index)][1])
            found = max(
                *(drafter.draft(own, context, most), drafter.draft(others, context, most)),
                key=lambda draft: draft.score,
            )
            counts[row] = len(found.tokens)
            tokens[row, : counts[row]] = found.tokens
        return DraftTokens(tokens, counts)

    def start_sequence(self, seq_index: int, new: NewSequence, histories: SequenceHistories) -> None:
        """What it has now is no answer of its own."""
        self._began[seq_index] = int(histories.lengths[seq_index]), new.cache_salt

    def end_sequence(self, seq_index: int, histories: SequenceHistories) -> None:
        """What it has drawn here is remembered, for sequences of the same salt."""
        began, salt = self._began.pop(seq_index)
        self._answers.add(histories.tokens[seq_index, began : histories.lengths[seq_index]].copy(), salt)

    def clear(self) -> None:
        """No sequence is known from here on; answers are remembered."""
        self._began.clear()


class RecentAnswers:
    """Answers of an engine, the latest. Only those under the same cache salt are shown to a sequence, as timing could
    tell it of others: an API key's requests have a salt of the key's own."""

    def __init__(self, most: int) -> None:
        """`most`: answers at the most; none with 0."""
        self._most = most
        self._answers: deque[tuple[str | None, Int32s]] = deque()
        self._tokens = 0
        self._count: Counter[str | None] = Counter()
        self._texts: dict[str | None, Int32s] = {}
        """Those that were asked for since they changed."""

    def add(self, answer: Int32s, salt: str | None) -> None:
        """Forgets the oldest ones where there are too many."""
        if not len(answer) or not self._most:
            return
        self._answers.append((salt, answer[1 - MAX_TEXT :]))  # and an end
        self._tokens += len(self._answers[-1][1])
        self._count[salt] += 1
        self._texts.pop(salt, None)
        while len(self._answers) > self._most or self._tokens > MAX_ANSWER_TOKENS:
            oldest, tokens = self._answers.popleft()
            self._tokens -= len(tokens)
            self._texts.pop(oldest, None)
            self._count[oldest] -= 1
            if not self._count[oldest]:
                del self._count[oldest]

    def text(self, salt: str | None) -> Int32s:
        """The latest answers under `salt`, one behind the other, `MAX_TEXT` tokens at the most."""
        known = self._texts.get(salt)
        if known is None:
            known = self._texts[salt] = self._joined(salt) if salt in self._count else np.empty(0, dtype=np.int32)
        return known

    def _joined(self, salt: str | None) -> Int32s:
        parts: list[Int32s] = []
        room = MAX_TEXT
        end = np.array([END], dtype=np.int32)
        for of, answer in reversed(self._answers):
            if of != salt:
                continue
            room -= len(answer) + 1
            if room < 0:
                break
            parts += [end, answer]
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)


def match_ends(text: Int32s, context: Int32s) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where the last tokens of `context` occur in `text` with something behind them: (the index behind each place,
    rising; how many tokens match there)."""
    if not len(text) or not len(context):
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
    last = np.flatnonzero(text[:-1] == context[-1])
    lengths = np.ones(len(last), dtype=np.intp)
    left = np.arange(len(last))
    for number in range(2, len(context) + 1):
        begin = last[left] - (number - 1)
        left = left[(begin >= 0) & (text[begin] == context[-number])]
        if not len(left):
            break
        lengths[left] = number
    return last + 1, lengths


def continuation(text: Int32s, ends: NDArray[np.intp], most: int, min_prob: float) -> Draft:
    """What follows most often at `ends` in `text`, token by token, of equals what did so last; while the share of those
    places that it is true of is `min_prob` at least."""
    tokens: list[int] = []
    score, prob = 0.0, 1.0
    while len(tokens) < most and len(ends):
        following = text[ends]
        if len(ends) == 1:
            best, share = int(following[0]), 1.0
        else:
            # The first of each in reverse is the last.
            each, latest, counts = np.unique(following[::-1], return_index=True, return_counts=True)
            place = np.lexsort((latest, -counts))[0]
            best, share = int(each[place]), counts[place] / len(ends)
        prob *= share
        if best == END or prob < min_prob:
            break
        tokens.append(best)
        score += prob
        ends = ends[following == best] + 1
        ends = ends[ends < len(text)]
    return Draft(tokens, score)
