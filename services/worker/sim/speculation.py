"""Drafts that an imagined model accepts at a chosen rate. Which ones depends on seed and position only."""

from __future__ import annotations

from msgspec import Struct

from services.worker.sim.vocabulary import drawn

_OTHER_DRAWS = 0x5851F42D4C957F2D
"""Added to the seed, so that whether a draft is accepted has nothing to do with which token it is."""


class SimSpeculation(Struct, frozen=True):
    most: int = 0
    """Drafts for one sequence and step."""
    acceptance: float = 0.7
    """Probability that a draft is accepted where all before it were."""

    def accepted(self, seed: int, position: int, drafts: int) -> int:
        """How many of the `drafts` from output position `position` on."""
        for count in range(drafts):
            if drawn(seed + _OTHER_DRAWS, position + count) >= self.acceptance * 2**64:
                return count
        return drafts
