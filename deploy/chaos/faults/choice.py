"""All faults by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deploy.chaos.faults.connections import CutConnection, RedisLoss, RedisSession, SilentConnection, SlowConnection
from deploy.chaos.faults.fault import Fault
from deploy.chaos.faults.hostile import Calm, HostileClients
from deploy.chaos.faults.machine import ClockJump, FullDisk, LinkDown, LowRate, MissingWeights, TruncatedWeights
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
        HostileClients(),
        Calm(),
        MissingWeights(),
        TruncatedWeights(),
        LinkDown(),
        LowRate(),
        FullDisk(),
        ClockJump(),
    )
}


def chosen_faults(names: str | None) -> dict[Fault, frozenset[str]]:
    """Those of a list such as `kill,cut:gateway`, each with the targets that were named, without any for all of them;
    all faults without a list. Raises CommandError."""
    found: dict[Fault, frozenset[str]] = {}
    for each in FAULTS if names is None else names.split(","):
        name, colon, target = each.strip().partition(":")
        if name not in FAULTS:
            raise CommandError(f"--faults {names}: {name!r} is none of {', '.join(FAULTS)}", status=2)
        before = found.get(FAULTS[name])
        everything = not colon or (before is not None and not before)
        found[FAULTS[name]] = frozenset() if everything else (before or frozenset()) | {target}
    return found


def needs_of(faults: Iterable[Fault]) -> frozenset[Need]:
    """What their stack has to be made with."""
    return frozenset[Need]().union(*(fault.needs for fault in faults))
