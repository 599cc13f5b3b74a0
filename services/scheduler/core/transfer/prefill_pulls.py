"""When a prefill engine asks coordinators for prompts, and for how many tokens of them."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.sequence import Sequence

STEPS_AHEAD = 2
"""Full steps of prompts that an engine wants to have: one that it computes, and one that lies ready."""
REPEAT_SECONDS = 0.5
"""After which a pull is repeated: it may have been lost, or a coordinator is new."""


class PrefillPulls:
    """Owns what was asked for last."""

    def __init__(self, limits: EngineLimits) -> None:
        self._wanted = STEPS_AHEAD * limits.max_batch_tokens
        self._step = limits.max_batch_tokens
        self._sent = 0
        self._sent_at = 0.0

    def due(self, held: Iterable[Sequence], now: float) -> int | None:
        """Prompt tokens to ask for now, beyond those of the requests that the engine holds; None: nothing new."""
        left = sum(max(0, len(sequence.tokens.known) - sequence.tokens.planned) for sequence in held)
        room = max(0, self._wanted - left)
        changed = room - self._sent >= self._step // 2 or (room == 0) != (self._sent == 0)
        if not changed and (room == 0 or now - self._sent_at < REPEAT_SECONDS):
            self._sent = min(self._sent, room)  # what was given since is not to be asked for once more
            return None
        self._sent, self._sent_at = room, now
        return room
