"""Events that the supervisor's core handles, and the commands that it answers with."""

from __future__ import annotations

from msgspec import Struct

from deploy.supervisor.core.plan import ProcessSpec
from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import Lifecycle
from shared.messages.supervisor import ScaleReply


class ProcessStarted(Struct, frozen=True):
    """A process that was to be started runs."""

    instance: InstanceId
    pid: int


class ProcessExited(Struct, frozen=True):
    """A process has ended, or could not be started."""

    instance: InstanceId
    status: int
    """As subprocess gives it: negative for a signal."""


class LifecycleReceived(Struct, frozen=True):
    """A process said what its phase and load are."""

    lifecycle: Lifecycle


class ClockTick(Struct, frozen=True):
    """Time went on."""


class ScaleRequested(Struct, frozen=True):
    """A request for `count` instances of a service, or engines of a pool."""

    service: str
    count: int


class ProcessesStalled(Struct, frozen=True):
    """These processes make no progress; they get no chance to say goodbye."""

    instances: tuple[InstanceId, ...]


class StopRequested(Struct, frozen=True):
    """The first asks for an orderly stop, the second for a fast one, the third kills."""


class RanksRequested(Struct, frozen=True):
    """The first host starts the ranks of an engine: ours start anew, and meet the others there."""

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
)


class StartProcess(Struct, frozen=True):
    """Start this process."""

    process: ProcessSpec
    new_rendezvous: bool
    """The first rank of an engine to start: the ranks meet at a new address."""
    device: int | None
    """See `Member.device`."""


class TerminateProcess(Struct, frozen=True):
    """Ask the process to finish what it has, and end."""

    instance: InstanceId


class KillProcess(Struct, frozen=True):
    """Kill the process and its whole group."""

    instance: InstanceId


class AnnounceDeath(Struct, frozen=True):
    """Announce the end of a process that can no longer do so itself."""

    lifecycle: Lifecycle


class ReplyToScale(Struct, frozen=True):
    """To the sender of the scale request."""

    answer: ScaleReply


class AbortStart(Struct, frozen=True):
    """The start has failed; the stack must end."""

    instance: InstanceId
    status: int


Command = StartProcess | TerminateProcess | KillProcess | AnnounceDeath | ReplyToScale | AbortStart
