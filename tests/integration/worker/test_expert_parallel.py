"""Mixtures whose experts are spread over real ranks say what `transformers` says, however they are placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from services.scheduler.core.limits import EngineLimits
from services.worker.models.checkpoint import model_digest
from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.expert_load import ExpertLoadFile, load_path
from services.worker.models.expert_parallel.settings import ExpertSettings
from services.worker.models.hf_config import read_model_config
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.library_situations import prompt
from tests.support.worker.rank_processes import RankProcesses, rank_processes
from tests.support.worker.tiny_backend import tiny_backend

PARALLEL = ExpertSettings(parallel=True)
OUTPUT = 6
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=40, max_running=4)
"""Prompts are cut into chunks, and decodes run beside them."""
FAMILIES = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3")
PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 15, 16, 17, 33, 71))]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(4, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return cache(lambda family: make_model(family, tmp_path_factory.mktemp(family)))


def say_the_same(ranks: RankProcesses, model: TinyModel, **different: object) -> None:
    """With a prefix that the second one of two finds computed."""
    engine = ranks.serve(model.path, ops="native", limits=LIMITS, **different)  # type: ignore[arg-type]
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
    engine.run()
    again = engine.ask(PROMPTS[-1], OUTPUT)
    engine.run()
    expected = [model.greedy(tokens, OUTPUT) for tokens in (*PROMPTS, PROMPTS[-1])]
    assert [request.tokens for request in (*requests, again)] == expected
    assert again.cached == 64


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_with_whole_experts_say_what_the_library_does(
    family: str, tp: int, ranks: RankProcesses, models: Callable[[str], TinyModel]
) -> None:
    say_the_same(ranks, models(family), tp=tp, experts=PARALLEL)
