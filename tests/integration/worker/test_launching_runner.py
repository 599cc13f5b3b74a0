"""Steps begun ahead of what the host knows: nobody's tokens change, whatever a request asks for."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.worker.executor import device_runner
from services.worker.executor.device_runner import DeviceRunner, DeviceStep
from services.worker.executor.host_runner import HostRunner
from services.worker.executor.timing import Mark
from services.worker.sampling import logprobs, sampler
from services.worker.speculation.settings import Method, SpeculationSettings
from shared.ids import SequenceId
from shared.messages.generation import Grammar, SamplingOptions, TokenLogprobs
from tests.integration.worker.test_sampling_on_a_backend import EVERYTHING
from tests.support.models.tiny_drafters import make_draft, make_eagle, make_medusa
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.paths import DEMO_MODEL
from tests.support.worker.compiled_grammars import compile_now
from tests.support.worker.delayed_device import LateClock, WithoutWaiting
from tests.support.worker.guided_engine import guided_backend, tiny_model
from tests.support.worker.launched_rank import DriverAhead, launching
from tests.support.worker.oracle import Oracle
from tests.support.worker.plan_driver import GREEDY, Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("launched"))


@pytest.fixture(scope="module")
def backend(tiny: TinyModel) -> HostRunner:
    return tiny_backend(tiny.path)


@pytest.fixture
def stepping(backend: HostRunner) -> HostRunner:
    backend.reset()
    return backend


@pytest.fixture
def runner(backend: HostRunner) -> DeviceRunner:
    made = launching(backend)
    made.reset()
    return made


def prompt(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, VOCABULARY) for _ in range(length)]


def everything(driver: Driver, wanted: int = OUTPUT) -> list[Sequence]:
    return [
        driver.add(
            prompt(9 + 5 * number, number),
            wanted,
            sampling=SamplingOptions(**{"seed": 100 + number, "temperature": 0.0, **params}),
            min_tokens=3,
            stop_token_ids=(2, 60),
        )
        for number, params in enumerate(EVERYTHING)
    ]


def told(sequence: Sequence) -> tuple[list[int], list[int], list[float]]:
    logprobs = sequence.logprobs
    return sequence.output, [one.token for one in logprobs], [round(one.logprob, 4) for one in logprobs]


@pytest.mark.parametrize(("ahead", "budget"), [(0, 512), (1, 23), (2, 512), (2, 40)])
def test_whatever_is_asked_for_is_drawn_as_step_by_step(
    stepping: HostRunner, backend: HostRunner, ahead: int, budget: int
) -> None:
    """Penalties, bad words, and what ends thinking follow from tokens that the host has not seen."""
    one = Driver(stepping, budget=budget)
    expected = everything(one)
    one.run()
    stepping.reset()
    driver = DriverAhead(launching(backend), ahead=ahead, budget=budget)
    sequences = everything(driver)
    driver.run()
    assert [told(sequence) for sequence in sequences] == [told(sequence) for sequence in expected]


def scores(driver: Driver) -> dict[SequenceId, list[TokenLogprobs]]:
    """Of prompts that come in chunks."""
    for number, length in enumerate((1, 17, 40)):
        params = SamplingOptions(seed=0, temperature=0.0, prompt_logprobs=number)
        driver.add(prompt(length, number), 5, sampling=params)
        driver.add(prompt(5 + length, 50 + number), 4)
    driver.run()
    found: dict[SequenceId, list[TokenLogprobs]] = {}
    for part in driver.scored:
        found.setdefault(part.sequence, []).extend(part.logprobs)
    return found


def test_prompts_are_scored_as_step_by_step(stepping: HostRunner, backend: HostRunner) -> None:
    expected = scores(Driver(stepping, budget=24))
    stepping.reset()
    found = scores(DriverAhead(launching(backend), budget=24))
    assert found == expected
    assert [len(entries) for entries in found.values()] == [16, 39]


def test_what_is_drawn_for_who_has_left_is_nobody_s(tiny: TinyModel, runner: DeviceRunner) -> None:
    """Sequences leave with steps in flight, and others come to their sequence indices and blocks with the same plan."""
    driver = DriverAhead(runner)
    staying = driver.add(prompt(20, 1), 40)
    for number in range(6):
        leaving = driver.add(prompt(30, 10 + number), 100, sampling=SamplingOptions(seed=1, presence_penalty=0.5))
        coming = driver.add(prompt(7, 20 + number), 3)
        for _ in range(4):
            driver.step()
        driver.drop(leaving)
        driver.drop(coming)
        assert coming.output[:1] == tiny.greedy(prompt(7, 20 + number), 1)
    driver.run()
    assert staying.output == tiny.greedy(prompt(20, 1), 40)


def test_all_may_leave_with_steps_in_flight(tiny: TinyModel, runner: DeviceRunner) -> None:
    driver = DriverAhead(runner)
    for number in range(3):
        driver.add(prompt(20, number), 40)
    for _ in range(5):
        driver.step()
    for sequence in list(driver.sequences.values()):
        driver.drop(sequence)
    driver.step()
    later = driver.add(prompt(33, 9), OUTPUT)
    driver.run()
    assert later.output == tiny.greedy(prompt(33, 9), OUTPUT)


def test_what_was_drawn_for_who_has_left_is_not_put_into_the_next_one_s_prompt(
    tiny: TinyModel, backend: HostRunner
) -> None:
    """Where the host is told late: with the plan that makes them change places, when drafts are asked for."""
    runner = launching(backend)
    runner.reset()
    oracle = Oracle()
    oracle.known = {tuple(prompt(7, 1)): tiny.greedy(prompt(7, 1), 40)}
    runner.rank.drafting.draft_by(oracle)
    try:
        driver = Driver(runner)
        staying, leaving = driver.add(prompt(7, 1), 20), driver.add(prompt(9, 2), 20)
        for _ in range(3):
            driver.step()
        driver.drop(leaving)
        coming = driver.add(prompt(33, 3), OUTPUT)
        driver.speculate = 4
        driver.run()
    finally:
        runner.rank.drafting.draft_by(None)
    assert driver.drafted > 0
    assert staying.output == tiny.greedy(prompt(7, 1), 40)[:20]
    assert coming.output == tiny.greedy(prompt(33, 3), OUTPUT)


def test_a_new_epoch_begins_over_steps_that_nobody_awaited(tiny: TinyModel, runner: DeviceRunner) -> None:
    driver = DriverAhead(runner, ahead=9)
    driver.add(prompt(20, 1), 8)
    for _ in range(5):
        driver.step()
    runner.reset()
    again = DriverAhead(runner, epoch=2)
    sequence = again.add(prompt(33, 2), OUTPUT)
    again.run()
    assert sequence.output == tiny.greedy(prompt(33, 2), OUTPUT)


@pytest.fixture
def late(backend: HostRunner, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceRunner, LateClock]:
    """A runner of a device that is late."""
    return late_runner(backend, monkeypatch)


def late_runner(backend: HostRunner, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceRunner, LateClock]:
    clock = LateClock()
    monkeypatch.setattr(device_runner, "clock_of", lambda device: clock)
    for module in (sampler, logprobs):
        monkeypatch.setattr(module, "to_host", clock.to_host)
    backend.reset()
    return launching(backend), clock


def test_nothing_is_read_before_it_is_there(backend: HostRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.reset()
    one = Driver(backend, budget=40)
    expected = everything(one)
    one.run()
    runner, _ = late_runner(backend, monkeypatch)
    driver = DriverAhead(runner, budget=40)
    sequences = everything(driver)
    driver.run()
    assert [told(sequence) for sequence in sequences] == [told(sequence) for sequence in expected]


def test_plain_steps_are_begun_without_waiting_for_those_under_way(late: tuple[DeviceRunner, LateClock]) -> None:
    """Neither by an event nor by asking a tensor for a number."""
    runner, clock = late
    driver = DriverAhead(runner, ahead=99)
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.3, "logprobs": 2, "bad_words": ((4,), (5, 6))},
        {"allowed_token_ids": (5, 6, 7), "logit_bias": ((5, 1.0),), "thinking_budget": 2, "thinking_end": (6, 7)},
    ]
    for number, params in enumerate(asked):
        driver.add(prompt(9, number), 30, sampling=SamplingOptions(**{"seed": 1, "temperature": 0.0, **params}))
    under_way: list[Mark] = []
    for _ in range(20):
        clock.waits.clear()
        with WithoutWaiting():
            step = driver.begin_next()
        assert isinstance(step, DeviceStep)
        assert step.launched is not None
        assert not set(map(id, clock.waits)) & set(map(id, under_way)), "those two are under way"
        under_way = [*under_way[-1:], step.launched.marks.over]
    driver.finish()


@pytest.mark.parametrize("method", ["draft", "medusa", "eagle"])
def test_whoever_drafts_observes_steps_without_waiting_for_them(
    tiny: TinyModel, method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"draft": make_draft, "medusa": make_medusa, "eagle": make_eagle}[method](tiny, tmp_path / method)
    drafting = tiny_backend(tiny.path, speculation=SpeculationSettings(method=method, model=str(made)))
    runner, clock = late_runner(drafting, monkeypatch)
    driver = DriverAhead(runner, ahead=99)
    for number in range(3):
        driver.add(prompt(9, number), OUTPUT)
    driver.step()
    clock.waits.clear()
    with WithoutWaiting():
        driver.step()
        driver.step()
    assert not clock.waits
    driver.finish()


FORCING = Grammar(
    "json",
    json.dumps(
        {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city", "days"],
        }
    ),
    compact=True,
)


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> HostRunner:
    return guided_backend(tiny_model(tmp_path_factory.mktemp("guided")))


def write(driver: Driver, backend: HostRunner) -> list[list[int]]:
    """Beside others without a grammar; one is preempted in the middle."""
    assert backend.grammars is not None
    stops = backend.card.eos_token_ids
    digits = Grammar("regex", "[0-9]{3,40}")
    sequences = []
    for number, grammar in enumerate((FORCING, None, digits, FORCING, None)):
        if grammar is not None:
            compile_now(backend.grammars, grammar)
        sampling = SamplingOptions(seed=number, temperature=float(number % 2))
        sequences.append(driver.add([5, 17, 31 + number], 40, sampling=sampling, stop_token_ids=stops, grammar=grammar))
    for _ in range(11):
        driver.step()
    driver.preempt(sequences[3])
    driver.run()
    return [sequence.output for sequence in sequences]


@pytest.mark.features("guided", "preemption")
def test_grammars_bind_what_is_drawn_ahead(guided: HostRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """By masks that follow from tokens which are awaited in time."""
    guided.reset()
    expected = write(Driver(guided), guided)
    runner, _ = late_runner(guided, monkeypatch)
    assert write(DriverAhead(runner), guided) == expected


def test_drafts_now_and_then_between_steps_that_run_ahead(tiny: TinyModel, backend: HostRunner) -> None:
    """What is accepted of them is known before the next step; what is drawn without them is read where it was drawn."""
    runner = launching(backend)
    runner.reset()
    prompts = [prompt(7, 1), prompt(33, 2), prompt(5, 3)]
    expected = [tiny.greedy(tokens, 40) for tokens in prompts]
    oracle = Oracle()
    oracle.known = {tuple(tokens): output for tokens, output in zip(prompts, expected, strict=True)}
    runner.rank.drafting.draft_by(oracle)
    try:
        driver = Driver(runner, budget=40)
        sequences = [driver.add(tokens, 40) for tokens in prompts]
        while not all(sequence.done for sequence in sequences):
            driver.speculate = 0 if len(sequences[0].output) % 5 < 3 else 4
            driver.step()
    finally:
        runner.rank.drafting.draft_by(None)
    assert 0 < driver.accepted < driver.drafted
    assert [sequence.output for sequence in sequences] == expected


def test_a_stage_of_a_pipeline_does_not_launch(backend: HostRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.rank.pipeline, "stages", 2)
    with pytest.raises(ValueError, match="main memory"):
        launching(backend)


def test_a_resumed_sequence_with_history_reads_it_on_the_device(stepping: HostRunner, backend: HostRunner) -> None:
    """Output of an earlier attempt counts into penalties, as part of what a new sequence brings."""
    params = SamplingOptions(seed=4, temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.5)
    one = Driver(stepping)
    whole = one.add(prompt(20, 1), OUTPUT, sampling=params)
    one.run()
    stepping.reset()
    driver = DriverAhead(launching(backend))
    resumed = driver.add([*prompt(20, 1), *whole.output[:5]], OUTPUT, sampling=params, prompt_length=20)
    beside = driver.add(prompt(9, 2), OUTPUT, sampling=GREEDY)
    driver.run()
    assert resumed.output == whole.output
    assert len(beside.output) == OUTPUT


def test_the_demo_model_writes_the_same_either_way() -> None:
    demo = tiny_backend(DEMO_MODEL, ops="auto", dtype="float32")
    tokens = [[1, *range(50 + number, 70 + 3 * number)] for number in range(4)]
    one = Driver(demo)
    expected = [one.add(each, 16) for each in tokens]
    one.run()
    demo.reset()
    driver = DriverAhead(launching(demo))
    sequences = [driver.add(each, 16) for each in tokens]
    driver.run()
    assert [s.output for s in sequences] == [s.output for s in expected]
