"""The fleet as its processes' lifecycle messages show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from services.planner.core.host_spread import Host
from services.planner.core.live_profile import LiveProfile
from services.planner.core.load_meter import FleetObservation
from services.planner.core.planner import FleetProfiles
from services.planner.core.profile import EngineProfile, measured_profile
from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import EngineReport, Lifecycle, Phase, Role, WorkerReport
from shared.models.profile_file import ProfileFile

PRESENT: frozenset[Phase] = frozenset(("starting", "ready"))
FORGOTTEN_AFTER = 5.0
"""Seconds of silence after which a process is not counted any more."""
ROLES_BY_NAME: Mapping[str, Role] = {"engine": "mixed", "prefill": "prefill", "decode": "decode"}
"""What an engine will be, by its name without its number, and without that of a host behind the first."""


HOST_NAME = re.compile(r"(?P<host>.+)-(engine|prefill|decode|kvstore)-\d+")


class _LifecycleRecord(NamedTuple):
    at: float
    life: Lifecycle


class FleetWatch:
    """Owns the newest message of each process, and a live profile of each role's engines."""

    def __init__(self, measured: ProfileFile | None = None) -> None:
        """`measured`: a profile that somebody has made of such engines."""
        self._measured = measured
        self._heard: dict[InstanceId, _LifecycleRecord] = {}
        self._live: dict[Role, LiveProfile] = {}

    @property
    def steps(self) -> int:
        """Steps that the live profiles have seen."""
        return sum(live.steps for live in self._live.values())

    def record(self, life: Lifecycle, now: float) -> None:
        """A process has said how it is."""
        if life.service not in ("scheduler", "worker", "coordinator", "kvstore"):
            return
        if life.phase in ("stopped", "failed"):
            self._forget(life.instance)
            return
        self._heard[life.instance] = _LifecycleRecord(now, life)
        if life.worker is not None and (engine := self._engine(life.worker.engine)) is not None:
            self._live.setdefault(engine.role, LiveProfile()).record(life.instance, life.worker)

    def observe(self, now: float) -> FleetObservation:
        """The fleet at this moment."""
        for instance in [name for name, heard in self._heard.items() if heard.at < now - FORGOTTEN_AFTER]:
            self._forget(instance)
        lives = [heard.life for heard in self._heard.values()]
        schedulers = [life for life in lives if life.service == "scheduler" and not life.standby]
        present: dict[Role, int] = {}
        for life in schedulers:
            role = _role_of(life)
            if role is not None and life.phase in PRESENT:
                present[role] = present.get(role, 0) + 1
        return FleetObservation(
            {EngineId(life.instance): life.engine for life in schedulers if life.engine is not None},
            present,
            sum(life.load for life in lives if life.service == "coordinator"),
        )

    def by_host(self, role: Role) -> dict[Host, int]:
        """A role's present engines, without those that stand by, on each host that has some of this role, or a KV store
        and no engines at all. The first host where there is no such host."""
        counts: dict[Host, int] = {}
        stores, others = set[Host](), set[Host]()
        for life in (heard.life for heard in self._heard.values()):
            host = _host_of(life)
            if life.service == "kvstore":
                stores.add(host)
            elif life.service == "scheduler" and _role_of(life) == role:
                counts[host] = counts.get(host, 0) + (life.phase in PRESENT and not life.standby)
            elif life.service == "scheduler":
                others.add(host)
        return dict.fromkeys(stores - others, 0) | counts or {None: 0}

    def profiles(self) -> FleetProfiles | None:
        """Of what is known of the fleet's engines; None before that is enough. A fleet with prefill engines is
        disaggregated."""
        return self._of(lambda role, engine, worker: self._live[role].profile(engine, worker))

    def measured(self) -> FleetProfiles | None:
        """The measured profile, for the fleet's engines; None without one, and before these were heard. Raises
        ProfileMismatch where some of them are others than those that were profiled."""
        if (file := self._measured) is None:
            return None
        return self._of(lambda role, engine, worker: measured_profile(file, engine, worker))

    def _of(self, make: Callable[[Role, EngineReport, WorkerReport], EngineProfile | None]) -> FleetProfiles | None:
        found = {role: self._profile(role, make) for role in self._live}
        prefill, decode = found.get("prefill"), found.get("decode")
        if "prefill" in found:
            return None if prefill is None or decode is None else FleetProfiles(prefill, decode)
        mixed = found.get("mixed")
        return None if mixed is None else FleetProfiles(mixed)

    def _profile(
        self, role: Role, make: Callable[[Role, EngineReport, WorkerReport], EngineProfile | None]
    ) -> EngineProfile | None:
        for heard in self._heard.values():
            worker = heard.life.worker
            if worker is not None and (engine := self._engine(worker.engine)) is not None and engine.role == role:
                return make(role, engine, worker)
        return None

    def _engine(self, engine: EngineId) -> EngineReport | None:
        heard = self._heard.get(InstanceId(engine))
        return None if heard is None else heard.life.engine

    def _forget(self, instance: InstanceId) -> None:
        self._heard.pop(instance, None)
        for live in self._live.values():
            live.forget(instance)


def _host_of(life: Lifecycle) -> Host:
    """By the names that `baton up` and `baton join` give: `b-engine-1` is on b, `engine-1` on the first host."""
    found = HOST_NAME.fullmatch(life.instance)
    return found["host"] if found is not None else None


def _role_of(life: Lifecycle) -> Role | None:
    if life.engine is not None:
        return life.engine.role
    return ROLES_BY_NAME.get(life.instance.rpartition("-")[0].rpartition("-")[2])
