"""Models with states on tensor-parallel ranks and pipeline stages say what `transformers` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.core.limits import EngineLimits
from services.worker.ops.interface import OpsName
from services.worker.speculation.settings import SpeculationSettings
from tests.integration.cluster.test_engines_of_several_ranks import (
    OUTPUT,
    PREEMPTING,
    PROMPTS,
    WORDS,
)
from tests.integration.worker.test_quantized_states import granite_together, quantised_states
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.rank_processes import RankProcesses, rank_processes

LONG = 40
NGRAM = SpeculationSettings(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
ONE_GROUP = {"mamba_n_groups": 1}
TWO_KEY_HEADS = {"linear_num_key_heads": 2}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(4, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.features("states", "tensor parallel", "pipeline parallel", "chunked prefill", "prefix cache")
@pytest.mark.parametrize(
    ("family", "changes", "tp", "stages", "layers", "ops", "run_ahead"),
    [
        ("mamba2", {"n_groups": 1, "use_bias": True}, 2, 1, (), "native", 1),
        ("mamba2", {}, 1, 3, (), "torch", 2),
        ("bamba", {"mamba_proj_bias": True}, 2, 1, (), "torch", 0),
        ("granite-hybrid", {}, 1, 2, (2, 1), "native", 1),
        ("granite-hybrid-moe", ONE_GROUP, 2, 2, (1, 2), "native", 1),
        ("qwen3-next", TWO_KEY_HEADS | {"attention_bias": True}, 2, 1, (), "native", 1),
        ("qwen3.5", TWO_KEY_HEADS, 2, 2, (2, 1), "torch", 2),
    ],
)
def test_greedy_output_is_the_reference_s(
    ranks: RankProcesses,
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    tp: int,
    stages: int,
    layers: tuple[int, ...],
    ops: OpsName,
    run_ahead: int,
) -> None:
    model = make_model(family, tmp_path, vocab_size=WORDS, **changes)
    limits = EngineLimits(run_ahead=run_ahead, plan_late=False, max_batch_tokens=48, max_running=4)
    engine = ranks.serve(model.path, tp=tp, stages=stages, layers=layers, ops=ops, limits=limits)
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
    engine.run()
    requests.append(engine.ask(PROMPTS[0], OUTPUT))
    engine.run()
    assert [request.tokens for request in requests] == [model.greedy(each, OUTPUT) for each in (*PROMPTS, PROMPTS[0])]
    assert requests[-1].cached == 64, "it goes on from a checkpoint on all ranks"


@pytest.mark.features("states", "quantization", "tensor parallel", "pipeline parallel")
@pytest.mark.parametrize(
    ("made", "stages"),
    [
        (lambda path: quantised_states(path, "fp8 of blocks", "qwen3-next", **TWO_KEY_HEADS), 1),
        (lambda path: granite_together(path, "int8", **ONE_GROUP), 2),
    ],
    ids=["qwen3-next-fp8", "granite-int8"],
)
def test_ranks_have_their_share_of_a_quantised_checkpoint(
    ranks: RankProcesses, tmp_path: Path, made: Callable[[Path], TinyModel], stages: int
) -> None:
    """Blocks of 48 outputs and inputs begin and end within heads, and what is cut of them within blocks."""
    model = made(tmp_path)
    engine = ranks.serve(model.path, tp=2, stages=stages, ops="native")
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
    engine.run()
    assert [request.tokens for request in requests] == [model.greedy(tokens, OUTPUT) for tokens in PROMPTS]


@pytest.mark.features("states", "tensor parallel", "preemption")
def test_ranks_keep_states_of_whoever_is_preempted(ranks: RankProcesses, tmp_path: Path) -> None:
    model = make_model("qwen3-next", tmp_path, vocab_size=WORDS, **TWO_KEY_HEADS)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    alone = ranks.serve(model.path, tp=2, ops="native", limits=limits)
    states = 8 * alone.serving[0].state_bytes
    memory = 2 * states + PREEMPTING * alone.serving[0].block_bytes
    engine = ranks.serve(model.path, tp=2, ops="native", limits=limits, kv_memory=memory)
    requests = [engine.ask(tokens, LONG) for tokens in PROMPTS]
    engine.run()
    assert engine.preemptions > 0
    assert [request.tokens for request in requests] == [model.greedy(tokens, LONG) for tokens in PROMPTS]


@pytest.mark.features("states", "tensor parallel", "speculative")
@pytest.mark.parametrize(("family", "changes"), [("bamba", ONE_GROUP), ("qwen3-next", TWO_KEY_HEADS)])
def test_ranks_roll_back_the_same_drafts(
    ranks: RankProcesses, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = make_model(family, tmp_path, vocab_size=WORDS, **changes)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4, speculation="fixed")
    engine = ranks.serve(model.path, tp=2, ops="native", limits=limits, speculation=NGRAM)
    requests = [engine.ask(tokens, LONG) for tokens in PROMPTS]
    engine.run()
    assert [request.tokens for request in requests] == [model.greedy(tokens, LONG) for tokens in PROMPTS]
    assert engine.drafted > 0
