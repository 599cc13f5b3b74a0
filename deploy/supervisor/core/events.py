"""What the fleet is told and what it orders."""

from __future__ import annotations

from msgspec import Struct

from deploy.supervisor.core.plan import Seat
from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import Lifecycle
from shared.messages.supervisor import ScaleAnswer


class Spawned(Struct, frozen=True):
    instance: InstanceId
    pid: int


class Exited(Struct, frozen=True):
    instance: InstanceId
    status: int
    """As subprocess gives it: negative for a signal."""


class Heard(Struct, frozen=True):
    lifecycle: Lifecycle


class Ticked(Struct, frozen=True):
    """Time went on."""


class ScaleAsked(Struct, frozen=True):
    service: str
    count: int


class Stalled(Struct, frozen=True):
    """These processes make no progress; they get no chance to say goodbye."""

    instances: tuple[InstanceId, ...]


class StopAsked(Struct, frozen=True):
    """The first asks for an orderly stop, the second for a fast one, the third kills."""


class RanksCalled(Struct, frozen=True):
    """The first host starts the ranks of an engine: ours start anew, and meet the others there."""

    engine: EngineId
    rendezvous: str


class RanksLost(Struct, frozen=True):
    """A rank of the engine has ended on another host."""

    engine: EngineId


Event = RanksCalled | RanksLost | Spawned | Exited | Heard | Ticked | ScaleAsked | Stalled | StopAsked


class Start(Struct, frozen=True):
    seat: Seat
    new_rendezvous: bool
    """The first rank of an engine to start: the ranks meet at a new address."""
    device: int | None
    """See `Member.device`."""


class Terminate(Struct, frozen=True):
    """Ask the process to finish what it has, and end."""

    instance: InstanceId


class Kill(Struct, frozen=True):
    instance: InstanceId


class Announce(Struct, frozen=True):
    """Tell everybody in the name of a process that cannot any more."""

    lifecycle: Lifecycle


class Answer(Struct, frozen=True):
    """To whoever asked to scale."""

    answer: ScaleAnswer


class GiveUp(Struct, frozen=True):
    """The start has failed; the stack must end."""

    instance: InstanceId
    status: int


Command = Start | Terminate | Kill | Announce | Answer | GiveUp
