"""How many engines meet the latency targets under a load: each as a queue of prompts beside a batch that decodes."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

from msgspec import Struct

from services.planner.core.profile import EngineProfile
from shared.messages.lifecycle import Role

MAX_ROUNDS = 100
"""Of the search for the batch size at which an engine settles."""
SETTLED = 1e-3
VARIABILITY = 0.5
"""(c_a² + c_s²) / 2 of Kingman's formula: requests come at random, and prompts are of like lengths. Where they are not,
the correction factors show it."""


class LatencyTargets(Struct, frozen=True, kw_only=True):
    """What clients are promised, in seconds; infinity: nothing."""

    ttft: float = inf
    itl: float = inf
    percentile: float = 0.95
    """The share of requests whose TTFT is to be within its target; and of those whose mean ITL is."""

    def __post_init__(self) -> None:
        if min(self.ttft, self.itl) <= 0:
            raise ValueError(f"ttft = {self.ttft:g}, itl = {self.itl:g}: must be above 0")
        if not 0 < self.percentile < 1:
            raise ValueError(f"percentile = {self.percentile:g}: must lie between 0 and 1")


class RequestLoad(NamedTuple):
    """A load on a fleet or on an engine: how many requests, and what they are like on average."""

    rate: float
    """Requests per second."""
    prompt: float
    """Tokens of a prompt that are computed."""
    cached: float
    """Tokens of a prompt that a cache holds."""
    output: float
    """Output tokens."""

    @property
    def context(self) -> float:
        """Tokens of a sequence that decodes, on average."""
        return self.prompt + self.cached + self.output / 2

    def shared(self, engines: float) -> RequestLoad:
        """One engine's share."""
        return self._replace(rate=self.rate / engines)


class CorrectionFactors(NamedTuple):
    """What was observed divided by what the profile had predicted for it."""

    ttft: float = 1.0
    itl: float = 1.0


class LatencyForecast(NamedTuple):
    """What an engine's clients wait for under a load, in seconds; infinity: more requests come than it can serve."""

    mean_ttft: float
    ttft: float
    """The percentile's that was asked for."""
    mean_itl: float
    itl: float
    """That percentile's, each request's own mean."""
    batch: float
    """Sequences that decode at a time, on average."""
    utilization: float
    """Of prefill: the share of the time that prompts take."""

    def corrected(self, factors: CorrectionFactors) -> LatencyForecast:
        """As it will be if the profile errs as it did."""
        ttft, itl = factors
        return self._replace(
            mean_ttft=self.mean_ttft * ttft, ttft=self.ttft * ttft, mean_itl=self.mean_itl * itl, itl=self.itl * itl
        )

    def meets(self, targets: LatencyTargets) -> bool:
        """Whether both targets hold, and the engine keeps up."""
        return self.ttft < inf and self.itl < inf and self.ttft <= targets.ttft and self.itl <= targets.itl


OVERLOADED = LatencyForecast(inf, inf, inf, inf, inf, 1.0)


def forecast_mixed(profile: EngineProfile, load: RequestLoad, percentile: float) -> LatencyForecast:
    """Of an engine that computes prompts between its decode steps. `load`: its own share."""
    chunks = max(1, ceil(load.prompt / profile.max_batch_tokens))
    extra = max(0.0, profile.prefill(load.prompt) - chunks * profile.step_seconds)
    """Seconds by which a prompt makes the steps longer that it is computed in."""
    busy = load.rate * extra
    batch = _settled_batch(profile, load, busy)
    if batch is None:
        return OVERLOADED
    context = load.context
    step = profile.step_seconds + min(1.0, batch) * (profile.itl(batch, context) - profile.step_seconds)
    """Of a decode step, if there is one, or of a step for the prompt alone."""
    together = max(1.0, profile.max_batch_tokens / max(1.0, load.prompt))
    """Prompts that one step takes if so many wait."""
    own = extra + chunks * step
    wait = _queue(load.rate, extra + step * chunks / together, percentile)
    if wait is None:
        return OVERLOADED
    mean, worst = wait
    running = min(1.0, batch) * step
    """A step that has begun is not interrupted."""
    itl = profile.itl(batch, context) / (1 - busy)
    prompts = load.rate * load.output * itl
    """That come while a request decodes; their number is Poisson-distributed."""
    deviations = NormalDist().inv_cdf(percentile)
    return LatencyForecast(
        mean_ttft=own + running / 2 + mean,
        ttft=own + running + worst,
        mean_itl=itl,
        itl=_itl_among_more(profile, batch, context, deviations) / (1 - busy)
        + max(0.0, deviations) * sqrt(prompts) * extra / load.output,
        batch=batch,
        utilization=busy,
    )


def forecast_prefill(profile: EngineProfile, load: RequestLoad, percentile: float) -> LatencyForecast:
    """Of an engine that only computes prompts and hands them over; it has no ITL."""
    seconds = profile.prefill(load.prompt)
    wait = _queue(load.rate, seconds, percentile)
    if wait is None:
        return OVERLOADED
    return LatencyForecast(seconds + wait[0], seconds + wait[1], 0.0, 0.0, 0.0, load.rate * seconds)


