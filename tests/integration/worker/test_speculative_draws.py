"""With every method, random tokens have the model's distribution: chi-squared over 50,000 draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.backend import run_step
from services.worker.executor.host_runner import HostRunner
from services.worker.speculation.settings import Method, SpeculationSettings
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from tests.support.models.tiny_drafters import make_draft, make_eagle, make_medusa
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.tiny_backend import tiny_backend

VOCABULARY = 11
DRAWS = 50_000
"""Two of each sequence."""
TEMPERATURE, TOP_P = 1.5, 0.9
PROMPT = [3, 7, 4, 5, 6, 7, 8, 9, 10, 3, 7, 4, 8, 8, 3, 7, 4]
"""A block and one token, with something to look up."""
AT_ONCE = 5_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("few-words"), vocab_size=VOCABULARY, num_hidden_layers=1)


def speculation_of(method: Method, model: TinyModel, folder: Path) -> SpeculationSettings:
    makers = {"draft": make_draft, "medusa": make_medusa, "eagle": make_eagle}
    if method == "ngram":
        return SpeculationSettings(method=method, num_speculative_tokens=3, prompt_lookup_min=1)
    return SpeculationSettings(method=method, num_speculative_tokens=3, model=str(makers[method](model, folder)))


def backend_of(model: TinyModel, speculation: SpeculationSettings) -> HostRunner:
    return tiny_backend(
        model.path,
        max_model_len=2 * BLOCK_SIZE,
        kv_memory_bytes=48 << 20,
        max_num_seqs=AT_ONCE + 1,
        max_batch_tokens=4 * AT_ONCE,
        speculation=speculation,
    )


def truth(model: TinyModel, tokens: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    """The distribution behind `tokens`, by the definitions of temperature and top_p."""
    chances = torch.softmax(model.logits(tokens)[-1] / TEMPERATURE, dim=0)
    ordered, ids = chances.sort(descending=True)
    kept = ordered.cumsum(0) - ordered < TOP_P
    chances[ids[~kept]] = 0.0
    return (chances / chances.sum()).double().numpy()


def draws(runner: HostRunner, first_seed: int) -> tuple[list[tuple[int, ...]], int, int]:
    """Output tokens of AT_ONCE sequences of equal prompts, of two steps; their drafted and accepted tokens.

    The prompt's block is computed once, and shared: prompts one by one would take most of the time.
    """
    runner.reset()
    sharing = new(AT_ONCE, first_seed, computed=0)
    work = (SequenceWork(SequenceId(AT_ONCE), len(PROMPT), b"", True),)
    run_step(runner, StepPlan(epoch=Incarnation(1), step=0, new=(sharing,), work=work))
    added = tuple(new(number, first_seed + number, computed=BLOCK_SIZE) for number in range(AT_ONCE))
    outputs: list[tuple[int, ...]] = [()] * AT_ONCE
    drafted = accepted = 0
    for step in (1, 2):
        work = tuple(SequenceWork(SequenceId(number), 1, b"", True, 3) for number in range(AT_ONCE))
        released = (SequenceId(AT_ONCE),) if step == 1 else ()
        plan = StepPlan(epoch=Incarnation(1), step=step, released=released, new=added if step == 1 else (), work=work)
        output = run_step(runner, plan)
        outputs = [(*known, *sampled.tokens) for known, sampled in zip(outputs, output.sampled, strict=True)]
        drafted, accepted = drafted + output.drafted, accepted + sum(output.accepted)
    return outputs, drafted, accepted


def new(number: int, seed: int, *, computed: int) -> NewSequence:
    return NewSequence(
        sequence=SequenceId(number),
        tokens=pack(PROMPT),
        prompt_length=len(PROMPT),
        computed=computed,
        blocks=pack([0, 1 + number]),
        sampling=SamplingOptions(seed=seed, temperature=TEMPERATURE, top_p=TOP_P),
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["ngram", "draft", pytest.param("medusa", marks=pytest.mark.slow), "eagle"])
def test_draws_have_the_models_distribution(method: Method, model: TinyModel, tmp_path: Path) -> None:
    runner = backend_of(model, speculation_of(method, model, tmp_path))
    seen: dict[tuple[int, ...], np.ndarray] = {}  # type: ignore[type-arg]
    drafted = accepted = 0
    for first_seed in range(0, DRAWS // 2, AT_ONCE):
        outputs, tried, stood = draws(runner, 1_000_003 * first_seed)
        drafted, accepted = drafted + tried, accepted + stood
        for output in outputs:
            for place in (0, 1):
                counts = seen.setdefault(output[:place], np.zeros(VOCABULARY))
                counts[output[place]] += 1
    assert 0 < accepted < drafted
    checked = 0
    for known, counts in seen.items():
        expected = truth(model, [*PROMPT, *known]) * counts.sum()
        assert counts[expected == 0].sum() == 0, "what top_p leaves out is never drawn"
        likely = expected >= 5
        statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
        freedom = int(likely.sum()) - 1
        if freedom > 0:
            checked += int(counts.sum())
            # Five standard deviations of the statistic, by Wilson and Hilferty: of hundreds of tests none may fail.
            spread = (2 / (9 * freedom)) ** 0.5
            assert (statistic / freedom) ** (1 / 3) < 1 - spread**2 + 5 * spread, (known, counts, expected)
    assert checked >= DRAWS
