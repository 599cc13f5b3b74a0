"""Whether an engine counts as failing: after how much evidence, for how long, and what ends it.

As Envoy's outlier detection has it, each ejection lasts longer than the one before. Pure: time is an argument.
"""

from __future__ import annotations

from shared.messages.lifecycle import EngineHealth

FAULTS_UNTIL_SUSPECT = 2
"""Canaries in a row: a single one that differs is asked for again at once."""
GOOD_UNTIL_CLEARED = 3
"""Canaries in a row."""
MAX_EJECTION = 300.0
"""Seconds."""
HEALTHY_AFTER = 300.0
"""Seconds without suspicion after which earlier ones are forgotten."""
PROBE_INTERVAL = 1.0
"""Seconds between two canaries of a suspect; doubled with each start of its workers that did not help."""
MAX_PROBE_INTERVAL = 60.0


class Suspicion:
    """Owns why the engine is a suspect, since when, and how often it was."""

    def __init__(self, base: float, *, probed: bool) -> None:
        """`base`: seconds that the first ejection lasts at least. `probed`: there are canaries, of which some have to
        be right before it ends."""
        self._base = base
        self._probed = probed
        self.report = EngineHealth()
        """As coordinators, the supervisor and people see it."""
        self.reason: str | None = None
        """What makes it a suspect, for people; None: it is none."""
        self.ejections = 0
        """How often it became a suspect, since it was none for long."""
        self._until = 0.0
        self._faults = 0
        """Canaries in a row with a fault."""
        self._good = 0
        """Canaries in a row without."""
        self._restarts = 0
        """Starts of its workers since it is a suspect."""
        self._cleared_at = 0.0

    def record_canary(self, fault: str | None, now: float) -> None:
        """A canary has ended: `fault` is what was wrong with it, None without a fault."""
        if fault is None:
            self._faults, self._good = 0, self._good + 1
            self.tick(now)
            return
        self._faults, self._good = self._faults + 1, 0
        if self._faults >= FAULTS_UNTIL_SUSPECT:
            self._suspect(f"canary: {fault}", now)
        self._update_report()

    def accuse(self, reason: str, now: float) -> None:
        """Others say why requests should not go to this engine. Of a suspect that is known already."""
        if self.reason is None:
            self._suspect(reason, now)
            self._update_report()

    def record_restart(self) -> None:
        """Its workers are new ones: what the former got wrong says nothing of them."""
        self._faults = self._good = 0
        self._restarts += self.reason is not None
        self._update_report()

    def tick(self, now: float) -> None:
        """Ends the suspicion where its time is over and the last canaries were right; forgets old ones."""
        if self.reason is None:
            if self.ejections and now - self._cleared_at > HEALTHY_AFTER:
                self.ejections = 0
        elif now >= self._until and (not self._probed or self._good >= GOOD_UNTIL_CLEARED):
            self.reason = None
            self._restarts = 0
            self._cleared_at = now
        self._update_report()

    @property
    def probe_interval(self) -> float:
        """Seconds between two canaries while it is a suspect."""
        return float(min(MAX_PROBE_INTERVAL, PROBE_INTERVAL * 2**self._restarts))

    @property
    def doubtful(self) -> bool:
        """Whether the last canary had a fault, and it is no suspect yet."""
        return self.reason is None and self._faults > 0

    def _update_report(self) -> None:
        self.report = EngineHealth(
            suspect=self.reason, ejections=self.ejections, faults=self._faults if self.reason is not None else 0
        )

    def _suspect(self, reason: str, now: float) -> None:
        if self.reason is None:
            self.ejections += 1
            self._good = 0
            self._until = now + min(MAX_EJECTION, self._base * 2 ** min(self.ejections - 1, 16))
        self.reason = reason
