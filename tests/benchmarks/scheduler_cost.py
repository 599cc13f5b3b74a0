"""What the scheduler's core costs: microseconds per sequence and step. Run by hand: python -m
tests.benchmarks.scheduler_cost

Planning and taking results in are timed apart, for steps in which everybody decodes; then the encoding of what goes
to the bus.
"""

from __future__ import annotations

import cProfile
import statistics
import sys
import time

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.events import Output, SendPlan, SendTokens, WorkersReady
from services.scheduler.core.limits import EngineLimits
from shared.bus.codec import decode, encode
from shared.ids import EngineId, Incarnation, ModelName
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import PauseMode, SampledTokens, StepFinished, StepTiming, WorkerResult
from tests.support.engines.checking_worker import generate

TIMING = StepTiming(wait=0.0, prepare=0.0, forward=0.0, sample=0.0)
CARD = ModelCard(
    name=ModelName("m"), max_model_len=8192, vocab_size=32_000, eos_token_ids=(2,), dtype="bfloat16", created=0
)


class PlanningTimer:
    """Takes the place of an epoch's `plan`, and adds up how long it takes."""

    def __init__(self, state: EpochState) -> None:
        self.seconds = 0.0
        self._plan = state.plan
        state.plan = self  # type: ignore[method-assign]

    def __call__(self, now: float, paused: PauseMode | None = None) -> float | None:
        started = time.perf_counter()
        due = self._plan(now, paused)
        self.seconds += time.perf_counter() - started
        return due


def sampled_of(plan: SendPlan) -> StepFinished:
    sampled = tuple(SampledTokens(work.sequence, (7,)) for work in plan.plan.work if work.sample)
    return StepFinished(epoch=plan.plan.epoch, step=plan.plan.step, sampled=sampled, timing=TIMING)


def measure(sequences: int, steps: int) -> None:
    engine = EngineCore(EngineId("e"), Incarnation(1), EngineLimits(run_ahead=1))
    engine.handle(WorkersReady(CARD, 40_000), 0.0)
    assert engine.epoch_state is not None
    planning_timer = PlanningTimer(engine.epoch_state)
    outputs: list[Output] = []
    for i in range(sequences):
        outputs += engine.handle(generate(f"request-{i:030}", [5 + i % 50] * 128, ignore_eos=True), 0.0)
    in_flight = [o for o in outputs if isinstance(o, SendPlan)]
    planning, results, encoding, decoding = [], [], [], []
    for _ in range(steps + 64):
        finished = sampled_of(in_flight.pop(0))
        payload = encode(finished)
        started = time.perf_counter()
        received = decode(payload, WorkerResult)
        decoding.append(time.perf_counter() - started)
        planning_timer.seconds = 0.0
        started = time.perf_counter()
        outputs = engine.handle(received, 0.0)
        total = time.perf_counter() - started
        in_flight += [o for o in outputs if isinstance(o, SendPlan)]
        started = time.perf_counter()
        for output in outputs:
            if isinstance(output, SendPlan):
                encode(output.plan)
            elif isinstance(output, SendTokens):
                encode(output.batch)
        encoding.append(time.perf_counter() - started)
        planning.append(planning_timer.seconds)
        results.append(total - planning_timer.seconds)
    assert all(s.phase == "decoding" for s in engine.requests.values()), "everybody decodes"
    parts = {"plan": planning, "results": results, "decode": decoding, "encode": encoding}
    shown = [
        f"{name} {statistics.median(values[64:]) * 1e6 / sequences:.2f} µs (p99 {_p99(values[64:]) * 1e3:.2f} ms)"
        for name, values in parts.items()
    ]
    whole = statistics.median([p + r for p, r in zip(planning[64:], results[64:], strict=True)])
    print(f"{sequences:4} sequences: {', '.join(shown)}; plan + results {whole * 1e3:.3f} ms a step")


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


if __name__ == "__main__":
    if "--profile" in sys.argv:
        cProfile.run("measure(256, 500)", sort="tottime")
    else:
        for size in (1, 16, 64, 256):
            measure(size, 500)
