"""Sampling on a backend that computes: log-probabilities of prompts in chunks, and every parameter in mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.backend import StepOutput, run_step
from services.worker.ops.interface import OpsUnavailable
from shared.ids import SequenceId
from shared.messages.generation import SamplingOptions, TokenLogprobs
from shared.messages.worker import StepPlan
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.launched_rank import Runner, launching
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.step_by_step import StepByStep
from tests.support.worker.tiny_backend import tiny_backend


class Scoring(StepByStep):
    """A backend whose scores are kept, by sequence and position."""

    def __init__(self, backend: Runner) -> None:
        self._backend = backend
        self.card, self.num_blocks = backend.card, backend.num_blocks
        self.scores: dict[SequenceId, dict[int, TokenLogprobs]] = {}

    def step(self, plan: StepPlan) -> StepOutput:
        output = run_step(self._backend, plan)
        for scored in output.scored:
            own = self.scores.setdefault(scored.sequence, {})
            for position, entry in enumerate(scored.logprobs, start=scored.position):
                assert position not in own, "told twice"
                own[position] = entry
        return output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("sampled"))


@pytest.fixture(scope="module")
def backends(tiny: TinyModel) -> Callable[[str], Runner]:
    """On which operations, or "launched": by launches, on torch's."""

    @cache
    def get(how: str) -> Runner:
        try:
            backend = tiny_backend(tiny.path, ops="native" if how == "native" else "torch")
        except OpsUnavailable as reason:
            pytest.skip(str(reason))
        return launching(backend) if how == "launched" else backend

    return get


def prompt(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, VOCABULARY) for _ in range(length)]


@torch.inference_mode()
def exact(tiny: TinyModel, tokens: list[int]) -> Tensor:
    """[length, vocab]: what `transformers` finds likely behind each token."""
    logits: Tensor = tiny.reference(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


@pytest.mark.parametrize("how", ["torch", "native", "launched"])
@pytest.mark.parametrize("budget", [1, 7, 256])
def test_prompts_are_scored_as_transformers_scores_them_however_they_are_cut(
    tiny: TinyModel, backends: Callable[[str], Runner], how: str, budget: int
) -> None:
    backend = Scoring(backends(how))
    backends(how).reset()
    driver = Driver(backend, budget=budget)  # type: ignore[arg-type]
    scored: list[Sequence] = []
    for number, length in enumerate((1, 2, 17, 40)):
        params = SamplingOptions(seed=0, temperature=0.0, prompt_logprobs=number)
        scored.append(driver.add(prompt(length, number), 3, sampling=params))
        driver.add(prompt(5 + length, 50 + number), 4)  # beside others that do not ask
    driver.run()
    assert set(backend.scores) == {sequence.id for sequence in scored if sequence.prompt_length > 1}
    for number, sequence in enumerate(scored):
        expected = exact(tiny, sequence.tokens[: sequence.prompt_length])
        found = backend.scores.get(sequence.id, {})
        assert list(found) == list(range(1, sequence.prompt_length))
        for position, entry in found.items():
            assert_scored(expected[position - 1], sequence.tokens[position], entry, number)
        assert sequence.output == tiny.greedy(sequence.tokens[: sequence.prompt_length], 3)


def assert_scored(expected: Tensor, token: int, entry: TokenLogprobs, most_likely: int) -> None:
    assert entry.token == token
    assert entry.logprob == pytest.approx(expected[token].item(), abs=2e-3)
    assert entry.rank == int((expected >= expected[token]).sum())
    best = expected.topk(most_likely)
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=2e-3)
    assert [token for token, _ in entry.top] == best.indices.tolist()


