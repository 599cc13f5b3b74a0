"""All faults by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.chaos.faults.connections import CutConnection, RedisLoss, RedisSession, SilentConnection, SlowConnection
from deploy.chaos.faults.fault import Fault
from deploy.chaos.faults.machine import FullDisk, LinkDown, LowRate, MissingWeights, TruncatedWeights
from deploy.chaos.faults.operations import BadRequests, ScaleAndDrain
from deploy.chaos.faults.processes import Kill, Pause, Stop, Terminate
from deploy.chaos.stack import Need
from deploy.errors import CommandError

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Kill(),
        Stop(),
        Pause(),
        Terminate(),
        CutConnection(),
        SilentConnection(),
        SlowConnection(),
        RedisSession(),
        RedisLoss(),
        ScaleAndDrain(),
        BadRequests(),
        MissingWeights(),
        TruncatedWeights(),
        LinkDown(),
        LowRate(),
        FullDisk(),
    )
}


def chosen_faults(names: str | None) -> list[Fault]:
    """Those of a list such as `kill,stop`; all of them without a list. Raises CommandError."""
    wanted = list(FAULTS) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in FAULTS:
            raise CommandError(f"--faults {names}: {name!r} is none of {', '.join(FAULTS)}", status=2)
    return [FAULTS[name] for name in dict.fromkeys(wanted)]


def needs_of(faults: Sequence[Fault]) -> frozenset[Need]:
    """What their stack has to be made with."""
    return frozenset[Need]().union(*(fault.needs for fault in faults))
