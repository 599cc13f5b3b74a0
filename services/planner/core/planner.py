"""The planner's decision: observe, correct, predict, size, guard. The steps of NVIDIA Dynamo's SLA planner, with a
queueing model for engines that prefill and decode.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import NamedTuple

from msgspec.structs import replace

from services.planner.core.load_meter import FleetObservation, LoadInterval, LoadMeter, RequestShape
from services.planner.core.predictors import LoadPredictor
from services.planner.core.profile import EngineProfile
from services.planner.core.scaling_guard import PlannerLimits, ScalingGuard
from services.planner.core.sizing import (
    CorrectionFactors,
    FleetSize,
    LatencyForecast,
    LatencyTargets,
    RequestLoad,
    forecast_decode,
    forecast_mixed,
    forecast_prefill,
    size_disaggregated,
    size_mixed,
)
from shared.messages.lifecycle import Role
from shared.messages.supervisor import PlannerDecision, PoolDecision, ProfileSource

MIN_SAMPLES = 20
"""First tokens of an interval below which its means correct nothing."""
CORRECTION_WEIGHT = 0.2
"""Of the newest interval in the moving averages of the correction factors."""
CORRECTION_BOUNDS = (0.5, 2.0)
"""What is further off shows something other than a wrong profile: a fault, or engines that are shared."""
CORRECTED_UTILIZATION = 0.9
"""Nearer to saturation a queue's length says nothing about the profile."""


class FleetProfiles(NamedTuple):
    """Profiles of the fleet's engines, by what they do. One with `decode` is disaggregated."""

    mixed: EngineProfile
    """Or of the prefill engines."""
    decode: EngineProfile | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of the pools that are scaled."""
        return ("mixed",) if self.decode is None else ("prefill", "decode")

    def unknown(self, load: RequestLoad) -> str:
        """What of a load's lengths no table of theirs reaches, for people; empty where all is known."""
        known = (each.unknown(load.prompt, load.context) for each in self if each is not None)
        return next(filter(None, known), "")

    @property
    def source(self) -> ProfileSource:
        """Where they come from."""
        return self.mixed.source

    @property
    def gpus(self) -> int:
        """Devices of an engine, the larger one's."""
        return self.mixed.gpus if self.decode is None else max(self.mixed.gpus, self.decode.gpus)


