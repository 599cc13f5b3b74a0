"""When a process that died is started again: at once the first time, then after growing, bounded pauses."""

from __future__ import annotations

from msgspec import Struct


class RestartPolicy(Struct, frozen=True, kw_only=True):
    first_pause: float = 0.25
    """Seconds before the second restart in a row."""
    longest_pause: float = 10.0
    healthy_after: float = 30.0
    """Seconds of life after which earlier failures are forgotten."""
    failures_at_start: int = 3
    """Deaths in a row during start-up after which the start is given up."""

    def pause(self, failures: int) -> float:
        """Seconds to wait after that many deaths in a row, counted from 1."""
        if failures <= 1:
            return 0.0
        return min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 2, 32))
