"""Models that `transformers` computes, in stages of a pipeline: every architecture says what it does on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.scheduler.core.limits import EngineLimits
from tests.integration.worker.test_hybrid_kv_cache import LIMITS as HYBRID
from tests.integration.worker.test_hybrid_kv_cache import agrees
from tests.support.models.embedded_prompts import greedy_of_rows, prompt_embeds, random_rows
from tests.support.models.library_models import ARCHITECTURES, FOR_TEXTS_ALONE, ONE_STAGE, library_model
from tests.support.worker.library_situations import FEW_LENGTHS, OUTPUT, generated, prompt
from tests.support.worker.rank_processes import RankProcesses, rank_processes

PROMPTS = [prompt(length, seed) for seed, length in enumerate(FEW_LENGTHS)]
LIKE_OTHERS = (
    *("Arcee", "BitNet", "Ernie4_5", "Exaone", "Glm", "Helium", "HunYuanDenseV1", "Jais2", "Olmo", "SeedOss", "Youtu"),
    *("AXK1", "AriaText", "Ernie4_5_Moe", "Glm4Moe", "HunYuanMoEV1", "Olmoe", "SolarOpen"),
    *("Falcon", "Falcon (grouped)", "Apertus1p5Text", "GPTJ", "Dots1", "Mellum"),
)
"""Whose pass over the layers, and that of whose layers, the library has line by line in DiffLlama, Glm4MoeLite,
Falcon (ALiBi), Apertus, CodeGen, ExaoneMoe and Laguna as well: what differs is within attention and MLPs, which no
stage cuts."""
IN_TWO_STAGES = ("Bloom", "Cohere2", "GPT2", "GPTNeoX", "Llama4Text", "Mpt", "Phi3")
"""Of a cell of `test_model_features`."""
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(3, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "architecture",
    [
        *(
            pytest.param(each, marks=pytest.mark.slow if each in (*LIKE_OTHERS, *IN_TWO_STAGES) else ())
            for each in ARCHITECTURES
            if each not in ONE_STAGE
        ),
        "Exaone4_5_",
    ],
)
def test_three_stages_say_what_the_library_does(architecture: str, ranks: RankProcesses, tmp_path: Path) -> None:
    """Chunked prompts and decodes in one batch; of three layers each stage has one."""
    model = library_model(architecture, tmp_path)
    engine = ranks.serve(
        model.path,
        stages=3,
        ops="native",
        limits=LIMITS,
        model_impl="transformers",
        language_model_only=architecture in FOR_TEXTS_ALONE,
    )
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
    engine.run()
    said = [request.tokens for request in requests]
    assert said == generated(model, PROMPTS, said)


@pytest.mark.features("hybrid KV cache", "pipeline parallel", "prefix cache", "chunked prefill")
def test_stages_share_tables_for_layers_of_their_own(ranks: RankProcesses, tmp_path: Path) -> None:
    """A layer with a window and one that sees everything, and one with a window on the second stage."""
    model = library_model("GptOss", tmp_path)
    engine = ranks.serve(
        model.path, stages=2, layers=(2, 1), ops="native", limits=HYBRID, hybrid="on", model_impl="transformers"
    )
    agrees(engine, model, [None, 24])


@pytest.mark.features("prompt embeds", "pipeline parallel")
@pytest.mark.parametrize("architecture", ["GPT2", "Gemma"])
def test_rows_of_clients_are_what_the_first_stage_begins_with(
    architecture: str, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Positions are added to them; they are scaled."""
    model = library_model(architecture, tmp_path)
    engine = ranks.serve(model.path, stages=2, ops="native", limits=LIMITS, prompt_embeds=True)
    rows = [random_rows(model.reference, count, count) for count in (3, 40)]
    requests = [engine.ask([0] * len(each), OUTPUT, embeds=prompt_embeds(each)) for each in rows]
    engine.run()
    assert [request.tokens for request in requests] == [greedy_of_rows(model.reference, each, OUTPUT) for each in rows]