class FleetPlanner:
    """Owns what the planner has learnt: the load's past, lengths, correction factors, and each pool's guard."""

    def __init__(
        self, profiles: FleetProfiles, targets: LatencyTargets, limits: PlannerLimits, predictor: LoadPredictor
    ) -> None:
        """Raises ValueError for limits that fit no engine of these profiles."""
        self.limits = limits
        self.profiles = profiles
        """Another one of the same pools may be set, once more is known."""
        self.fallback: FleetProfiles | None = None
        """Of the same pools, for a load that `profiles` does not reach; None: nothing is decided then."""
        self._targets = targets
        self._bounds = limits.bounds(profiles.gpus)
        self._predictor = predictor
        self._meter = LoadMeter()
        self._shape = RequestShape()
        self._factors = CorrectionFactors()
        self._guards = {role: ScalingGuard(limits) for role in profiles.roles}
        self._present: dict[Role, int] = {}

    def decide(self, seen: FleetObservation, now: float) -> PlannerDecision:
        """What is to be done now, `limits.interval` after the last call. Nothing at the first call, and as long as
        there was no request."""
        interval = self._meter.measure(seen, now)
        load: RequestLoad | None = None
        if interval is not None:
            self._shape.record(interval)
        profiles, note = self._reaching()
        if interval is not None:
            rate = interval.arrivals / interval.seconds
            self._predictor.observe(rate)
            if profiles is not None:
                self._correct(interval, seen, profiles)
            load = self._shape.at(self._predicted(interval))
        size = None if load is None or profiles is None else self._size(load, profiles)
        pools = tuple(self._pool(role, seen, size, now) for role in self.profiles.roles)
        self._present = {pool.role: pool.present for pool in pools}
        decision = _described(now, interval, load, self._factors, size, pools)
        return replace(decision, profile="none" if profiles is None else profiles.source, profile_note=note)

    def _reaching(self) -> tuple[FleetProfiles | None, str]:
        """The profiles that reach the load's lengths, and why not the first ones."""
        load = self._shape.at(1.0)
        note = "" if load is None else self.profiles.unknown(load)
        return (self.fallback, note) if note else (self.profiles, "")

    def _predicted(self, interval: LoadInterval) -> float:
        """The backlog, beyond a request for each engine, is to be worked off within an interval."""
        excess = max(0, interval.backlog - sum(self._present.values()))
        return max(self._predictor.predict(self.limits.horizon)) + excess / self.limits.interval

    def _size(self, load: RequestLoad, profiles: FleetProfiles) -> FleetSize:
        mixed, decode = profiles
        if decode is None:
            return size_mixed(mixed, load, self._targets, self._factors, self._bounds)
        return size_disaggregated(mixed, decode, load, self._targets, self._factors, self._bounds)

    def _pool(self, role: Role, seen: FleetObservation, size: FleetSize | None, now: float) -> PoolDecision:
        present = seen.present.get(role, 0)
        if size is None:
            return PoolDecision(role=role, present=present, wanted=present, target=present, reason="nothing to change")
        wanted = size.of(role)
        target, reason = self._guards[role].guard(present, wanted, now)
        return PoolDecision(role=role, present=present, wanted=wanted, target=target, reason=reason)

    def _correct(self, interval: LoadInterval, seen: FleetObservation, profiles: FleetProfiles) -> None:
        """Compares what clients waited for with what the profile says of the same load on the same engines."""
        ready: dict[Role, int] = dict.fromkeys(self.profiles.roles, 0)
        for report in seen.reports.values():
            if report.role in ready:
                ready[report.role] += 1
        steady = ready == self._present and all(ready.values())
        load = self._shape.at(interval.first_tokens / interval.seconds)
        if not steady or load is None or interval.first_tokens < MIN_SAMPLES or interval.backlog > sum(ready.values()):
            return
        forecast = self._forecast(load, ready, profiles)
        if forecast.utilization > CORRECTED_UTILIZATION or not isfinite(forecast.mean_ttft + forecast.mean_itl):
            return
        ttft, itl = self._factors
        self._factors = CorrectionFactors(
            _averaged(ttft, interval.ttft, forecast.mean_ttft), _averaged(itl, interval.itl, forecast.mean_itl)
        )

    def _forecast(self, load: RequestLoad, ready: dict[Role, int], profiles: FleetProfiles) -> LatencyForecast:
        mixed, decode = profiles
        percentile = self._targets.percentile
        if decode is None:
            return forecast_mixed(mixed, load.shared(ready["mixed"]), percentile)
        prompts = forecast_prefill(mixed, load.shared(ready["prefill"]), percentile)
        tokens = forecast_decode(decode, load.shared(ready["decode"]), percentile)
        return tokens._replace(mean_ttft=prompts.mean_ttft, ttft=prompts.ttft, utilization=prompts.utilization)


def _averaged(factor: float, observed: float | None, predicted: float) -> float:
    if observed is None or predicted <= 0:
        return factor
    low, high = CORRECTION_BOUNDS
    return factor + CORRECTION_WEIGHT * (min(high, max(low, observed / predicted)) - factor)


def _described(
    now: float,
    interval: LoadInterval | None,
    load: RequestLoad | None,
    factors: CorrectionFactors,
    size: FleetSize | None,
    pools: tuple[PoolDecision, ...],
) -> PlannerDecision:
    forecast = None if size is None else size.forecast
    return PlannerDecision(
        at=now,
        observed_rate=None if interval is None else interval.arrivals / interval.seconds,
        predicted_rate=None if load is None else load.rate,
        backlog=0 if interval is None else interval.backlog,
        prompt_tokens=None if load is None else load.prompt,
        cached_tokens=None if load is None else load.cached,
        output_tokens=None if load is None else load.output,
        observed_ttft=None if interval is None else interval.ttft,
        observed_itl=None if interval is None else interval.itl,
        ttft_correction=factors.ttft,
        itl_correction=factors.itl,
        forecast_ttft=None if forecast is None or forecast.ttft == inf else forecast.ttft,
        forecast_itl=None if forecast is None or forecast.itl == inf else forecast.itl,
        suffices=size is None or size.suffices,
        pools=pools,
    )