def test_only_the_prompt_is_scored_and_only_while_it_is_computed(
    tiny: TinyModel, backends: Callable[[str], Runner]
) -> None:
    """Output of earlier attempts is none of the prompt's, though it is computed like it."""
    backend = Scoring(backends("torch"))
    backends("torch").reset()
    driver = Driver(backend, budget=6)  # type: ignore[arg-type]
    params = SamplingOptions(seed=0, temperature=0.0, prompt_logprobs=1)
    sequence = driver.add(prompt(20, 1), 12, sampling=params, prompt_length=10)
    driver.run()
    assert list(backend.scores[sequence.id]) == list(range(1, 10))


EVERYTHING: list[dict[str, Any]] = [
    {"bad_words": ((7,), (9, 12), (30, 31, 32)), "temperature": 1.2},
    {"allowed_token_ids": tuple(range(10, 60)), "temperature": 0.9, "top_p": 0.8},
    {"allowed_token_ids": (5, 6, 7), "bad_words": ((5, 5), (6,)), "presence_penalty": 1.5, "temperature": 0.7},
    {"thinking_budget": 4, "thinking_end": (90, 91)},
    {"thinking_budget": 2, "thinking_end": (90,), "thinking_start": (11,), "logit_bias": ((11, 8.0),)},
    {"temperature": 1.0, "top_k": 12, "min_p": 0.02, "frequency_penalty": 0.7, "bad_words": ((3, 4),)},
    {"repetition_penalty": 1.4, "logit_bias": ((4, -9.0), (77, 3.0)), "temperature": 0.8},
    {"logprobs": 4, "temperature": 1.0},
    {"logprob_token_ids": (8, 3), "logprobs": 0},
    {},
]


def sampled(backend: Runner, cases: list[tuple[list[int], int, dict[str, Any]]], budget: int) -> list[Sequence]:
    """Each case: tokens, how many of them are prompt, parameters. Twelve output tokens of each, in one batch."""
    backend.reset()
    driver = Driver(backend, budget=budget)
    sequences = [
        driver.add(
            tokens,
            12,
            sampling=SamplingOptions(**{"seed": 100 + number, "temperature": 0.0, **params}),
            prompt_length=length,
            min_tokens=3,
            stop_token_ids=(2, 60),
        )
        for number, (tokens, length, params) in enumerate(cases)
    ]
    driver.run()
    return sequences


@pytest.mark.parametrize("how", ["torch", "launched"])
def test_everything_at_once_is_each_alone_and_goes_on_in_the_middle(
    backends: Callable[[str], Runner], how: str
) -> None:
    """A batch changes nobody's tokens, and an engine that takes over draws what the first would have."""
    backend = backends(how)
    prompts = [prompt(9 + number, number) for number in range(len(EVERYTHING))]
    cases = [(tokens, len(tokens), params) for tokens, params in zip(prompts, EVERYTHING, strict=True)]
    together = [sequence.output for sequence in sampled(backend, cases, 16)]
    for number, (tokens, length, params) in enumerate(cases):
        alone = sampled(backend, [(tokens, length, {"seed": 100 + number, **params})], 256)
        assert alone[0].output == together[number], params
    for middle in (1, 5, 11):
        resumed = [(tokens + together[n][:middle], length, params) for n, (tokens, length, params) in enumerate(cases)]
        assert [sequence.output for sequence in sampled(backend, resumed, 64)] == together


def test_what_was_asked_is_seen_in_the_output(backends: Callable[[str], Runner]) -> None:
    prompts = [prompt(9 + number, number) for number in range(len(EVERYTHING))]
    cases = [(tokens, len(tokens), params) for tokens, params in zip(prompts, EVERYTHING, strict=True)]
    outputs = [sequence.output for sequence in sampled(backends("torch"), cases, 64)]
    assert 7 not in outputs[0]
    assert set(outputs[1]) <= set(range(10, 60))
    assert set(outputs[2]) <= {5, 7}
    assert all(pair != (5, 5) for pair in zip(outputs[2], outputs[2][1:], strict=False))
    assert outputs[3][4:6] == [90, 91]
    begun = outputs[4].index(11)
    assert outputs[4][begun + 3] == 90
    assert all(token not in (2, 60) for output in outputs for token in output[:3])
