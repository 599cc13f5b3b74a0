"""The grammars of the sequences that a rank holds: their masks before a draw, their next state behind it."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from services.worker.guided import meters
from services.worker.guided.library import GrammarLibrary
from services.worker.guided.matcher import Bits, Matcher, allows
from services.worker.sampling.masks import Mask, words
from shared.messages.worker import NewSequence
from shared.tokens import unpack

Int32s = NDArray[np.int32]
Slots = NDArray[np.intp]


class GuidedSequences:
    """Owns the matchers, by slot. Belongs to the compute thread of the rank that samples; without grammars it costs
    nothing."""

    def __init__(self, library: GrammarLibrary, vocab_size: int) -> None:
        self._library = library
        self._words = words(vocab_size)
        self._matchers: dict[int, Matcher] = {}
        self._masks: dict[int, Bits] = {}
        """[1 + drafts, words] the rows that each sequence's next tokens are drawn under."""

    def __len__(self) -> int:
        return len(self._matchers)

    def clear(self) -> None:
        self._matchers.clear()
        self._masks.clear()

    def add(self, slot: int, new: NewSequence) -> None:
        """A new sequence; what it has put out already is replayed."""
        if new.grammar is None:
            return
        matcher = self._library.matcher(new.grammar, new.stop_token_ids)
        matcher.replay(unpack(new.tokens)[new.prompt_length :])
        self._matchers[slot] = matcher

    def release(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self._masks.pop(slot, None)

    def followed(self, slots: Slots) -> Slots:
        """Those of `slots` whose sequences have a grammar."""
        return np.array([slot for slot in slots.tolist() if slot in self._matchers], dtype=np.intp)

    def forced(self, slot: int, most: int) -> list[int]:
        """Tokens that the sequence will probably go on with, as its grammar leaves it no other text."""
        matcher = self._matchers.get(slot)
        return [] if matcher is None else matcher.forced(most)

    def mask(self, slots: Slots, drafted: Int32s, drafts: Int32s) -> Mask | None:
        """What may be drawn next by those sequences that a grammar binds. Best called while the device computes.

        slots [Q]; drafts [Q, K], `drafted` [Q] of each row. The mask is of rows that lie 1 + `drafted` for each
        sequence, one behind the other.
        """
        if not self._matchers:
            return None
        begun = time.perf_counter()
        rows: list[NDArray[np.intp]] = []
        bits: list[Bits] = []
        first = (np.cumsum(drafted + 1) - (drafted + 1)).tolist()
        for place, slot in enumerate(slots.tolist()):
            matcher, count = self._matchers.get(slot), int(drafted[place])
            if matcher is None or not (matcher.binds or count):
                continue
            own = np.empty((1 + count, self._words), dtype=np.int32)
            matcher.fill(own, drafts[place, :count].tolist())
            self._masks[slot] = own
            rows.append(np.arange(first[place], first[place] + 1 + count))
            bits.append(own)
        meters.MASK_SECONDS.inc(time.perf_counter() - begun)
        meters.MASKS.inc(sum(map(len, bits)))
        return Mask(np.concatenate(rows), np.concatenate(bits)) if rows else None

    def take(self, slots: Slots, counts: Int32s, tokens: Int32s) -> None:
        """The tokens just drawn: the first `counts` [Q] of each row of `tokens` [Q, K + 1]. Raises MatcherBroken."""
        if not self._matchers:
            return
        for place, slot in enumerate(slots.tolist()):
            if (matcher := self._matchers.get(slot)) is not None:
                mask = self._masks.pop(slot, None)
                for ahead, token in enumerate(tokens[place, : counts[place]].tolist()):
                    matcher.take(token, allowed=mask is not None and allows(mask[ahead], token))
