"""Coordinator and engines as pure cores in simulated time: what a policy makes of a load. No bus, no device, no chance.

Run by hand for a comparison of the policies, and of one coordinator with two: python -m
tests.support.engines.routing_simulation

The cores are the real ones; a step takes as long as the tokens in it want. Engines report every half second and tell of
their blocks every 25 ms, as they do.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, get_args

from services.coordinator.config import CoordinatorConfig, Policy
from services.coordinator.core.actions import Action, Moment, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import Event, SendPlan, SendTokens, WorkersReady
from services.scheduler.core.limits import EngineLimits as EngineLimits
from shared.blocks import hash_chain
from shared.ids import Attempt, EngineId, GatewayId, Incarnation, InstanceId, ModelName, RequestId
from shared.kv_events.stream import KvEventStream
from shared.messages.coordinator import PlacementMade, Route
from shared.messages.detokenizer import TokenBatch
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.messages.kv_events import KvSource
from shared.messages.lifecycle import Lifecycle
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import SampledTokens, StepFinished, StepTiming
from shared.messages.worker import StepPlan
from shared.packing import pack
from tests.support.engines.coordinator_events import detokenizer, life

MODEL = ModelName("m")
CARD = ModelCard(name=MODEL, max_model_len=4096, vocab_size=50_000, eos_token_ids=(0,), dtype="float32", created=0)
TIMING = StepTiming(wait=0.0, prepare=0.0, forward=0.0, sample=0.0)
STEP_SECONDS, TOKEN_SECONDS = 0.005, 0.00005
REPORT_EVERY, TELL_EVERY = 0.5, 0.025
BUS_SECONDS = 0.002
"""From one coordinator to the others."""


class Load(NamedTuple):
    """Questions of `suffix` tokens behind one of `prefixes` beginnings; see `Random.choices` for `popularity`."""

    rate: float
    """Requests a second, evenly spaced; `seconds` long."""
    seconds: float
    prefixes: int = 24
    prefix: int = 1024
    suffix: int = 64
    output: int = 16
    popularity: float = 0.0
    choices: int = 1
    """Requests that come at one moment, with equal prompts."""


@dataclass
class Outcome:
    requests: Counter[str] = field(default_factory=Counter)
    """By engine."""
    first_tokens: list[float] = field(default_factory=list)
    """Seconds from arrival, in order of size."""
    prompt: int = 0
    cached: int = 0
    predicted: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt

    @property
    def least_share(self) -> float:
        """What the engine with the fewest requests got, over the mean."""
        return min(self.requests.values()) * len(self.requests) / sum(self.requests.values())

    def first_token(self, quantile: float) -> float:
        return self.first_tokens[int(quantile * (len(self.first_tokens) - 1))]


class SimulatedEngine:
    """A scheduler's core and a device that takes its time; two steps are never in flight."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        self.core = EngineCore(EngineId(name), Incarnation(1), EngineLimits(run_ahead=0, max_running=64))
        self.batches: list[TokenBatch] = []
        self.plan: StepPlan | None = None
        self.core.handle(WorkersReady(CARD, blocks), 0.0)
        assert self.core.epoch_state is not None
        source = KvSource(instance=InstanceId(name), model=MODEL, node=None)
        self.index = self.core.epoch_state.memory.index
        self.journal = KvEventStream(source, Incarnation(1), self.index.changes)

    def handle(self, event: Event, now: float) -> float | None:
        """When the step that begins now ends; None where none begins."""
        ends: float | None = None
        for output in self.core.handle(event, now):
            match output:
                case SendPlan(plan):
                    self.plan = plan
                    ends = now + STEP_SECONDS + TOKEN_SECONDS * sum(work.count for work in plan.work)
                case SendTokens(_, batch):
                    self.batches.append(batch)
                case _:
                    raise AssertionError(output)
        return ends

    def finish(self, now: float) -> float | None:
        plan, self.plan = self.plan, None
        assert plan is not None
        sampled = tuple(SampledTokens(work.sequence, (7,)) for work in plan.work if work.sample)
        return self.handle(StepFinished(epoch=plan.epoch, step=plan.step, sampled=sampled, timing=TIMING), now)

    def life(self) -> Lifecycle:
        return life("scheduler", self.name, engine=self.core.report())


