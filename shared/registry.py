"""Which instances are alive, as one process sees it from their lifecycle messages. Pure: time is an argument.

Gateways and coordinators hold one each. It judges liveness by the bus's liveness clock, so that an outage of the bus
makes no instance count as dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from shared.ids import InstanceId, RequestId
from shared.messages.gateway import Death
from shared.messages.lifecycle import HEARTBEAT_SECONDS, Lifecycle, Phase, Service

SILENCE = 4 * HEARTBEAT_SECONDS
"""Seconds without a lifecycle message after which an instance counts as gone, unless it promised them less often."""
KEEP_ALIVES = 2
"""How many of the messages that it promised may be missing."""

InstanceKey = tuple[Service, InstanceId]


class InstanceGone(NamedTuple):
    """One run of an instance that has ended: stopped, failed, silent, or replaced by a restart under the same name."""

    last: Lifecycle
    """What it said before its end; `load`: the requests that it left."""
    reason: str

    @property
    def died(self) -> bool:
        """Whether its process died, as far as is known: it was neither stopped nor only silent."""
        return self.reason in ("failed", "restarted")

    def death_of(self, request: RequestId) -> Death | None:
        """How a request that it had was there when it died; None where it is no suspect in that."""
        isolated = self.last.isolated
        if not self.died or isolated not in (None, request):
            return None
        return "beside others" if isolated is None else "alone"


class Registry:
    """Owns the last lifecycle message of each live instance, and when it came."""

    def __init__(self, silence: float = SILENCE) -> None:
        self._silence = silence
        self._entries: dict[InstanceKey, tuple[Lifecycle, float]] = {}

    def record_lifecycle(self, message: Lifecycle, now: float) -> InstanceGone | None:
        """Counts one message in. Returns the instance's former life where that has just ended."""
        key = (message.service, message.instance)
        before = self._entries.get(key)
        if message.phase in ("stopped", "failed"):
            if before is not None and before[0].incarnation == message.incarnation:
                del self._entries[key]
                return InstanceGone(replace(before[0], load=message.load), message.phase)
            return None
        self._entries[key] = (message, now)
        if before is not None and before[0].incarnation != message.incarnation:
            return InstanceGone(before[0], "restarted")
        return None

    def expire(self, now: float) -> list[InstanceGone]:
        """Forgets the instances that were silent for too long, and returns them."""
        silent = [key for key, (life, received) in self._entries.items() if now - received > self._patience(life)]
        gone = [self._entries.pop(key)[0] for key in silent]
        return [InstanceGone(life, f"silent for {self._patience(life):g} s") for life in gone]

    def _patience(self, life: Lifecycle) -> float:
        return max(self._silence, KEEP_ALIVES * life.keep_alive)

    def get(self, service: Service, instance: InstanceId) -> Lifecycle | None:
        """The last lifecycle message of a live instance; None for one that is not known or gone."""
        entry = self._entries.get((service, instance))
        return entry[0] if entry else None

    def heard_at(self, service: Service, instance: InstanceId) -> float | None:
        """When the last lifecycle message of a live instance came; None for one that is not known or gone."""
        entry = self._entries.get((service, instance))
        return entry[1] if entry else None

    def all(self, service: Service | None = None, phase: Phase | None = None) -> Iterator[Lifecycle]:
        """Every live instance, optionally of one service or phase only."""
        for message, _ in self._entries.values():
            if service in (None, message.service) and phase in (None, message.phase):
                yield message
