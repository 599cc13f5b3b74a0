"""Steps prepared beside those that draw what they go on with: nobody's tokens change, whatever a request asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from services.worker.backend import run_step
from services.worker.executor.host_runner import HostRunner
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from tests.integration.worker.test_launching_runner import OUTPUT, everything, prompt, scores, told, write
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.guided_engine import guided_backend, tiny_model
from tests.support.worker.launched_rank import DriverAhead
from tests.support.worker.oracle import Oracle
from tests.support.worker.plan_driver import GREEDY, Driver
from tests.support.worker.threaded_rank import SECONDS, OnTwoThreads
from tests.support.worker.tiny_backend import tiny_backend

LATE = 0.002
"""Seconds: enough for steps to be prepared ahead, whatever they compute."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def backend(tiny: TinyModel) -> HostRunner:
    return tiny_backend(tiny.path)


@pytest.fixture
def beside() -> Iterator[Callable[[HostRunner], OnTwoThreads]]:
    made: list[OnTwoThreads] = []

    def make(backend: HostRunner, late: float = LATE) -> OnTwoThreads:
        backend.reset()
        made.append(OnTwoThreads(backend, late))
        return made[-1]

    yield make
    for runner in made:
        runner.gate.set()
        runner.stop()


def ahead_of(runner: OnTwoThreads, ahead: int = 2, budget: int = 512) -> DriverAhead:
    return DriverAhead(runner, ahead=ahead, budget=budget)  # type: ignore[arg-type]  # it begins steps, too


@pytest.mark.parametrize(("ahead", "budget"), [(0, 512), (1, 23), (2, 512)])
def test_whatever_is_asked_for_is_drawn_as_step_by_step(
    backend: HostRunner, beside: Callable[[HostRunner], OnTwoThreads], ahead: int, budget: int
) -> None:
    backend.reset()
    one = Driver(backend, budget=budget)
    expected = everything(one)
    one.run()
    driver = ahead_of(beside(backend), ahead, budget)
    sequences = everything(driver)
    driver.run()
    assert [told(sequence) for sequence in sequences] == [told(sequence) for sequence in expected]


def test_prompts_are_scored_as_step_by_step(backend: HostRunner, beside: Callable[[HostRunner], OnTwoThreads]) -> None:
    backend.reset()
    expected = scores(Driver(backend, budget=24))
    assert scores(ahead_of(beside(backend), budget=24)) == expected


def test_what_is_drawn_for_who_has_left_is_nobody_s(
    tiny: TinyModel, backend: HostRunner, beside: Callable[[HostRunner], OnTwoThreads]
) -> None:
    """Sequences leave with steps in flight, and others come to their sequence indices and blocks with the same plan."""
    driver = ahead_of(beside(backend))
    staying = driver.add(prompt(20, 1), 40)
    for number in range(6):
        leaving = driver.add(prompt(30, 10 + number), 100, sampling=SamplingOptions(seed=1, presence_penalty=0.5))
        coming = driver.add(prompt(7, 20 + number), 3)
        for _ in range(4):
            driver.step()
        driver.drop(leaving)
        driver.drop(coming)
    driver.run()
    assert staying.output == tiny.greedy(prompt(20, 1), 40)
    again = driver.add(prompt(33, 2), OUTPUT, sampling=GREEDY)
    driver.run()
    assert again.output == tiny.greedy(prompt(33, 2), OUTPUT)


@pytest.mark.features("guided", "preemption")
def test_grammars_bind_what_is_prepared_ahead(
    tmp_path_factory: pytest.TempPathFactory, beside: Callable[[HostRunner], OnTwoThreads]
) -> None:
    guided = guided_backend(tiny_model(tmp_path_factory.mktemp("guided")))
    expected = write(Driver(guided), guided)
    assert write(ahead_of(beside(guided)), guided) == expected


def begun(runner: OnTwoThreads, *prompts: list[int]) -> None:
    """Sequences 1, 2 and so on, each with its first token on the way."""
    new = tuple(
        NewSequence(
            sequence=SequenceId(number),
            tokens=pack(tokens),
            prompt_length=len(tokens),
            computed=0,
            blocks=pack([2 * number, 2 * number + 1]),
            sampling=GREEDY,
        )
        for number, tokens in enumerate(prompts, start=1)
    )
    work = tuple(SequenceWork(each.sequence, each.prompt_length, b"", True) for each in new)
    runner.begin(StepPlan(epoch=Incarnation(1), step=0, new=new, work=work))