class Simulation:
    def __init__(
        self,
        routing: CoordinatorConfig,
        load: Load,
        *,
        engines: int = 8,
        blocks: int = 640,
        seed: int = 1,
        coordinators: int = 1,
        announces: bool = True,
    ) -> None:
        """Coordinators get requests by rotation. Unless one `announces`, the others never learn what it places."""
        names = [InstanceId(f"coordinator-{number + 1}") for number in range(coordinators)]
        self.cores = [Coordinator(name, routing, turn=turn) for turn, name in enumerate(names)]
        self._announces = announces
        self._messages: dict[str, PlacementMade] = {}
        self.engines = {name: SimulatedEngine(name, blocks) for name in (f"engine-{i}" for i in range(engines))}
        self.outcome = Outcome(Counter(dict.fromkeys(self.engines, 0)))
        self._arrived: dict[str, float] = {}
        self._queue: list[tuple[float, int, str, str]] = []
        self._order = itertools.count()
        self._load = load
        self._requests = _requests(load, Random(seed))

    def run(self) -> Outcome:
        """Until every request has its last token."""
        self._at(0.0, "report")
        self._at(TELL_EVERY, "tell")
        for number, request in enumerate(self._requests):
            first = number - number % self._load.choices
            self._at(1.0 + first / self._load.rate, "arrive", request)
        while self._queue:
            now, _, what, who = heapq.heappop(self._queue)
            self._happen(what, who, now)
        self.outcome.first_tokens.sort()
        return self.outcome

    def _at(self, when: float, what: str, who: str = "") -> None:
        heapq.heappush(self._queue, (when, next(self._order), what, who))

    def _happen(self, what: str, who: str, now: float) -> None:
        match what:
            case "arrive":
                core = self.cores[len(self._arrived) % len(self.cores)]
                self._arrived[who] = now
                self._place(core.route(Route(self._requests[who]), Moment(now, now)), now)
            case "announce":
                message = self._messages.pop(who)
                for core in self.cores:
                    core.record_announcement(message, Moment(now, now))
            case "finish":
                self._began(who, self.engines[who].finish(now), now)
            case "report":
                self._report(now)
            case "tell":
                self._tell(now)

    def _report(self, now: float) -> None:
        peers = [life("coordinator", f"coordinator-{number + 1}") for number in range(len(self.cores))]
        for heard in (*peers, detokenizer(), *(engine.life() for engine in self.engines.values())):
            for core in self.cores:
                self._place(core.lifecycle(heard, Moment(now, now)), now)
        self._again(REPORT_EVERY, "report", now)

    def _tell(self, now: float) -> None:
        for engine in self.engines.values():
            for event in engine.journal.flush():
                for core in self.cores:
                    core.blocks_changed(event, Moment(now, now))
        self._again(TELL_EVERY, "tell", now)

    def _again(self, seconds: float, what: str, now: float) -> None:
        if len(self.outcome.first_tokens) < len(self._requests):
            self._at(now + seconds, what)

    def _place(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, PlaceRequest):
                self.outcome.requests[action.engine] += 1
                self.outcome.predicted += action.generate.predicted_cached
                if action.announcement is not None and self._announces:
                    request = action.generate.generation.request
                    self._messages[request] = action.announcement
                    self._at(now + BUS_SECONDS, "announce", request)
                self._began(action.engine, self.engines[action.engine].handle(action.generate, now), now)

    def _began(self, name: str, ends: float | None, now: float) -> None:
        engine = self.engines[name]
        if ends is not None:
            self._at(ends, "finish", name)
        for batch in engine.batches:
            for opened in batch.opened:
                self.outcome.prompt += opened.prompt_tokens
                self.outcome.cached += opened.cached_tokens
            first = [now - self._arrived[entry.request] for entry in batch.entries if entry.position == 0]
            self.outcome.first_tokens += first
        engine.batches.clear()


def _requests(load: Load, random: Random) -> dict[str, Generation]:
    prefixes = [[random.randrange(50_000) for _ in range(load.prefix)] for _ in range(load.prefixes)]
    weights = [rank**-load.popularity for rank in range(1, load.prefixes + 1)]
    requests = {}
    tokens = b""
    for number in range(int(load.rate * load.seconds)):
        if number % load.choices == 0:
            (prefix,) = random.choices(prefixes, weights)
            tokens = pack([*prefix, *(random.randrange(50_000) for _ in range(load.suffix))])
        requests[f"r{number}"] = Generation(
            request=RequestId(f"r{number}"),
            attempt=Attempt(1),
            gateway=GatewayId("gateway-1"),
            model=MODEL,
            tokens=tokens,
            prompt_length=load.prefix + load.suffix,
            block_hashes=b"".join(hash_chain(tokens, None, 16)),
            sampling=SamplingOptions(seed=1),
            stopping=StopConditions(max_tokens=load.output, ignore_eos=True),
        )
    return requests


LOADS = {
    "24 prefixes": Load(rate=100, seconds=20),
    "24 prefixes, some popular": Load(rate=100, seconds=20, popularity=1.0),
    "one prefix": Load(rate=60, seconds=20, prefixes=1),
    "8 choices each, prefixes of their own": Load(rate=160, seconds=10, prefixes=200, prefix=2048, choices=8),
}


def main() -> None:
    for name, load in LOADS.items():
        print(f"{name}: {load.rate:g} requests a second of {load.prefix} + {load.suffix} tokens")
        for policy in get_args(Policy):
            _show(policy, Simulation(CoordinatorConfig(router_policy=policy), load).run())
        _show("kv, 2 deaf", Simulation(CoordinatorConfig(), load, coordinators=2, announces=False).run())
        for count in (2, 4):
            _show(f"kv, {count} peers", Simulation(CoordinatorConfig(), load, coordinators=count).run())


def _show(name: str, out: Outcome) -> None:
    print(
        f"  {name:12} hit rate {out.hit_rate:.3f} (predicted {out.predicted / out.prompt:.3f}), "
        f"first token p50 {out.first_token(0.5):.3f} s, p90 {out.first_token(0.9):.3f} s, "
        f"p99 {out.first_token(0.99):.3f} s, least engine {out.least_share:.2f} of the mean",
        flush=True,
    )


if __name__ == "__main__":
    main()
