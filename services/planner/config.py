"""The settings of the planner: what it promises, within which bounds, and what it expects of the load."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from services.planner.core.predictors import LoadPredictor, PredictorName, make_predictor
from services.planner.core.scaling_guard import PlannerLimits
from services.planner.core.sizing import LatencyTargets
from shared.settings import Port, UpOption

TARGETS, FLEET, LOAD, RUN = "Targets", "The fleet", "The load", "Run"
"""Headings of its options."""


class PlannerSettings(Struct, frozen=True, kw_only=True):
    """Every setting, with its unit and bounds. Raises ValueError for ones that contradict each other."""

    ttft_ms: Annotated[
        float | None,
        Meta(gt=0, description="Milliseconds from a request's coming to an engine to its first token."),
        UpOption(TARGETS),
    ] = None
    itl_ms: Annotated[
        float | None, Meta(gt=0, description="Milliseconds from token to token, a request's mean."), UpOption(TARGETS)
    ] = None
    percentile: Annotated[
        float, Meta(gt=0, lt=1, description="Share of the requests that are to be within them."), UpOption(TARGETS)
    ] = 0.95
    min_engines: Annotated[int, Meta(ge=1, description="Fewest engines of each pool."), UpOption(FLEET)] = 1
    max_engines: Annotated[int, Meta(ge=1, description="Most engines of all pools."), UpOption(FLEET)] = 64
    max_engines_per_host: Annotated[
        int | None,
        Meta(ge=1, description="Most engines of a pool on one host, in a stack of several."),
        UpOption(FLEET, unset="no limit"),
    ] = None
    gpu_budget: Annotated[
        int | None, Meta(ge=1, description="Most devices of all engines (each rank is one)."), UpOption(FLEET)
    ] = None
    start_s: Annotated[
        float,
        Meta(ge=0, description="Seconds from an engine's start until it serves: so far ahead the load is predicted."),
        UpOption(FLEET),
    ] = 30.0
    stabilization_s: Annotated[
        float,
        Meta(ge=0, description="Seconds for which fewer engines must be enough before one is drained."),
        UpOption(FLEET),
    ] = 300.0
    cooldown_s: Annotated[
        float, Meta(ge=0, description="Seconds after a change in which nothing is drained."), UpOption(FLEET)
    ] = 0.0
    load_predictor: Annotated[
        PredictorName,
        Meta(description="constant: it stays; seasonal: as a season before; arima: needs the extra planner."),
        UpOption(LOAD),
    ] = "constant"
    season_s: Annotated[
        float, Meta(gt=0, description="Seconds after which a seasonal load repeats itself."), UpOption(LOAD)
    ] = 86400.0
    profile: Annotated[
        Path | None,
        Meta(
            description="File of baton bench profile: what such engines take for prompts and tokens. Else, and where a "
            "load is beyond it, that is learnt from their steps."
        ),
        UpOption(LOAD, unset="none"),
    ] = None
    interval_s: Annotated[float, Meta(ge=0.5, description="Seconds between two decisions."), UpOption(RUN)] = 15.0
    act: Annotated[
        bool,
        Meta(description="Start and drain engines; without it the planner only says what it would do."),
        UpOption(RUN),
    ] = False
    metrics_port: Annotated[
        Port | None, Meta(description="Port of Prometheus metrics; 0 picks one."), UpOption(RUN, unset="none")
    ] = None

    def __post_init__(self) -> None:
        if self.ttft_ms is None and self.itl_ms is None:
            raise ValueError("--ttft-ms, --itl-ms: at least one target is needed")
        if self.max_engines < self.min_engines:
            raise ValueError(f"--max-engines {self.max_engines}: must not be below --min-engines ({self.min_engines})")
        if self.gpu_budget is not None and self.gpu_budget < self.min_engines:
            raise ValueError(f"--gpu-budget {self.gpu_budget}: must not be below --min-engines ({self.min_engines})")
        self.predictor()

    def targets(self) -> LatencyTargets:
        """In seconds."""
        ttft, itl = (inf if each is None else each / 1000 for each in (self.ttft_ms, self.itl_ms))
        return LatencyTargets(ttft=ttft, itl=itl, percentile=self.percentile)

    def limits(self) -> PlannerLimits:
        """The bounds within which engines come and go."""
        return PlannerLimits(
            minimum=self.min_engines,
            maximum=self.max_engines,
            gpu_budget=self.gpu_budget,
            interval=self.interval_s,
            start_seconds=self.start_s,
            stabilization=self.stabilization_s,
            cooldown=self.cooldown_s,
        )

    def predictor(self) -> LoadPredictor:
        """One that has learnt nothing yet. Raises ValueError for a season of too few intervals."""
        return make_predictor(self.load_predictor, round(self.season_s / self.interval_s))
