"""Who is alive, as one process sees it: built from lifecycle messages. Pure: time comes as an argument.

Gateways and coordinators hold one each. It judges liveness on the bus's liveness clock, so that a bus that is away
kills nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle, Phase, Service

SILENCE = 2.0
"""Seconds without a lifecycle message after which an instance counts as gone: four heartbeats."""

Key = tuple[Service, InstanceId]


class Gone(NamedTuple):
    """An instance that is not what it was: stopped, silent, or started anew under the same name."""

    last: Lifecycle
    reason: str


class Registry:
    """Owns the last lifecycle message of each live instance, and when it came."""

    def __init__(self, silence: float = SILENCE) -> None:
        self._silence = silence
        self._entries: dict[Key, tuple[Lifecycle, float]] = {}

    def heard(self, message: Lifecycle, now: float) -> Gone | None:
        """Takes one message in. Answers with the instance's former life where that has just ended."""
        key = (message.service, message.instance)
        before = self._entries.get(key)
        if message.phase in ("stopped", "failed"):
            if before is not None and before[0].incarnation == message.incarnation:
                del self._entries[key]
                return Gone(before[0], message.phase)
            return None
        self._entries[key] = (message, now)
        if before is not None and before[0].incarnation != message.incarnation:
            return Gone(before[0], "restarted")
        return None

    def expire(self, now: float) -> list[Gone]:
        """Forgets whoever was silent for too long, and answers with them."""
        silent = [key for key, (_, heard) in self._entries.items() if now - heard > self._silence]
        return [Gone(self._entries.pop(key)[0], f"silent for {self._silence:g} s") for key in silent]

    def get(self, service: Service, instance: InstanceId) -> Lifecycle | None:
        entry = self._entries.get((service, instance))
        return entry[0] if entry else None

    def all(self, service: Service | None = None, phase: Phase | None = None) -> Iterator[Lifecycle]:
        """Every live instance, of one service or phase only where asked."""
        for message, _ in self._entries.values():
            if service in (None, message.service) and phase in (None, message.phase):
                yield message