def forecast_decode(profile: EngineProfile, load: RequestLoad, percentile: float) -> LatencyForecast:
    """Of an engine that takes prefilled requests over; it has no TTFT."""
    batch = _settled_batch(profile, load, 0.0)
    if batch is None:
        return OVERLOADED
    context = load.context
    high = _itl_among_more(profile, batch, context, NormalDist().inv_cdf(percentile))
    return LatencyForecast(0.0, 0.0, profile.itl(batch, context), high, batch, 0.0)


def _itl_among_more(profile: EngineProfile, batch: float, context: float, deviations: float) -> float:
    """In a batch that is larger than on average by so many standard deviations; its size is Poisson-distributed."""
    return profile.itl(min(batch + max(0.0, deviations) * sqrt(batch), profile.most_sequences), context)


def _settled_batch(profile: EngineProfile, load: RequestLoad, busy: float) -> float | None:
    """How many sequences decode at a time (Little's law: as many as come while one decodes), where prompts take the
    share `busy` of the time. None: there is no room for so many, or they become ever more."""
    if busy >= 1:
        return None
    context = load.context
    room = min(profile.most_sequences, profile.kv_tokens / max(1.0, context))
    batch = 0.0
    for _ in range(MAX_ROUNDS):
        grown = load.rate * max(0.0, load.output - 1) * profile.itl(batch, context) / (1 - busy)
        if grown + 2 * sqrt(grown) > room:
            return None
        if grown - batch <= SETTLED * max(1.0, batch):
            return grown
        batch = grown
    return None


def _queue(rate: float, service: float, percentile: float) -> tuple[float, float] | None:
    """Mean and percentile of the time in a queue with one server (Kingman 1961; its tail is exponential). None: it
    grows without end."""
    utilization = rate * service
    if utilization >= 1:
        return None
    while_busy = service * VARIABILITY / (1 - utilization)
    late = 1 - percentile
    worst = while_busy * log(utilization / late) if utilization > late else 0.0
    return utilization * while_busy, worst


class FleetSize(NamedTuple):
    """How many engines are needed, by pool, and what their clients will wait for."""

    mixed: int
    prefill: int
    decode: int
    forecast: LatencyForecast
    suffices: bool
    """Whether the targets hold; False where the bounds or the budget do not allow as many engines as that takes."""

    def of(self, role: Role) -> int:
        """Engines of a role."""
        return self.mixed if role == "mixed" else self.prefill if role == "prefill" else self.decode


class SizeBounds(NamedTuple):
    """Between which numbers of engines may be chosen."""

    minimum: int
    maximum: int


def size_mixed(
    profile: EngineProfile, load: RequestLoad, targets: LatencyTargets, factors: CorrectionFactors, bounds: SizeBounds
) -> FleetSize:
    """The fewest plain engines that meet the targets."""

    def at(count: int) -> LatencyForecast:
        return forecast_mixed(profile, load.shared(count), targets.percentile).corrected(factors)

    count = _fewest(at, targets, bounds)
    forecast = at(count)
    return FleetSize(count, 0, 0, forecast, forecast.meets(targets))


def size_disaggregated(
    prefill: EngineProfile,
    decode: EngineProfile,
    load: RequestLoad,
    targets: LatencyTargets,
    factors: CorrectionFactors,
    bounds: SizeBounds,
) -> FleetSize:
    """The fewest prefill engines that meet the TTFT, and decode engines that meet the ITL. The lower bound holds for
    each pool, the upper one for both together: where they need more, each gets the same share of what it needs, as
    NVIDIA Dynamo's planner has it."""

    def prompts(count: int) -> LatencyForecast:
        return forecast_prefill(prefill, load.shared(count), targets.percentile).corrected(factors)

    def tokens(count: int) -> LatencyForecast:
        return forecast_decode(decode, load.shared(count), targets.percentile).corrected(factors)

    each = SizeBounds(bounds.minimum, max(bounds.minimum, bounds.maximum))
    first, then = _fewest(prompts, targets, each), _fewest(tokens, targets, each)
    if first + then > bounds.maximum:
        most = max(bounds.minimum, bounds.maximum - bounds.minimum)
        first = min(most, max(bounds.minimum, round(first * bounds.maximum / (first + then))))
        then = max(bounds.minimum, bounds.maximum - first)
    prefilled, decoded = prompts(first), tokens(then)
    both = decoded._replace(mean_ttft=prefilled.mean_ttft, ttft=prefilled.ttft, utilization=prefilled.utilization)
    return FleetSize(0, first, then, both, both.meets(targets))


def _fewest(at: Callable[[int], LatencyForecast], targets: LatencyTargets, bounds: SizeBounds) -> int:
    """The fewest engines within the bounds whose forecast meets the targets; the most where none does."""
    counts = range(bounds.minimum, bounds.maximum)
    return next((count for count in counts if at(count).meets(targets)), bounds.maximum)
