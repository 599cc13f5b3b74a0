"""Steps begun before it is known how many drafts of the one before stand: nobody's tokens change, and nobody waits."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from torch import Tensor

from services.worker.executor import device_runner
from services.worker.executor.device_runner import DeviceRunner, DeviceStep
from services.worker.executor.host_runner import HostRunner
from services.worker.executor.runner_parts import RunnerParts
from services.worker.executor.timing import Mark
from services.worker.ops.interface import BatchMeta
from services.worker.sampling import logprobs, sampler
from services.worker.sampling.random_numbers import RejectedDrafts
from services.worker.speculation.settings import Method, SpeculationSettings
from services.worker.speculation.verification import move_back
from shared.messages.generation import SamplingOptions
from tests.integration.worker.test_launched_generation import answers
from tests.integration.worker.test_launched_schedules import CASES, LONGEST, Schedule
from tests.integration.worker.test_launching_runner import prompt, told
from tests.integration.worker.test_speculation import PROMPTS, SAMPLINGS
from tests.support.models.tiny_drafters import make_draft, make_eagle, make_eagle3, make_medusa
from tests.support.models.tiny_models import POSITIONS, TinyModel, make_model
from tests.support.paths import DEMO
from tests.support.worker.delayed_device import LateClock, WithoutWaiting
from tests.support.worker.launched_rank import DriverAhead, launching
from tests.support.worker.plan_driver import GREEDY, Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 24
MAKERS = {"draft": make_draft, "medusa": make_medusa, "eagle": make_eagle, "eagle3": make_eagle3}
AHEAD: list[Method] = ["medusa", "eagle"]
"""Those that are asked before it is known what stands."""
METHODS: list[Method] = ["ngram", "draft", *AHEAD, "eagle3"]
BY_LANE = [pytest.param(method, marks=[] if method in AHEAD else [pytest.mark.extras]) for method in METHODS]
"""The others' drafts are awaited, as those of any who asks for penalties."""
LASTING = [sampling for sampling in SAMPLINGS if sampling.repetition_penalty == 1.0 and not sampling.presence_penalty]
"""What changes with nothing but positions."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("ahead"))


@pytest.fixture(scope="module")
def backends(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[Method, HostRunner]:
    folder = tmp_path_factory.mktemp("drafters")
    made = {}
    for method in METHODS:
        asked = SpeculationSettings(method=method, prompt_lookup_min=1)
        if method in MAKERS:
            asked = SpeculationSettings(method=method, model=str(MAKERS[method](tiny, folder / method)))
        made[method] = tiny_backend(tiny.path, speculation=asked)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LateClock:
    """Of devices that are late from here on."""
    clock = LateClock()
    monkeypatch.setattr(device_runner, "clock_of", lambda device: clock)
    for module in (sampler, logprobs):
        monkeypatch.setattr(module, "to_host", clock.to_host)
    return clock


def late(backend: HostRunner) -> DeviceRunner:
    backend.reset()
    return launching(backend)


def ask(driver: Driver, samplings: list[SamplingOptions], **more: Any) -> list[Sequence]:
    return [
        driver.add(tokens, OUTPUT, sampling=sampling, **more)
        for tokens, sampling in zip(PROMPTS, samplings, strict=False)
    ]


def expected(backend: HostRunner, samplings: list[SamplingOptions], **more: Any) -> list[Sequence]:
    """Without drafts, step by step."""
    backend.reset()
    driver = Driver(backend)
    sequences = ask(driver, samplings, **more)
    driver.run()
    return sequences


@pytest.mark.features("speculative", "chunked prefill", "logprobs")
@pytest.mark.parametrize(
    ("samplings", "method"),
    [(LASTING, method) for method in AHEAD] + [(SAMPLINGS, method) for method in METHODS],
    ids=[f"what lasts-{method}" for method in AHEAD] + [f"everything-{method}" for method in METHODS],
)
def test_whatever_is_asked_for_is_drawn_as_without_drafts(
    backends: dict[Method, HostRunner], method: Method, samplings: list[SamplingOptions], clock: LateClock
) -> None:
    """Seeds, cuts, log-probabilities; and penalties, for whose sake drafts are awaited, as those of other methods than
    `AHEAD` always are: what lasts is tried of these two by itself."""
    wanted = expected(backends[method], samplings)
    driver = DriverAhead(late(backends[method]), ahead=2, budget=60, speculate=3)
    sequences = ask(driver, samplings)
    driver.run()
    assert [told(sequence) for sequence in sequences] == [told(sequence) for sequence in wanted]
    assert driver.drafted > 0


@pytest.mark.parametrize("method", BY_LANE)
def test_as_many_drafts_stand_as_step_by_step(method: Method, clock: LateClock) -> None:
    """Of drafters that have learned something: whoever drafts ahead knows as much as who waits."""
    asked = SpeculationSettings(method=method, model=None if method == "ngram" else str(DEMO / method))
    backend = tiny_backend(DEMO / "model", ops="auto", dtype="float32", speculation=asked)
    tokens = [[1, *range(50 + number, 60 + number)] for number in range(3)]
    tried = []
    for driver in (Driver(backend, speculate=3), DriverAhead(late(backend), speculate=3)):
        backend.reset()
        params = [GREEDY, SamplingOptions(seed=3, temperature=0.7, top_p=0.9), SamplingOptions(seed=4, temperature=0.4)]
        sequences = [driver.add(each, 40, sampling=one) for each, one in zip(tokens, params, strict=True)]
        while any(len(sequence.output) < 40 for sequence in sequences):
            driver.step()
            if isinstance(driver, DriverAhead) and len(sequences[0].output) >= 40:
                driver.finish()
        driver.run()
        tried.append(([sequence.output for sequence in sequences], driver.accepted / driver.drafted))
    assert tried[0][0] == tried[1][0]
    assert tried[1][1] == pytest.approx(tried[0][1], rel=0.2)
    assert tried[1][1] > 0.1


@pytest.mark.parametrize("method", AHEAD)
def test_min_tokens_and_full_contexts_are_kept_to(
    tiny: TinyModel, backends: dict[Method, HostRunner], method: Method, clock: LateClock
) -> None:
    """What depends on how long an output is is known when it is drawn."""
    more = {"min_tokens": 9, "stop_token_ids": tuple(range(40, 90))}
    wanted = expected(backends[method], LASTING, **more)
    driver = DriverAhead(late(backends[method]), speculate=3)
    long = driver.add(prompt(POSITIONS - 9, 7), 10)
    sequences = ask(driver, LASTING, **more)
    driver.run()
    assert [told(sequence) for sequence in sequences] == [told(sequence) for sequence in wanted]
    assert long.output == tiny.greedy(prompt(POSITIONS - 9, 7), 10)


@pytest.mark.parametrize("method", AHEAD)
@pytest.mark.parametrize("sampling", [GREEDY, LASTING[1], LASTING[-1]], ids=["greedy", "random", "told"])
def test_a_step_with_drafts_is_begun_without_waiting_for_the_one_before(
    backends: dict[Method, HostRunner], method: Method, sampling: SamplingOptions, clock: LateClock
) -> None:
    """It takes what the step before that drew, asks no tensor for anything, and copies back what was drawn and how many
    drafts stand at once."""
    driver = DriverAhead(late(backends[method]), ahead=99, speculate=3)
    for number in range(3):
        driver.add(prompt(9, number), 200, sampling=sampling)
    driver.step()
    latest: list[Mark] = []
    for step in range(12):
        clock.waits.clear()
        copies = len(clock.copies)
        with WithoutWaiting():
            begun = driver.begin_next()
        assert isinstance(begun, DeviceStep)
        assert begun.launched is not None
        assert begun.launched.trial is not None
        assert bool(clock.waits) == (step > 1), "for the step before that"
        assert not set(map(id, clock.waits)) & set(map(id, latest))
        assert len(clock.copies) - copies == (1 if sampling.logprobs is None else 5)
        latest = [begun.launched.marks.over]
    driver.finish()


def test_sequences_come_leave_and_are_preempted_between_drafts(
    backends: dict[Method, HostRunner], clock: LateClock
) -> None:
    """Each draws what it would alone, whoever had its sequence index before."""
    runner = late(backends["eagle"])
    wanted = [sequence.output for sequence in expected(backends["eagle"], SAMPLINGS)]
    runner.reset()
    driver = DriverAhead(runner, budget=40, speculate=3)
    staying = ask(driver, SAMPLINGS)
    for number in range(5):
        leaving = driver.add(prompt(11, 20 + number), 100)
        for _ in range(3):
            driver.step()
        driver.drop(leaving)
        driver.preempt(next(sequence for sequence in staying if sequence.held))
    driver.run()
    assert [sequence.output for sequence in staying] == wanted


def test_who_takes_the_slot_of_one_that_left_is_not_moved_back(
    backends: dict[Method, HostRunner], clock: LateClock
) -> None:
    """Where it is a decode at once, and how many drafts stand of the one that left is not known yet."""
    samplings = [SamplingOptions(seed=number, temperature=0.9) for number in range(4)]
    alone = late(backends["medusa"])
    one = Driver(alone)
    wanted = [one.add(prompt(1, number), 8, sampling=sampling) for number, sampling in enumerate(samplings)]
    one.run()
    driver = DriverAhead(late(backends["medusa"]), speculate=3)
    coming = []
    for number, sampling in enumerate(samplings):
        leaving = driver.add(prompt(9, 40 + number), 200, sampling=sampling)
        for _ in range(3):
            driver.step()
        driver.drop(leaving)
        coming.append(driver.add(prompt(1, number), 8, sampling=sampling))
        driver.step()
    driver.run()
    assert [sequence.output for sequence in coming] == [sequence.output for sequence in wanted]


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.extras)])
def test_whatever_happens_to_sequences_each_draws_what_it_would_alone(
    backends: dict[Method, HostRunner], clock: LateClock, seed: int
) -> None:
    backend = backends[AHEAD[seed % 2]]
    backend.reset()
    alone = Driver(backend)
    wanted = [alone.add(tokens, LONGEST, sampling=sampling) for tokens, sampling in CASES]
    alone.run()
    chance = Random(seed)
    driver = DriverAhead(late(backend), ahead=1 + seed, budget=chance.choice([40, 512]), speculate=3)
    Schedule(driver, chance, [sequence.output for sequence in wanted]).run(40)
    assert driver.drafted > driver.accepted > 0


@pytest.mark.slow
@pytest.mark.features("guided", "speculative", "n > 1")
def test_a_whole_engine_that_drafts_ahead_says_the_same(clock: LateClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scheduler, threads and all: requests with grammars and penalties come between those that go ahead."""
    expected = answers(None)
    moved_back = 0

    def counting(cells: Tensor, meta: BatchMeta, rejected: RejectedDrafts) -> None:
        nonlocal moved_back
        moved_back += 1
        move_back(cells, meta, rejected)

    monkeypatch.setattr(device_runner, "move_back", counting)
    monkeypatch.setattr(RunnerParts, "launches", True)
    for method in AHEAD:
        asked = f'{{"method": "{method}", "model": "{DEMO / method}"}}'
        found = answers(asked, {"scheduler.speculation": "fixed", "scheduler.plan_late": False})
        assert [[c.text for c in output.outputs] for output in found] == [
            [c.text for c in output.outputs] for output in expected
        ]
    assert moved_back > 0
