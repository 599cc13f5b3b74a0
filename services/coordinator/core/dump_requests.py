"""When a source is asked for all that it holds: not while an answer is coming, and not again and again."""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import InstanceId

PATIENCE = 2.0
"""Seconds without a part of the answer after which the question counts as lost."""
MOST_PATIENCE = 32.0
"""It doubles with each question in vain, up to this."""
REST = 0.5
"""Seconds between an answer and the next question to the same source."""


@dataclass(slots=True)
class _Source:
    not_before: float | None = None
    """None: it was never asked."""
    patience: float = PATIENCE


class DumpRequests:
    """Owns who is to be asked, and when."""

    def __init__(self) -> None:
        self._sources: dict[InstanceId, _Source] = {}
        self._needed: set[InstanceId] = set()
        self.asked = 0
        """Questions, since the start."""

    def need(self, instance: InstanceId) -> None:
        self._sources.setdefault(instance, _Source())
        self._needed.add(instance)

    def heard(self, instance: InstanceId, now: float) -> None:
        """A part of the answer came; the next is waited for as long."""
        source = self._sources.setdefault(instance, _Source())
        source.not_before = now + PATIENCE

    def met(self, instance: InstanceId, now: float) -> None:
        """All is known of it."""
        if instance in self._needed:
            self._needed.discard(instance)
            self._sources[instance] = _Source(not_before=now + REST)

    def forget(self, instance: InstanceId) -> None:
        self._sources.pop(instance, None)
        self._needed.discard(instance)

    def due(self, now: float) -> list[InstanceId]:
        """Who is to be asked now; each counts as asked."""
        if not self._needed:
            return []
        due = [name for name in sorted(self._needed) if self._may(self._sources[name], now)]
        for name in due:
            source = self._sources[name]
            source.not_before = now + source.patience
            source.patience = min(MOST_PATIENCE, 2 * source.patience)
        self.asked += len(due)
        return due

    @staticmethod
    def _may(source: _Source, now: float) -> bool:
        return source.not_before is None or now >= source.not_before
