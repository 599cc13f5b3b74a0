"""One process of the stack, as the fleet sees it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from deploy.supervisor.core.plan import Seat
from shared.messages.lifecycle import Lifecycle, Phase

State = Literal["waiting", "running", "ending"]
"""waiting: no process, one starts when due. running: a wanted process. ending: a process that was told to end."""

ALLOWED: dict[State, frozenset[State]] = {
    "waiting": frozenset({"running"}),
    "running": frozenset({"waiting", "ending"}),
    "ending": frozenset({"waiting"}),
}
"""A member that is wanted no more is dropped from the fleet when its process is gone, or at once while it waits."""


@dataclass(slots=True)
class Member:
    """Owned by the fleet. `heard` and `ready_once` belong to the present process, `failures` to the seat."""

    seat: Seat
    device: int | None = None
    """Of a worker: which of this host's devices it computes on, counted from 0."""
    state: State = "waiting"
    wanted: bool = True
    pid: int | None = None
    due: float = 0.0
    """When a waiting member may start."""
    deadline: float | None = None
    """When an ending member is killed."""
    spawned: float = 0.0
    failures: int = 0
    """Deaths in a row."""
    restarts: int = 0
    heard: Lifecycle | None = None

    @property
    def phase(self) -> Phase | None:
        """As the process itself last said; None before its first word."""
        return self.heard.phase if self.heard else None

    @property
    def is_ready(self) -> bool:
        return self.state == "running" and self.phase == "ready"

    def move(self, state: State) -> None:
        if state not in ALLOWED[self.state]:
            raise ValueError(f"{self.seat.instance}: {self.state} may not become {state}")
        self.state = state


def first_free(taken: Container[int | None], count: int) -> int:
    """The lowest number from which `count` in a row are free."""
    first = following = 0
    while following < first + count:
        following += 1
        if following - 1 in taken:
            first = following
    return first
