"""The grammars of the sequences that a rank holds: masks before a draw, the next state behind it, and forced drafts."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from services.worker.batch.batch import DraftTokens
from services.worker.guided import metrics
from services.worker.guided.library import GrammarLibrary
from services.worker.guided.matcher import Bits, GrammarMatcher, allows
from services.worker.sampling.masks import TokenMask, mask_words
from services.worker.speculation.proposer import DraftRequest, StatelessProposer
from shared.messages.worker import NewSequence
from shared.packing import unpack

Int32s = NDArray[np.int32]
Slots = NDArray[np.intp]


class GuidedSequences:
    """Owns the matchers, by slot. Belongs to the compute thread of the rank that samples; without grammars it costs
    nothing."""

    def __init__(self, library: GrammarLibrary, vocab_size: int) -> None:
        self._library = library
        self._words = mask_words(vocab_size)
        self._matchers: dict[int, GrammarMatcher] = {}
        self._masks: dict[int, Bits] = {}
        """[1 + drafts, words] the rows that each sequence's next tokens are drawn under."""

    def __len__(self) -> int:
        return len(self._matchers)

    def clear(self) -> None:
        """Forgets every sequence and its grammar."""
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
        """Forgets the sequence in `slot`, whether or not it has a grammar."""
        self._matchers.pop(slot, None)
        self._masks.pop(slot, None)

    def with_grammar(self, slots: Slots) -> Slots:
        """The slots among `slots` whose sequences have a grammar."""
        return np.array([slot for slot in slots.tolist() if slot in self._matchers], dtype=np.intp)

    def jump_forward(self, slot: int, most: int) -> list[int]:
        """Tokens that the sequence will probably go on with, as its grammar leaves it no other text."""
        matcher = self._matchers.get(slot)
        return [] if matcher is None else matcher.jump_forward(most)

    def mask(self, slots: Slots, drafted: Int32s, drafts: Int32s) -> TokenMask | None:
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
        metrics.MASK_SECONDS.inc(time.perf_counter() - begun)
        metrics.MASKS.inc(sum(map(len, bits)))
        return TokenMask(np.concatenate(rows), np.concatenate(bits)) if rows else None

    def accept(self, slots: Slots, counts: Int32s, tokens: Int32s) -> None:
        """The tokens just drawn: the first `counts` [Q] of each row of `tokens` [Q, K + 1]. Raises MatcherBroken."""
        if not self._matchers:
            return
        for place, slot in enumerate(slots.tolist()):
            if (matcher := self._matchers.get(slot)) is not None:
                mask = self._masks.pop(slot, None)
                for ahead, token in enumerate(tokens[place, : counts[place]].tolist()):
                    matcher.accept(token, allowed=mask is not None and allows(mask[ahead], token))


# Jump-forward drafts: where a grammar leaves one text only, that text is drafted in the tokens that the model would
# probably choose for it. They are verified like any drafts, so the output is what it would be without them: where the
# model prefers to spell the text in other tokens, its own are taken.


MAX_JUMP_FORWARD = 16
"""Tokens in one step. Names of properties are seldom longer, with the punctuation around them."""


class JumpForwardProposer(StatelessProposer):
    """Drafts what grammars force, see :class:`services.worker.speculation.proposer.Proposer`."""

    most = MAX_JUMP_FORWARD

    def __init__(self, guided: GuidedSequences) -> None:
        self._guided = guided

    def propose(self, request: DraftRequest) -> DraftTokens:
        """Drafts of the sequences that a grammar binds, up to `request.limits` and MAX_JUMP_FORWARD of each."""
        if not len(self._guided):
            return DraftTokens.none(len(request.seq_indices))
        limits = np.minimum(request.limits, MAX_JUMP_FORWARD).tolist()
        forced = [
            self._guided.jump_forward(slot, most) if most else []
            for slot, most in zip(request.seq_indices.tolist(), limits, strict=True)
        ]
        counts = np.array([len(tokens) for tokens in forced], dtype=np.int32)
        drafts = np.zeros((len(forced), int(counts.max(initial=0))), dtype=np.int32)
        for row, tokens in enumerate(forced):
            drafts[row, : len(tokens)] = tokens
        return DraftTokens(drafts, counts)
