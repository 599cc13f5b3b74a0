"""Decodes that are one call of the C++ library draw what they draw in many: whoever comes, goes or asks for what."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.backend import StepOutput
from services.worker.batch.batch import BrokenPlan
from services.worker.executor.host_runner import HostRunner
from services.worker.graphs.host_decodes import HostDecode
from services.worker.models.decoder import Decoder
from services.worker.sampling.random_numbers import race_keys
from shared.messages.generation import SamplingOptions, TokenLogprobs
from shared.messages.worker import StepPlan
from tests.integration.worker.test_launching_runner import everything, prompt
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.launched_rank import DriverAhead
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.threaded_rank import OnTwoThreads
from tests.support.worker.tiny_backend import tiny_backend

WANTED = 45
"""Tokens: two bounds of blocks are passed."""
DRAWS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("decodes"))


@pytest.fixture(scope="module")
def made(tiny: TinyModel) -> HostRunner:
    return tiny_backend(tiny.path, ops="native", threads=2)


@pytest.fixture
def backend(made: HostRunner) -> Iterator[HostRunner]:
    made.reset()
    yield made
    made.reset()


def by_many_calls(backend: HostRunner) -> HostRunner:
    """The same rank without them."""
    runner = HostRunner(backend.rank)
    runner._decodes = None
    return runner


def count_runs(backend: HostRunner, monkeypatch: pytest.MonkeyPatch) -> list[HostDecode]:
    """The steps that are computed by one call, from here on, as they were then."""
    computed: list[HostDecode] = []
    compute = HostDecode.compute

    def counting(step: HostDecode) -> float:
        computed.append(copy(step))  # which is used again
        return compute(step)

    monkeypatch.setattr(HostDecode, "compute", counting)
    return computed


def drawing(driver: Driver) -> list[Sequence]:
    """One after the other comes, draws in its own way, and leaves."""
    return [
        driver.add(prompt(5 + 9 * number, number), WANTED - 4 * number, sampling=SamplingOptions(seed=number, **how))
        for number, how in enumerate(DRAWS)
    ]


@pytest.mark.parametrize("ahead", [0, 2])
def test_draws_are_those_of_many_calls(
    tiny: TinyModel, backend: HostRunner, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    one = Driver(by_many_calls(backend))
    expected = drawing(one)
    one.run()
    backend.reset()
    computed, runner = count_runs(backend, monkeypatch), OnTwoThreads(backend)
    driver = DriverAhead(runner, ahead=ahead)  # type: ignore[arg-type]  # it begins steps, too
    sequences = drawing(driver)
    try:
        driver.run()
    finally:
        runner.stop()
    assert [each.output for each in sequences] == [each.output for each in expected]
    assert sequences[0].output == tiny.greedy(prompt(5, 0), WANTED)
    assert len(computed) > WANTED / 2


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_the_library_does_not_draw_is_drawn_from_its_logits(
    backend: HostRunner, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    one = Driver(by_many_calls(backend))
    expected = everything(one)
    one.run()
    backend.reset()
    computed, runner = count_runs(backend, monkeypatch), OnTwoThreads(backend)
    driver = DriverAhead(runner, ahead=ahead)  # type: ignore[arg-type]  # it begins steps, too
    sequences = everything(driver)
    try:
        driver.run()
    finally:
        runner.stop()
    assert [(each.output, each.logprobs) for each in sequences] == [(each.output, each.logprobs) for each in expected]
    assert len(computed) >= len(expected[0].output) - 1


@pytest.mark.parametrize(
    ("asked", "begins"),
    [
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": ((5, 3.0),)}, None),
        ({"allowed_token_ids": (5, 6, 7), "presence_penalty": 0.3}, None),
        ({"logprobs": 2}, None),
        ({"logprobs": 70}, 0),
        ({"logprob_token_ids": (5, 6)}, 0),
        ({"bad_words": ((5,),)}, 0),
        ({"thinking_budget": 3, "thinking_end": (7,)}, 2),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_one_who_asks_for_more_leaves_the_others_to_the_library(
    backend: HostRunner, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], begins: int | None
) -> None:
    """`begins`: the first step whose token the sampler draws for him; None: the library draws all."""

    def drawn(runner: HostRunner) -> list[tuple[list[int], list[TokenLogprobs]]]:
        driver, how = Driver(runner), SamplingOptions(seed=0, temperature=1.0)
        asking = [
            how,
            SamplingOptions(seed=0, temperature=1.0, **asked),
            SamplingOptions(seed=0, temperature=0, **asked),
        ]
        each = [driver.add(prompt(5, 1), 6, sampling=sampling) for sampling in asking]
        driver.run()
        runner.reset()
        return [(one.output, one.logprobs) for one in each]

    expected, computed = drawn(by_many_calls(backend)), count_runs(backend, monkeypatch)
    assert drawn(backend) == expected
    parts = [step.run.draws.left for step in computed]
    left = [None if part is None else part.rows.tolist() for part in parts]
    begins = 5 if begins is None else begins
    assert left == [None] * begins + [[1, 2]] * (5 - begins)


def test_min_tokens_are_drawn_by_the_library(backend: HostRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who want some draw no stop token before, and those who may draw nothing else draw one all the same."""

    def drawn(runner: HostRunner) -> list[list[int]]:
        driver, stops = Driver(runner), tuple(range(3, VOCABULARY, 2))
        each = [
            driver.add(prompt(5, n), 10, min_tokens=4, stop_token_ids=stops, sampling=SamplingOptions(seed=n, **how))
            for n, how in enumerate(({"allowed_token_ids": (3, 5)}, {}))
        ]
        driver.run()
        runner.reset()
        return [one.output for one in each]

    expected, computed = drawn(by_many_calls(backend)), count_runs(backend, monkeypatch)
    found = drawn(backend)
    assert found == expected
    assert len(computed) == 10 - 1
    assert set(found[0]) <= {3, 5}
    assert not any(token > 2 and token % 2 for token in found[1][:4])


