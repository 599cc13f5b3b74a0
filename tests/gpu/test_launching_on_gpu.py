"""Steps launched ahead on a real GPU: what the device feeds itself, and that nobody waits for it to begin the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.executor.device_runner import DeviceRunner, DeviceStep
from services.worker.executor.host_runner import HostRunner
from services.worker.executor.torch_backend import create_backend
from services.worker.speculation.settings import SpeculationSettings
from shared.messages.generation import SamplingOptions
from tests.integration.worker.test_launching_runner import everything, prompt
from tests.integration.worker.test_sampling_on_a_backend import EVERYTHING
from tests.support.models.tiny_drafters import make_eagle, make_medusa
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.launched_rank import DriverAhead
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    # PyTorch says so whenever it is asked to look out for whatever synchronises.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

OUTPUT = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("launched"))


@pytest.fixture(scope="module", params=["graphs", "eager"])
def backend(request: pytest.FixtureRequest, tiny: TinyModel) -> DeviceRunner:
    eager = request.param == "eager"
    settings = tiny_settings(Path(tiny.path), device="cuda:0", dtype="float32", ops="auto", enforce_eager=eager)
    made = create_backend(settings)
    assert isinstance(made, DeviceRunner)
    return made


@pytest.fixture
def runner(backend: DeviceRunner) -> Iterator[DeviceRunner]:
    backend.reset()
    yield backend
    torch.cuda.set_sync_debug_mode("default")
    backend.reset()


def test_greedy_tokens_are_the_reference_s(tiny: TinyModel, runner: DeviceRunner) -> None:
    prompts = [prompt(length, length) for length in (1, 15, 16, 17, 40, 90)]
    driver = DriverAhead(runner, budget=50)
    sequences = [driver.add(tokens, OUTPUT) for tokens in prompts]
    driver.run()
    assert [sequence.output for sequence in sequences] == [tiny.greedy(tokens, OUTPUT) for tokens in prompts]


@pytest.mark.parametrize("budget", [512, 40])
def test_whatever_is_asked_for_is_drawn_as_step_by_step(runner: DeviceRunner, budget: int) -> None:
    one = Driver(HostRunner(runner.rank), budget=budget)
    expected = everything(one, OUTPUT)
    one.run()
    runner.reset()
    driver = DriverAhead(runner, budget=budget)
    sequences = everything(driver, OUTPUT)
    driver.run()
    assert [sequence.output for sequence in sequences] == [sequence.output for sequence in expected]


ASKED: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}, {}],
    "random": [
        {"temperature": 0.8},
        {"temperature": 1.1, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.1},
    ],
    "mixed": EVERYTHING,
}


@pytest.mark.parametrize("asked", list(ASKED))
def test_a_step_is_begun_without_waiting_for_the_device(runner: DeviceRunner, asked: str) -> None:
    """PyTorch raises where anything in it would wait."""
    driver = DriverAhead(runner, ahead=1)
    for number, params in enumerate(ASKED[asked]):
        sampling = SamplingOptions(**{"seed": number, "temperature": 0.0, **params})
        driver.add(prompt(9, number), OUTPUT + 8, sampling=sampling)
    for _ in range(3):
        driver.step()
    driver.finish()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(OUTPUT):
        driver.step()
    torch.cuda.set_sync_debug_mode("default")
    driver.run()


@pytest.fixture(scope="module", params=["medusa", "eagle"])
def drafting(request: pytest.FixtureRequest, tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> DeviceRunner:
    make = {"medusa": make_medusa, "eagle": make_eagle}[request.param]
    drafter = SpeculationSettings(method=request.param, model=str(make(tiny, tmp_path_factory.mktemp("drafter"))))
    made = create_backend(
        tiny_settings(Path(tiny.path), device="cuda:0", dtype="float32", ops="auto", speculation=drafter)
    )
    assert isinstance(made, DeviceRunner)
    return made


def test_drafts_that_are_in_doubt_change_no_token(drafting: DeviceRunner) -> None:
    """Steps are moved back on the device by what does not stand."""
    drafting.reset()
    params = [{}, {"temperature": 0.8}, {"temperature": 1.1, "top_p": 0.9, "logprobs": 1}, {"repetition_penalty": 1.2}]
    outputs = []
    for driver in (Driver(HostRunner(drafting.rank)), DriverAhead(drafting, speculate=3)):
        sequences = [
            driver.add(
                prompt(9 + 8 * number, number),
                OUTPUT,
                sampling=SamplingOptions(**{"seed": number, "temperature": 0.0, **asked}),
            )
            for number, asked in enumerate(params)
        ]
        driver.run()
        outputs.append([sequence.output for sequence in sequences])
        drafting.reset()
    assert outputs[0] == outputs[1]
    assert driver.drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_step_with_drafts_is_begun_without_asking_the_device(drafting: DeviceRunner, temperature: float) -> None:
    drafting.reset()
    driver = DriverAhead(drafting, ahead=1, speculate=3)
    for number in range(3):
        driver.add(prompt(9, number), 200, sampling=SamplingOptions(seed=number, temperature=temperature))
    for _ in range(3):
        driver.step()
    driver.finish()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(OUTPUT):
            driver.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    driver.run()


def test_steps_say_when_they_were_over_and_where_their_time_went(runner: DeviceRunner) -> None:
    driver = DriverAhead(runner, ahead=99)
    driver.add(prompt(40, 1), OUTPUT)
    steps = [driver.begin_next() for _ in range(OUTPUT - 1)]
    outputs = [step.result() for step in steps]
    assert all(isinstance(step, DeviceStep) for step in steps)
    ended = [output.ended for output in outputs if output.ended is not None]
    assert len(ended) == len(outputs)
    assert ended == sorted(ended)
    assert all(output.timing.forward > 0 and output.timing.sample > 0 for output in outputs)
