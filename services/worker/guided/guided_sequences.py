"""The grammars of the sequences that a rank holds: their masks before a draw, their next state behind it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.guided import meters
from services.worker.guided.library import GrammarLibrary
from services.worker.guided.matcher import Matcher
from services.worker.sampling.masks import Mask, words
from shared.ids import SequenceId
from shared.messages.worker import NewSequence
from shared.tokens import unpack


class GuidedSequences:
    """Owns the matchers. Belongs to the compute thread of the rank that samples; without grammars it costs nothing."""

    def __init__(self, library: GrammarLibrary, vocab_size: int) -> None:
        self._library = library
        self._words = words(vocab_size)
        self._matchers: dict[SequenceId, Matcher] = {}
        self._masks: dict[SequenceId, NDArray[np.int32]] = {}
        """The row that each sequence's next token is drawn under."""

    def __len__(self) -> int:
        return len(self._matchers)

    def clear(self) -> None:
        self._matchers.clear()
        self._masks.clear()

    def add(self, new: NewSequence) -> None:
        """A new sequence; what it has put out before is replayed."""
        if new.grammar is None:
            return
        matcher = self._library.matcher(new.grammar, new.stop_token_ids)
        matcher.replay(unpack(new.tokens)[new.prompt_length :])
        self._matchers[new.sequence] = matcher

    def release(self, sequence: SequenceId) -> None:
        self._matchers.pop(sequence, None)
        self._masks.pop(sequence, None)

    def mask(self, sequences: Sequence[SequenceId]) -> Mask | None:
        """What those of `sequences`, a row each, may draw next whom a grammar binds. Best called while the device
        computes."""
        if not self._matchers:
            return None
        begun = time.perf_counter()
        bound = [(row, sequence) for row, sequence in enumerate(sequences) if self._binds(sequence)]
        bits = np.zeros((len(bound), self._words), dtype=np.int32)
        for place, (_, sequence) in enumerate(bound):
            self._matchers[sequence].fill(bits[place])
            self._masks[sequence] = bits[place]
        meters.MASK_SECONDS.inc(time.perf_counter() - begun)
        meters.MASKS.inc(len(bound))
        return Mask(np.array([row for row, _ in bound], dtype=np.intp), bits) if bound else None

    def take(self, sequences: Sequence[SequenceId], tokens: Sequence[int]) -> None:
        """The tokens just drawn, one for each of `sequences`. Raises MatcherBroken."""
        if not self._matchers:
            return
        for sequence, token in zip(sequences, tokens, strict=True):
            if (matcher := self._matchers.get(sequence)) is not None:
                mask = self._masks.pop(sequence, None)
                matcher.take(token, allowed=mask is not None and _allows(mask, token))

    def _binds(self, sequence: SequenceId) -> bool:
        matcher = self._matchers.get(sequence)
        return matcher is not None and matcher.binds


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    return bool(int(mask[token // 32]) >> (token % 32) & 1)
