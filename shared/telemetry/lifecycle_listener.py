"""What a stack's processes say of themselves, kept as long as somebody looks at it: the newest word of each and the one
before, from which figures follow. `baton top` and the console listen with it, so that both show the same."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.messages.lifecycle import Lifecycle
from shared.telemetry.stack_figures import Figures, TimedLifecycle, figures

FORGOTTEN_AFTER = 5.0
"""Seconds of silence after which an instance is no longer shown, unless it promised its messages less often."""
ENDED_PHASES = ("stopped", "failed")


class LifecycleListener:
    """Owns the newest lifecycle message of each instance, and the one of an interval ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: dict[str, TimedLifecycle] = {}
        self._shown: dict[str, TimedLifecycle] = {}
        """The newest messages at the latest look that found new ones; figures are computed from these."""
        self._before: dict[str, TimedLifecycle] = {}
        """The messages at the look before that."""

    async def record(self, life: Lifecycle) -> None:
        """Keeps the newest message of each instance; forgets an instance that says that it has ended."""
        if life.phase in ENDED_PHASES:
            self._latest.pop(life.instance, None)
        else:
            self._latest[life.instance] = TimedLifecycle(self._clock(), life)

    def lives(self) -> dict[str, TimedLifecycle]:
        """Returns the newest message of each instance that lives; forgets those that were silent for too long."""
        now = self._clock()
        self._latest = {
            instance: timed for instance, timed in self._latest.items() if timed.at > now - _patience(timed.life)
        }
        return dict(self._latest)

    def look(self) -> Figures:
        """Figures of the time since the previous call; an instance without a new message keeps its former ones."""
        now = self.lives()
        for instance, timed in now.items():
            shown = self._shown.get(instance)
            if shown is not timed:
                self._shown[instance] = timed
                if shown is not None:
                    self._before[instance] = shown
        for former in (self._shown, self._before):
            for instance in former.keys() - now.keys():
                del former[instance]
        return figures(self._before, now)


def _patience(life: Lifecycle) -> float:
    return max(FORGOTTEN_AFTER, 2 * life.keep_alive)
