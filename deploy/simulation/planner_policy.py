"""The planner as a scaling policy: the same core as `baton plan`, on virtual time."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.simulation.device_profile import profile_simulated
from deploy.simulation.engine import EngineKit
from deploy.simulation.fleet import FleetView, ScalingLimits
from services.planner.core.load_meter import FleetObservation
from services.planner.core.planner import FleetPlanner, FleetProfiles
from services.planner.core.predictors import PredictorName, make_predictor
from services.planner.core.scaling_guard import PlannerLimits
from services.planner.core.sizing import LatencyTargets
from shared.messages.lifecycle import Role
from shared.messages.supervisor import PlannerDecision


class PlannerScaling:
    """Owns a planner of plain engines, or of pools that prefill and decode, and what it has decided."""

    def __init__(self, planner: FleetPlanner) -> None:
        self.decisions: list[PlannerDecision] = []
        self._planner = planner

    @property
    def interval(self) -> float:
        """As `ScalingPolicy` has it."""
        return self._planner.limits.interval

    def wanted(self, view: FleetView) -> Mapping[Role, int]:
        """As `ScalingPolicy` has it."""
        reports = {load.id: load.report for load in view.engines}
        decision = self._planner.decide(FleetObservation(reports, view.present, view.queued), view.now)
        self.decisions.append(decision)
        return {pool.role: pool.target for pool in decision.pools}


def planner_scaling(
    kit: EngineKit, gpus: int, targets: LatencyTargets, limits: ScalingLimits, predictor: PredictorName, season: float
) -> PlannerScaling:
    """A planner of engines made from `kit` with `gpus` devices each, whose profile is measured here: of its pools,
    where it has prefill engines. `season`: seconds after which a seasonal load repeats itself. Raises ValueError for a
    season of too few intervals."""
    planner_limits = PlannerLimits(
        minimum=limits.minimum,
        maximum=limits.maximum,
        interval=limits.interval,
        start_seconds=limits.start_seconds,
        stabilization=limits.stabilization,
    )
    profile = profile_simulated(kit, gpus)
    profiles = FleetProfiles(profile, profile if kit.pools.prefill else None)
    return PlannerScaling(
        FleetPlanner(profiles, targets, planner_limits, make_predictor(predictor, round(season / limits.interval)))
    )
