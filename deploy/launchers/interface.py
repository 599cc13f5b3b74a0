"""What starts and stops a stack's processes, as those who decide how many there shall be see it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PoolChange(NamedTuple):
    """What a change of a pool's size leads to; both are empty where the pool had that size."""

    started: tuple[str, ...]
    """Instances that are being started."""
    stopping: tuple[str, ...]
    """Instances that drain, and then end."""
    superseded: tuple[str, ...] = ()
    """Instances that do so once all that are being started are ready."""


class Launcher(Protocol):
    """Owns nothing: whoever runs the processes knows how many there are."""

    async def scale(self, pool: str, count: int) -> PoolChange:
        """Makes a pool (`deploy.supervisor.core.plan.SCALABLE`) have `count` instances. Returns once that is decided,
        not once they are ready. Raises CommandError with the reason where it is refused, or nobody answers in time."""
