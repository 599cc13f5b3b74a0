"""The step that is being planned: what it holds so far, and what else it has room for."""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.core.limits import Limits
from services.scheduler.core.new_sequences import new_size
from services.scheduler.core.sequence import Sequence
from shared.ids import SequenceId
from shared.messages.worker import MOST_SCORED, MOST_TOLD, Work


class Started(NamedTuple):
    """A sequence that enters the engine, and how many of its tokens were cached."""

    sequence: Sequence
    cached: int


class NextStep:
    """Made anew for each step, and filled by whoever plans a part of it."""

    __slots__ = (
        "_max_new_bytes",
        "budget",
        "drafts",
        "extras",
        "filled",
        "handing",
        "new_bytes",
        "samples",
        "scores",
        "started",
        "told",
        "work",
    )

    def __init__(self, limits: Limits) -> None:
        self._max_new_bytes = limits.max_new_bytes
        self.work: list[Work] = []
        self.budget = limits.max_batch_tokens
        """Tokens that it may still compute."""
        self.samples = 0
        """Sequences that draw in it."""
        self.drafts = 0
        """Drafts that it may still hold."""
        self.extras: dict[SequenceId, int] = {}
        """Tokens beyond the first that each sequence may yield."""
        self.scores, self.told = MOST_SCORED, MOST_TOLD
        """Prompt tokens that it may still score, and log-probabilities that it may still tell of them."""
        self.started: list[Started] = []
        self.new_bytes = 0
        """About what these take on the wire."""
        self.handing: list[Sequence] = []
        """Those whose only token it draws: the next ones come from another engine."""
        self.filled: list[Sequence] = []
        """Sequences that may have filled a block."""

    def has_room_for_news_of(self, sequence: Sequence) -> bool:
        """A single newcomer always may come."""
        return not self.started or self.new_bytes + new_size(sequence) <= self._max_new_bytes

    def introduce(self, sequence: Sequence) -> bool:
        """Has the workers told of it; False where there is no room for its tokens."""
        if not self.has_room_for_news_of(sequence):
            return False
        self.new_bytes += new_size(sequence)
        sequence.introduced = True
        self.started.append(Started(sequence, sequence.planned))
        return True

    @property
    def room_for_news(self) -> int:
        """Bytes that something else that is new may take."""
        return self._max_new_bytes - self.new_bytes
