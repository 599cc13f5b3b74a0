"""Drafts of models with states: whatever is accepted and rejected, what is said stays what `transformers` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.scheduler.core.limits import EngineLimits
from services.worker.executor.host_runner import HostRunner
from services.worker.models.config import ModelError
from services.worker.ops.interface import OpsName, StateCache
from services.worker.speculation.settings import Method, SpeculationSettings
from tests.support.models.tiny_drafters import make_eagle3
from tests.support.models.tiny_models import STATE_FAMILIES, VOCABULARY, by_lane, make_model
from tests.support.worker.oracle import Oracle
from tests.support.worker.plan_driver import Driver
from tests.support.worker.planned_engine import PlannedEngine
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 24
NGRAM = SpeculationSettings(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
PERIOD = [5, 60, 17, 33, 90, 8, 44]
PROMPTS = [[PERIOD[i % 7] for i in range(40)], [9], [3 + 11 * i % (VOCABULARY - 3) for i in range(33)]]


def outputs(backend: HostRunner, speculate: int, *, preempts: bool = False) -> tuple[list[list[int]], Driver]:
    """Of all prompts side by side, in steps of 29 tokens; one of them loses its blocks behind its tenth token."""
    backend.reset()
    driver = Driver(backend, budget=29, speculate=speculate)
    sequences = [driver.add(prompt, OUTPUT) for prompt in PROMPTS]
    while preempts and len(sequences[2].output) < 10:
        driver.step()
    if preempts:
        driver.preempt(sequences[2])
    driver.run()
    return [sequence.output for sequence in sequences], driver


@pytest.mark.features("states", "speculative", "chunked prefill", "preemption")
@pytest.mark.parametrize(
    ("family", "ops"),
    [("mamba2", "torch"), ("qwen3-next", "torch"), *by_lane(STATE_FAMILIES, "native")],
)
def test_what_is_rejected_leaves_nothing_in_the_states(tmp_path: Path, family: str, ops: OpsName) -> None:
    """Drafts that are right, and some that are not. By native operations the states are those of no drafts, to the last
    bit."""
    model = make_model(family, tmp_path)
    backend = tiny_backend(model.path, dtype="float32", ops=ops, speculation=NGRAM)
    expected, _ = outputs(backend, 0)
    assert expected == [model.greedy(prompt, OUTPUT, said) for prompt, said in zip(PROMPTS, expected, strict=True)]
    plain = states_of(backend)
    oracle = Oracle()
    oracle.known = {tuple(prompt): output[:-1] for prompt, output in zip(PROMPTS, expected, strict=True)}
    backend.rank.drafting.draft_by(oracle)
    said, driver = outputs(backend, 4)
    assert said == expected
    assert 0 < driver.accepted < driver.drafted
    if ops == "native":
        drafted = states_of(backend)
        assert all(any(torch.equal(one, other) for other in drafted) for one in plain)
    said, _ = outputs(backend, 4, preempts=True)
    assert said == expected


def states_of(backend: HostRunner) -> list[Tensor]:
    """Of the first layer that has some: one for each prompt."""
    first = next(cache for cache in backend.rank.caches if isinstance(cache, StateCache))
    both = (torch.cat((window.flatten(), state.flatten())) for window, state in zip(*first, strict=True))
    return [each for each in both if each.any()]


@pytest.mark.features("states", "speculative", "prefix cache")
@pytest.mark.parametrize("method", ["ngram", "draft", "eagle3"])
def test_methods_draft_for_models_with_states(tmp_path: Path, method: Method) -> None:
    """As a scheduler's core plans, twice: then the prompts go on behind checkpoints."""
    model = make_model("granite-hybrid", tmp_path / "model")
    speculation = NGRAM
    if method != "ngram":
        like = make_model("llama", tmp_path / "llama")
        folder = like.path if method == "draft" else make_eagle3(like, tmp_path / "head")
        speculation = SpeculationSettings(method=method, num_speculative_tokens=3, model=str(folder))
    backend = tiny_backend(model.path, dtype="float32", ops="native", speculation=speculation, max_model_len=256)
    engine = PlannedEngine(backend, EngineLimits(max_batch_tokens=77, max_running=8, run_ahead=0, speculation="fixed"))
    for computed in (0, 32):
        assert engine.generate(PROMPTS[0], OUTPUT) == (model.greedy(PROMPTS[0], OUTPUT), computed)
    assert engine.drafted > 0


def test_methods_that_read_hidden_states_are_refused(tmp_path: Path) -> None:
    model = make_model("granite-hybrid", tmp_path)
    complaint = (
        "speculative medusa: a model with state-space layers (GraniteMoeHybridForCausalLM) takes drafts by ngram"
    )
    with pytest.raises(ModelError, match=re.escape(complaint)):
        tiny_backend(model.path, speculation=SpeculationSettings(method="medusa", model=str(tmp_path)))
