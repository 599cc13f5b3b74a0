"""The phases of an actor's life, and which may follow which."""

from __future__ import annotations

from shared.messages.lifecycle import Phase

ALLOWED: dict[Phase, frozenset[Phase]] = {
    "starting": frozenset({"ready", "draining", "stopped", "failed"}),
    "ready": frozenset({"starting", "draining", "stopped", "failed"}),
    "draining": frozenset({"ready", "starting", "stopped", "failed"}),
    "stopped": frozenset(),
    "failed": frozenset(),
}
"""ready → starting: what it depends on was lost (an engine without its workers). draining → ready: undrained."""


class IllegalPhase(Exception):
    """A phase that may not follow the present one; the text holds the history."""


class LifecycleTable:
    """Owns an actor's phase and how it came to it."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self._history: list[Phase] = ["starting"]

    def move(self, phase: Phase) -> bool:
        """Enters `phase`; False where it is the present one. Raises IllegalPhase."""
        if phase == self.phase:
            return False
        if phase not in ALLOWED[self.phase]:
            raise IllegalPhase(f"{' → '.join([*self._history, phase])}: {self.phase} may not become {phase}")
        self.phase = phase
        self._history = [*self._history[-15:], phase]
        return True
