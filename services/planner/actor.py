"""The planner's shell: hears the fleet, asks the core at every interval, says what it decided, and has it done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from services.planner import metrics
from services.planner.config import PlannerSettings
from services.planner.core.fleet_watch import FleetWatch
from services.planner.core.host_spread import Host, spread
from services.planner.core.planner import FleetPlanner, FleetProfiles
from services.planner.core.profile import ProfileMismatch
from services.planner.fleet_scaler import AdminScaler, FleetScaler, ScalingFailed, ScalingRefused
from shared import topics
from shared.bus import Bus, BusError
from shared.messages.lifecycle import Lifecycle, LifecycleRequest, Role
from shared.messages.supervisor import PlannerDecision, PoolDecision
from shared.models.profile_file import ProfileFile

POOLS: Mapping[Role, str] = {"mixed": "engines", "prefill": "prefill", "decode": "decode"}
"""What `admin.scale` calls each role's engines."""


class FleetActor:
    """Owns the planner of a running fleet. It is a client of the bus with an operator's rights: it hears lifecycles,
    and asks for what `baton scale` asks for, by which engines are drained before they stop.

    It keeps nothing: one that starts anew learns from what it hears, and drains nothing before it has watched for the
    whole stabilization window.
    """

    def __init__(
        self,
        bus: Bus,
        settings: PlannerSettings,
        say: Callable[[PlannerDecision], None],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        scaler: FleetScaler | None = None,
        measured: ProfileFile | None = None,
    ) -> None:
        """`say` shows a decision, `note` a sentence; `scaler` does it, None: the coordinators on the bus. `measured`: a
        profile of such engines, instead of what workers report of their steps."""
        self._scaler: FleetScaler = scaler or AdminScaler(bus)
        self._bus = bus
        self._settings = settings
        self._say = say
        self._note = note
        self._clock = clock
        self._watch = FleetWatch(measured)
        self._mismatch = ""
        self._planner: FleetPlanner | None = None
        self._roles: tuple[Role, ...] = ()

    async def run(self) -> None:
        """Until it is cancelled. Raises ValueError for a budget in which no engine of the fleet fits."""
        await self._bus.subscribe(topics.lifecycles(), self._hear)
        await self._bus.publish(topics.lifecycle_requests(), LifecycleRequest())
        await self._bus.flush()
        while True:
            await asyncio.sleep(self._settings.interval_s)
            await self.decide()

    async def _hear(self, life: Lifecycle) -> None:
        self._watch.record(life, self._clock())

    async def decide(self) -> PlannerDecision | None:
        """One decision, made known and done; None while too little is known of the engines to make one."""
        now = self._clock()
        seen, live = self._watch.observe(now), self._watch.profiles()
        measured = self._measured()
        profiles = measured or live
        planner = self._planner if profiles is None else self._planner_of(profiles)
        if planner is None:
            self._note(f"learning how long steps take: {self._watch.steps} seen")
            return None
        planner.fallback = None if measured is None else live
        # A prediction may take a second of computing.
        decision = replace(await asyncio.to_thread(planner.decide, seen, now), acts=self._settings.act)
        if self._mismatch:
            decision = replace(decision, profile_note=self._mismatch)
        metrics.show(decision)
        self._say(decision)
        try:
            await self._bus.publish(topics.planner_decisions(), decision)
        except BusError as error:
            self._note(f"the bus does not take the decision: {error}")
        for pool in decision.changes:
            await self._change(pool)
        return decision

    def _measured(self) -> FleetProfiles | None:
        """The measured profile, where it is of the engines that run; what differs is said once."""
        try:
            found, mismatch = self._watch.measured(), ""
        except ProfileMismatch as error:
            found, mismatch = None, str(error)
        if mismatch and mismatch != self._mismatch:
            self._note(f"the profile is of other engines ({mismatch}): workers' reports count instead")
        self._mismatch = mismatch
        return found

    def _planner_of(self, profiles: FleetProfiles) -> FleetPlanner:
        """The planner, with what is known by now; another one where the fleet has other pools than before."""
        settings = self._settings
        if self._planner is None or profiles.roles != self._roles:
            self._planner = FleetPlanner(profiles, settings.targets(), settings.limits(), settings.predictor())
            self._roles = profiles.roles
        self._planner.profiles = profiles
        return self._planner

    async def _change(self, pool: PoolDecision) -> None:
        """Asks for as many engines; what is refused is asked for again at the next decision."""
        if not self._settings.act:
            metrics.DECISIONS.labels("dry run").inc()
            return
        for host, count in self._sizes(pool).items():
            named = f"{POOLS[pool.role]}={count}" + (f" on {host}" if host is not None else "")
            try:
                await self._scaler.scale(POOLS[pool.role], count, host)
            except ScalingRefused as error:
                metrics.DECISIONS.labels("refused").inc()
                self._note(f"{named} is refused: {error}")
            except ScalingFailed as error:
                metrics.DECISIONS.labels("failed").inc()
                self._note(f"{named} is not answered: {error}")
            else:
                metrics.DECISIONS.labels("done").inc()

    def _sizes(self, pool: PoolDecision) -> dict[Host, int]:
        """What each host that is concerned is asked for."""
        if self._scaler.places_engines:
            return {None: pool.target}
        present = self._watch.by_host(pool.role)
        keep = 0 if pool.role == "prefill" else 1  # somebody there must finish what is begun
        wanted = spread(present, pool.target, most=self._settings.max_engines_per_host, keep=keep)
        if sum(wanted.values()) < pool.target:
            self._note(f"{POOLS[pool.role]}: no host has room for more than {sum(wanted.values())}")
        return {host: count for host, count in wanted.items() if count != present[host]}
