"""Events that the supervisor's core handles, and the commands that it answers with."""

from __future__ import annotations

from msgspec import Struct

from deploy.supervisor.core.plan import ProcessSpec
from shared.ids import EngineId, InstanceId, ModelName
from shared.messages.lifecycle import Lifecycle
from shared.messages.supervisor import ScaleReply


class ProcessStarted(Struct, frozen=True):
    """A process that was to be started runs."""

    instance: InstanceId
    pid: int


class ProcessExited(Struct, frozen=True):
    """A process has ended, or could not be started."""

    instance: InstanceId
    status: int | None
    """As subprocess gives it: negative for a signal; None where a former supervisor had started it."""


class LifecycleReceived(Struct, frozen=True):
    """A process has published its phase and load."""

    lifecycle: Lifecycle


class WorkersReleased(Struct, frozen=True):
    """Workers need not wait any longer for the process that they are forked from: it is ready, or will not be."""


class ClockTick(Struct, frozen=True):
    """Time has passed; deadlines are checked."""


class ScaleRequested(Struct, frozen=True):
    """A request for `count` instances of a service, or engines of a pool."""

    service: str
    count: int
    model: ModelName | None = None
    data_parallel_size: int | None = None
    """Engines of each data-parallel group from now on; None: as many as before."""
    one_group: bool = False
    """Where engines share experts: all of them are to be one group."""


class ProcessesStalled(Struct, frozen=True):
    """These processes make no progress; they are killed without a chance to drain."""

    instances: tuple[InstanceId, ...]
    """The first one does not, and the others cannot go on without it."""


class StopRequested(Struct, frozen=True):
    """The operator wants the stack to end: the first request drains, the second ends quickly, the third kills."""


class RanksRequested(Struct, frozen=True):
    """The first host starts the ranks of an engine: this host's ranks of it start anew and join them at
    `rendezvous`."""

    engine: EngineId
    rendezvous: str


class RanksLost(Struct, frozen=True):
    """A rank of the engine has ended on another host."""

    engine: EngineId


Event = (
    RanksRequested
    | RanksLost
    | ProcessStarted
    | ProcessExited
    | LifecycleReceived
    | ClockTick
    | ScaleRequested
    | ProcessesStalled
    | StopRequested
    | WorkersReleased
)


class StartProcess(Struct, frozen=True):
    """Start a process of the stack."""

    process: ProcessSpec
    new_rendezvous: bool
    """Whether this is the first rank of an engine to start, so that its ranks need a new address to meet at."""
    device: int | None
    """Index of this host's device that a worker computes on; None for other processes. See
    `SupervisedProcess.device`."""
    standby: bool = False
    """Whether its engine is to stand by."""


class TerminateProcess(Struct, frozen=True):
    """Ask the process to finish its open requests and end."""

    instance: InstanceId


class KillProcess(Struct, frozen=True):
    """Kill the process and its whole group."""

    instance: InstanceId


class AnnounceDeath(Struct, frozen=True):
    """Announce the end of a process that can no longer do so itself."""

    lifecycle: Lifecycle


class SetStandby(Struct, frozen=True):
    """Tell a scheduler that its engine stands by from now on, or that it takes requests."""

    instance: InstanceId
    standby: bool


class ReplyToScale(Struct, frozen=True):
    """Reply to the sender of the scale request."""

    answer: ScaleReply


class AbortStart(Struct, frozen=True):
    """The start has failed; the stack must end."""

    instance: InstanceId
    status: int | None


Command = StartProcess | TerminateProcess | KillProcess | AnnounceDeath | SetStandby | ReplyToScale | AbortStart
