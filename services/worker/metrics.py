"""What a worker counts."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from services.worker.backend import StepOutput
from services.worker.distributed.traffic import HOST_TRAFFIC
from shared.messages.lifecycle import StepSums
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan
from shared.telemetry.metrics import service_registry

PAUSE = 0.25
"""Seconds: a longer wait is a pause of traffic and no part of the idle share between steps."""

_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

METRICS = service_registry("worker")
STEPS = Counter("baton_worker_steps_total", "Steps computed.", registry=METRICS)
TOKENS = Counter("baton_worker_tokens_total", "Tokens computed, and tokens sampled.", ["kind"], registry=METRICS)
PART_SECONDS = Histogram(
    "baton_worker_step_seconds",
    "Seconds of each phase of steps; wait is idle time while there is traffic; answer overlaps the next step.",
    ["part"],
    buckets=_BUCKETS,
    registry=METRICS,
)
STEP_DEADLINE = Gauge(
    "baton_worker_step_deadline_seconds",
    "Seconds that the step in hand may take before the rank ends as hung; 0: none.",
    registry=METRICS,
)
FLOPS = Counter(
    "baton_worker_estimated_flops_total",
    "Floating-point operations that the model needed for what this rank computed, estimated from its shape.",
    registry=METRICS,
)
PEAK_FLOPS = Gauge(
    "baton_worker_peak_flops",
    "Operations per second of the device's data sheet, with numbers of 16 bits; 0: not known.",
    registry=METRICS,
)
MFU = Histogram(
    "baton_worker_step_mfu",
    "Model FLOPs utilization of steps: what a step needed, by its seconds and the device's peak; where that is known.",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8),
    registry=METRICS,
)
PAUSES = Counter(
    "baton_worker_pause_seconds_total", "Seconds of pauses: more than 0.25 s without a plan.", registry=METRICS
)
STEPS_OF_OTHERS = Gauge(
    "baton_worker_steps_of_others",
    "Steps of other engines of its data-parallel group that this rank computed its experts for, since it started.",
    registry=METRICS,
)


class _HostTrafficCollector(Collector):
    """Read where it is counted, a thousand times a second."""

    def collect(self) -> Iterable[CounterMetricFamily]:
        """What ranks of one host have exchanged."""
        family = CounterMetricFamily(
            "baton_worker_exchanged_bytes",
            "Payload that ranks of one host exchanged, by the kind of exchange, sent or received.",
            labels=["kind", "direction"],
        )
        for kind, sent, received in HOST_TRAFFIC:
            family.add_metric([kind, "sent"], sent)
            family.add_metric([kind, "received"], received)
        yield family


EXCHANGED = _HostTrafficCollector()
METRICS.register(EXCHANGED)
MISSED = Counter("baton_worker_missed_steps_total", "Gaps found in the numbering of plans.", registry=METRICS)

DRAFTED = Counter(
    "baton_worker_drafted_tokens_total", "Draft tokens that were verified; of trees, levels.", registry=METRICS
)
ACCEPTED = Counter(
    "baton_worker_accepted_tokens_total",
    "Draft tokens that were accepted, by their position in the draft.",
    ["position"],
    registry=METRICS,
)
DRAFTS = Counter(
    "baton_worker_drafts_total", "Steps of single sequences with at least one draft token.", registry=METRICS
)

EXPERT_PICKS = Counter(
    "baton_worker_expert_picks_total",
    "Picks (of an expert by a token) that each rank of the stage computed, by layer; of expert parallelism.",
    ["layer", "rank"],
    registry=METRICS,
)

EXPERT_BALANCE = Gauge(
    "baton_worker_expert_balance",
    "Mean over maximum of the ranks' picks in the last 10 s that had some, by layer; 1: all ranks computed as many.",
    ["layer"],
    registry=METRICS,
)
EXPERT_REARRANGEMENTS = Gauge(
    "baton_worker_expert_rearrangements",
    "Rearrangements of experts beside steps since the rank started, by how they ended: completed or failed.",
    ["outcome"],
    registry=METRICS,
)
EXPERTS_MOVED = Gauge(
    "baton_worker_experts_moved",
    "Experts that ranks were given by rearrangements since the rank started.",
    registry=METRICS,
)
EXPERT_REARRANGEMENT_SECONDS = Gauge(
    "baton_worker_expert_rearrangement_seconds",
    "Seconds that the last rearrangement took beside steps.",
    registry=METRICS,
)

_WAIT, _PREPARE, _FORWARD, _SAMPLE, _ANSWER = (
    PART_SECONDS.labels(part) for part in ("wait", "prepare", "forward", "sample", "answer")
)
_COMPUTED, _SAMPLED = TOKENS.labels("computed"), TOKENS.labels("sampled")


def record_flops(flops: float, timing: StepTiming, peak: float | None) -> None:
    """Counts what a step needed; its utilization is over the time from the end of the step before, without pauses."""
    FLOPS.inc(flops)
    wait = 0.0 if timing.wait > PAUSE else timing.wait
    seconds = wait + timing.prepare + timing.forward + timing.sample
    if peak is not None and seconds > 0.0:
        MFU.observe(flops / (seconds * peak))


def record_step(plan: StepPlan, output: StepOutput, sums: StepSums) -> StepSums:
    """Counts a step; `sums` with that step added.

    A wait longer than PAUSE is a pause of traffic. The idle share between steps is the sum of `wait` over the sum of
    all parts but `answer`."""
    timing, paused = output.timing, output.timing.wait > PAUSE
    computed = sum(work.count for work in plan.work)
    sampled = sum(len(each.tokens) for each in output.sampled)
    if paused:
        PAUSES.inc(timing.wait)
    else:
        _WAIT.observe(timing.wait)
    _PREPARE.observe(timing.prepare)
    _FORWARD.observe(timing.forward)
    _SAMPLE.observe(timing.sample)
    _ANSWER.observe(timing.answer)
    STEPS.inc()
    _COMPUTED.inc(computed)
    _SAMPLED.inc(sampled)
    if output.drafted:
        DRAFTED.inc(output.drafted)
        DRAFTS.inc(sum(sampled.drafted > 0 for sampled in output.sampled))
        for position, count in enumerate(output.accepted, start=1):
            ACCEPTED.labels(str(position)).inc(count)
    return replace(
        sums,
        steps=sums.steps + 1,
        wait=sums.wait + (0.0 if paused else timing.wait),
        prepare=sums.prepare + timing.prepare,
        forward=sums.forward + timing.forward,
        sample=sums.sample + timing.sample,
        answer=sums.answer + timing.answer,
        paused=sums.paused + (timing.wait if paused else 0.0),
        computed=sums.computed + computed,
        sampled=sums.sampled + sampled,
    )
