"""Drafts what grammars force: text that alone can follow, in the tokens that the model would probably choose for it.

They are verified like any drafts, so the output is what it would be without them: where the model prefers to spell the
text in other tokens, its own are taken.
"""

from __future__ import annotations

import numpy as np

from services.worker.guided.guided_sequences import GuidedSequences
from services.worker.speculation.proposer import Asked, Drafts, WithoutMemory

MOST = 16
"""Tokens in one step. Names of properties are seldom longer, with what stands around them."""


class ForcedTokens(WithoutMemory):
    """See :class:`services.worker.speculation.proposer.Proposer`."""

    most = MOST

    def __init__(self, guided: GuidedSequences) -> None:
        self._guided = guided

    def propose(self, asked: Asked) -> Drafts:
        if not len(self._guided):
            return Drafts.none(asked)
        limits = np.minimum(asked.most, MOST).tolist()
        forced = [
            self._guided.forced(slot, most) if most else []
            for slot, most in zip(asked.slots.tolist(), limits, strict=True)
        ]
        counts = np.array([len(tokens) for tokens in forced], dtype=np.int32)
        drafts = np.zeros((len(forced), int(counts.max(initial=0))), dtype=np.int32)
        for row, tokens in enumerate(forced):
            drafts[row, : len(tokens)] = tokens
        return Drafts(drafts, counts)
