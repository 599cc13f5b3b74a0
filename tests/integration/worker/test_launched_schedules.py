"""Sequences come, leave, are preempted and resumed at random, with steps in flight or drafts: each draws what it would
alone."""

from __future__ import annotations

from random import Random

import pytest

from services.worker.executor.device_runner import DeviceRunner
from services.worker.executor.host_runner import HostRunner
from services.worker.speculation.ngram import NgramProposer
from shared.messages.generation import SamplingOptions
from tests.support.models.tiny_models import VOCABULARY, make_model
from tests.support.worker.launched_rank import DriverAhead, launching
from tests.support.worker.plan_driver import GREEDY, Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

LONGEST = 40
SAMPLINGS = [
    GREEDY,
    SamplingOptions(seed=1, temperature=0.9, top_p=0.9),
    SamplingOptions(seed=2, temperature=0.0, repetition_penalty=1.3),
    SamplingOptions(seed=3, temperature=1.1, presence_penalty=0.6, bad_words=((7,), (9, 12))),
    SamplingOptions(seed=4, temperature=0.0, thinking_budget=5, thinking_end=(90, 91)),
]
SEEDS = range(4)


def prompt(number: int) -> list[int]:
    chance = Random(number)
    period = [chance.randrange(3, VOCABULARY) for _ in range(1 + number % 9)]
    return (period * 60)[: 1 + 7 * number]


CASES = [(prompt(number), SAMPLINGS[number % len(SAMPLINGS)]) for number in range(12)]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> HostRunner:
    return tiny_backend(make_model("llama", tmp_path_factory.mktemp("scheduled")).path)


@pytest.fixture(scope="module")
def expected(backend: HostRunner) -> list[list[int]]:
    driver = Driver(backend)
    sequences = [driver.add(tokens, LONGEST, sampling=sampling) for tokens, sampling in CASES]
    driver.run()
    return [sequence.output for sequence in sequences]


@pytest.fixture
def runner(backend: HostRunner, expected: list[list[int]]) -> DeviceRunner:
    backend.reset()
    backend.rank.drafting.draft_by(None)
    return launching(backend)


class Schedule:
    """What happens to the sequences of a driver."""

    def __init__(self, driver: Driver, chance: Random, expected: list[list[int]]) -> None:
        self.driver = driver
        self.chance = chance
        self.expected = expected
        self.running: list[tuple[int, Sequence]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._happens()
            self.driver.step()
        self.driver.run()
        for case, sequence in self.running:
            assert sequence.output == self.expected[case][: sequence.wanted], CASES[case]

    def _happens(self) -> None:
        going = [(case, sequence) for case, sequence in self.running if not sequence.done]
        what = self.chance.choice(["come", "come", "resume", "leave", "preempt", "nothing", "nothing"])
        if what in ("come", "resume") and len(going) < 8:
            self._add(resumed=what == "resume")
        elif what == "leave" and len(going) > 2:
            leaving = self.chance.choice(going)
            self.running.remove(leaving)
            self.driver.drop(leaving[1])
        elif what == "preempt" and going:
            self.driver.preempt(self.chance.choice(going)[1])

    def _add(self, *, resumed: bool) -> None:
        case = self.chance.randrange(len(CASES))
        tokens, sampling = CASES[case]
        wanted = self.chance.randrange(2, LONGEST)
        before = self.expected[case][: self.chance.randrange(1, wanted)] if resumed else []
        added = self.driver.add([*tokens, *before], wanted, sampling=sampling, prompt_length=len(tokens))
        self.running.append((case, added))


@pytest.mark.parametrize("seed", SEEDS)
def test_with_steps_in_flight(runner: DeviceRunner, expected: list[list[int]], seed: int) -> None:
    chance = Random(seed)
    driver = DriverAhead(runner, ahead=1 + seed % 3, budget=chance.choice([19, 40, 512]))
    Schedule(driver, chance, expected).run(40)


class NowAndThen(Driver):
    """Drafts in some steps."""

    def step(self) -> None:
        self.speculate = 3 if Random(self._step).random() < 0.5 else 0
        super().step()


@pytest.mark.parametrize("seed", SEEDS)
def test_with_drafts_now_and_then(runner: DeviceRunner, expected: list[list[int]], seed: int) -> None:
    runner.rank.drafting.draft_by(NgramProposer(most=3, longest=3, shortest=1))
    chance = Random(seed)
    driver = NowAndThen(runner, budget=chance.choice([19, 40, 512]))
    Schedule(driver, chance, expected).run(40)
    assert driver.drafted > driver.accepted > 0
