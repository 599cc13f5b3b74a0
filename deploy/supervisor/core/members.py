"""One process of the stack, as the supervisor sees it, and when it is started again after a death."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from deploy.supervisor.core.plan import ProcessSpec
from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle, Phase
from shared.reliability.retry import Backoff

State = Literal["waiting", "running", "ending"]
"""waiting: no process, one starts when due. running: a wanted process. ending: a process that was sent SIGTERM."""

TRANSITIONS: dict[State, frozenset[State]] = {
    "waiting": frozenset({"running"}),
    "running": frozenset({"waiting", "ending"}),
    "ending": frozenset({"waiting"}),
}
"""A member that is no longer wanted is removed when its process has ended, or at once while it waits."""


@dataclass(slots=True)
class SupervisedProcess:
    """A process of the stack, owned by the supervisor. `pid` and `lifecycle` belong to the running program; `failures`
    outlives it."""

    process: ProcessSpec
    device: int | None = None
    """Index of the device on this host that a worker computes on, from 0; None for other services."""
    state: State = "waiting"
    wanted: bool = True
    pid: int | None = None
    due: float = 0.0
    """When a waiting member may start, in seconds of the supervisor's clock."""
    deadline: float | None = None
    """When an ending member is killed."""
    ready_since: float | None = None
    """When the present program was first ready."""
    failures: int = 0
    """Deaths in a row."""
    status: int | None = None
    """Exit status of the last of them."""
    restarts: int = 0
    lifecycle: Lifecycle | None = None
    hosted: dict[InstanceId, Lifecycle] = field(default_factory=dict)
    """What the other actors of its process said last."""
    superseded: bool = False
    """Whether its engine ends once others are ready in its place."""
    standby: bool = False
    """Whether its engine is to stand by: loaded, without requests."""
    stood_by: bool = False
    """Of a scheduler that is to stand by: whether it has said that it does."""

    @property
    def phase(self) -> Phase | None:
        """The phase that the process last published; None before its first lifecycle."""
        return self.lifecycle.phase if self.lifecycle else None

    @property
    def is_ready(self) -> bool:
        """Whether it runs and has published that it takes requests, or that it stands by and would."""
        if self.state != "running" or self.lifecycle is None:
            return False
        if any(name not in self.hosted or self.hosted[name].phase != "ready" for _, name, *_ in self.process.hosted):
            return False
        return self.lifecycle.phase == "ready" or self.lifecycle.is_standby

    def move(self, state: State) -> None:
        """Changes the state. Raises ValueError for a transition that is not in TRANSITIONS."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self.process.instance}: {self.state} may not become {state}")
        self.state = state


def ready_once(members: Iterable[SupervisedProcess]) -> frozenset[InstanceId]:
    """The processes whose present program was ready, then or since."""
    return frozenset(member.process.instance for member in members if member.ready_since is not None)


def with_its_engine(members: Sequence[SupervisedProcess], instance: InstanceId) -> tuple[InstanceId, ...]:
    """A process, and behind it those that cannot go on without it: the others of its engine."""
    processes = [member.process for member in members]
    engine = next((each.engine for each in processes if each.instance == instance and each.service != "kvstore"), None)
    if engine is None:
        return (instance,)
    ours = [each.instance for each in processes if each.engine == engine and each.service != "kvstore"]
    return (instance, *(each for each in ours if each != instance))


def first_free(taken: Container[int | None], count: int) -> int:
    """The lowest number from which `count` in a row are free."""
    first = following = 0
    while following < first + count:
        following += 1
        if following - 1 in taken:
            first = following
    return first


# When a process that died is started again: at once the first time, then after growing, bounded pauses.


class RestartPolicy(Struct, frozen=True, kw_only=True):
    """Pauses before restarts, which double with each failure in a row."""

    first_pause: float = 0.25
    """Seconds before the second restart in a row."""
    max_pause: float = 60.0
    healthy_after: float = 30.0
    """Seconds of being ready after which earlier failures are forgotten; how long it took to start does not count."""
    failures_until_failed: int = 6
    """Deaths in a row after which a process counts as failed: it is still tried again, and people are told."""
    failures_at_start: int = 3
    """Deaths in a row during start-up after which the start is given up."""

    def pause(self, failures: int) -> float:
        """Seconds to wait after that many deaths in a row, counted from 1."""
        return Backoff(self.first_pause, self.max_pause).pause(failures - 2) if failures > 1 else 0.0