def decodes(step: int, *sequences: int, speculate: int = 0, released: tuple[int, ...] = ()) -> StepPlan:
    work = tuple(SequenceWork(SequenceId(each), 1, b"", True, speculate) for each in sequences)
    gone = tuple(SequenceId(each) for each in released)
    return StepPlan(epoch=Incarnation(1), step=step, released=gone, work=work)


def test_decodes_are_prepared_before_anything_before_them_is_computed(
    tiny: TinyModel, backend: HostRunner, beside: Callable[[HostRunner], OnTwoThreads]
) -> None:
    runner = beside(backend)
    runner.gate.clear()
    begun(runner, prompt(9, 1), prompt(5, 2))
    steps = [runner.begin(decodes(number, 1, 2)) for number in (1, 2, 3)]
    assert not any(step.computed for step in steps), "nothing was waited for"
    runner.gate.set()
    tokens = [[each.tokens[0] for each in step.result().sampled] for step in steps]
    expected = [tiny.greedy(prompt(9, 1), 4), tiny.greedy(prompt(5, 2), 4)]
    assert tokens == [list(pair) for pair in zip(*(output[1:] for output in expected), strict=True)]


@pytest.mark.parametrize("drafting", [False, True], ids=["somebody leaves", "behind drafts"])
def test_what_needs_more_than_lengths_waits_until_all_before_it_is_computed(
    backend: HostRunner, beside: Callable[[HostRunner], OnTwoThreads], drafting: bool
) -> None:
    runner = beside(backend)
    runner.gate.clear()
    begun(runner, prompt(9, 1), prompt(5, 2))
    plan = decodes(2, 1, 2) if drafting else decodes(2, 1, released=(2,))
    last = runner.begin(decodes(1, 1, 2, speculate=3 if drafting else 0))
    over_before: list[bool] = []

    def prepare() -> None:
        step = runner.begin(plan)
        over_before.append(last.computed)
        step.result()

    preparing = threading.Thread(target=prepare)
    preparing.start()
    preparing.join(0.05)
    assert not over_before, "it waits"
    runner.gate.set()
    preparing.join(SECONDS)
    assert over_before == [True]


def test_what_computing_raises_is_raised_where_it_is_waited_for(
    backend: HostRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.reset()
    runner = HostRunner(backend.rank)
    step = runner.prepare(StepPlan(epoch=Incarnation(1), step=0))
    step.launch()
    assert step.result().sampled == ()

    def burns(*_: object, **__: object) -> None:
        raise ArithmeticError("the processor burns")

    monkeypatch.setattr(backend.rank, "forward", burns)
    new = NewSequence(
        sequence=SequenceId(1), tokens=pack([5]), prompt_length=1, computed=0, blocks=pack([1]), sampling=GREEDY
    )
    plan = StepPlan(epoch=Incarnation(1), step=1, new=(new,), work=(SequenceWork(SequenceId(1), 1, b"", True),))
    with pytest.raises(ArithmeticError):
        run_step(runner, plan)
    with pytest.raises(ArithmeticError, match="burns"):
        runner.wait()


def test_steps_that_may_draft_are_prepared_in_their_turn(
    tiny: TinyModel, backend: HostRunner, beside: Callable[[HostRunner], OnTwoThreads]
) -> None:
    """Several are on their way, and how many drafts of each will stand is known to nobody."""
    prompts = [prompt(9, 1), prompt(5, 2)]
    expected = [tiny.greedy(tokens, 20) for tokens in prompts]
    oracle = Oracle()
    oracle.known = {tuple(tokens): output for tokens, output in zip(prompts, expected, strict=True)}
    runner = beside(backend)
    backend.rank.drafting.draft_by(oracle)
    try:
        begun(runner, *prompts)
        steps = [runner.begin(decodes(number, 1, 2, speculate=3 * (number != 3))) for number in (1, 2, 3, 4)]
        outputs = [step.result() for step in steps]
    finally:
        backend.rank.drafting.draft_by(None)
    drawn = [[token for output in outputs for token in output.sampled[place].tokens] for place in (0, 1)]
    assert drawn == [output[1 : 1 + len(tokens)] for output, tokens in zip(expected, drawn, strict=True)]
    assert sum(output.drafted for output in outputs) > 0
    assert all(output.timing.prepare > 0 for output in outputs if output.drafted), "where it is not beside, it counts"


def test_a_stage_of_a_pipeline_goes_step_by_step(backend: HostRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.rank.pipeline, "stages", 2)
    assert HostRunner(backend.rank).mode == "sequential"