def test_one_that_comes_finds_the_others_where_they_are(
    tiny: TinyModel, backend: HostRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, driver = count_runs(backend, monkeypatch), Driver(backend)
    staying = driver.add(prompt(20, 1), WANTED)
    for number in range(5):
        coming = driver.add(prompt(7 + number, 2 + number), 3)
        while not coming.done:
            driver.step()
        assert coming.output == tiny.greedy(prompt(7 + number, 2 + number), 3)
    driver.preempt(staying)
    driver.run()
    assert staying.output == tiny.greedy(prompt(20, 1), WANTED)
    assert computed


def test_a_context_fills_up_to_its_end(tiny: TinyModel) -> None:
    backend = tiny_backend(tiny.path, ops="native", max_model_len=40)
    driver = Driver(backend)
    short, long = driver.add(prompt(4, 1), 30), driver.add(prompt(8, 2), 33)
    driver.run()
    assert long.output == tiny.greedy(prompt(8, 2), 33)
    assert short.output == tiny.greedy(prompt(4, 1), 30)


def test_blocks_that_are_full_break_a_plan(backend: HostRunner) -> None:
    driver = Driver(backend)
    driver.add(prompt(3, 1), WANTED)
    driver.step()
    prepare = backend.prepare

    def without_blocks(plan: StepPlan) -> object:
        bare = [type(work)(work.sequence, work.count, b"", work.sample) for work in plan.work]
        return prepare(type(plan)(epoch=plan.epoch, step=plan.step, work=tuple(bare)))

    backend.prepare = without_blocks  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(BrokenPlan, match="its blocks are full"):
            driver.run()
    finally:
        del backend.prepare  # type: ignore[method-assign]


def test_logits_are_in_one_place_however_many_rows_came_before(
    backend: HostRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As drafts make more rows than there are sequences, for which there is another place."""
    assert isinstance(backend.rank.decoder, Decoder)
    native = backend.rank.decoder.native
    assert native is not None
    place = native.room_for_logits(4 * backend.rank.sequences.tokens.shape[0])
    computed, driver = count_runs(backend, monkeypatch), Driver(backend)
    driver.add(prompt(5, 1), 4)
    driver.run()
    assert {step.run.logits.data_ptr() for step in computed} == {place.data_ptr()}


@pytest.mark.parametrize("how", DRAWS[:2])
def test_what_is_no_number_ends_its_sequence_and_no_other(tiny: TinyModel, how: dict[str, float]) -> None:
    """Keys and values of one of them become NaN between two steps."""
    backend = tiny_backend(tiny.path, ops="native")
    driver = Driver(backend)
    sound, spoilt = (driver.add(prompt(5, seed), 12, sampling=SamplingOptions(seed=0, **how)) for seed in (1, 2))
    outputs: list[StepOutput] = []
    for _ in range(4):
        driver.step()
    for keys, values in backend.rank.caches:
        for cache in (keys, values):
            cache[spoilt.blocks[0]] = torch.nan
    before = len(sound.output)
    prepare = backend.prepare

    def watched(plan: StepPlan) -> object:
        step = prepare(plan)
        result = step.result

        def read() -> StepOutput:
            outputs.append(result())
            return outputs[-1]

        step.result = read  # type: ignore[method-assign]
        return step

    backend.prepare = watched  # type: ignore[method-assign,assignment]
    try:
        driver.step()
    finally:
        del backend.prepare  # type: ignore[method-assign]
    assert [(each.sequence, each.error) for each in outputs[0].failed] == [(spoilt.id, "the model computed NaN")]
    assert len(sound.output) == before + 1


def test_keys_are_those_of_random_numbers(backend: HostRunner) -> None:
    assert isinstance(backend.rank.decoder, Decoder)
    native = backend.rank.decoder.native
    assert native is not None
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 50, dtype=np.uint64, endpoint=False)
    positions = generator.integers(0, 2**31, 50).astype(np.int32)
    found = np.zeros(50, dtype=np.int64)
    for seed, position, to in zip(seeds.tolist(), positions.tolist(), range(50), strict=True):
        native._kernels.library.baton_race_key(seed, position, found[to:].ctypes.data)
    assert (found == race_keys(seeds, positions)).all()
