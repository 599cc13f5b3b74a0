"""Mixtures whose experts are spread over real ranks say what `transformers` says, however they are placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.scheduler.core.limits import EngineLimits
from services.worker.models.checkpoint import model_digest
from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.expert_load import ExpertLoadFile, load_path, read_loads
from services.worker.models.expert_parallel.settings import ExpertSettings
from services.worker.models.hf_config import read_model_config
from services.worker.ops.interface import OpsName
from services.worker.speculation.settings import SpeculationSettings
from tests.integration.worker.test_hybrid_kv_cache import LIMITS as HYBRID
from tests.integration.worker.test_hybrid_kv_cache import agrees
from tests.support.models.library_models import library_model
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.models.tiny_mtp import make_mtp
from tests.support.worker.library_situations import prompt
from tests.support.worker.plan_driver import Driver
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
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(4, tmp_path_factory.mktemp("four")) as ranks:
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


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_with_whole_experts_say_what_the_library_does(
    family: str, ranks: RankProcesses, models: Callable[[str], TinyModel]
) -> None:
    say_the_same(ranks, models(family), tp=2, experts=PARALLEL)


@pytest.mark.features("expert parallel", "states", "tensor parallel", "chunked prefill")
def test_layers_with_states_are_beside_experts(ranks: RankProcesses, models: Callable[[str], TinyModel]) -> None:
    model = models("granite-hybrid-moe")
    engine = ranks.serve(model.path, tp=2, ops="native", limits=LIMITS, experts=PARALLEL)
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
    engine.run()
    assert [request.tokens for request in requests] == [model.greedy(tokens, OUTPUT) for tokens in PROMPTS]


def test_one_rank_has_all_experts(ranks: RankProcesses, models: Callable[[str], TinyModel]) -> None:
    say_the_same(ranks, models("qwen2-moe"), experts=PARALLEL)


@pytest.mark.features("expert parallel", "hybrid KV cache", "tensor parallel")
def test_windows_free_the_blocks_behind_them(ranks: RankProcesses, tmp_path: Path) -> None:
    model = make_model("mixtral", tmp_path, sliding_window=24)
    agrees(ranks.serve(model.path, tp=2, ops="native", limits=HYBRID, hybrid="on", experts=PARALLEL), model, [24])


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_experts_are_rounded_to_what_one_rank_would_have(family: str, ranks: RankProcesses, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    rounded(model.reference, "int8")
    engine = ranks.serve(model.path, tp=2, ops="native", limits=LIMITS, quantization="int8", experts=PARALLEL)
    request = engine.ask(PROMPTS[-1], OUTPUT)
    engine.run()
    expected = model.logits(PROMPTS[-1] + request.tokens)[len(PROMPTS[-1]) - 1 : -1]
    assert torch.tensor(engine.logits).sub(expected).abs().max() < 1e-3


@pytest.mark.parametrize(("family", "redundant"), [("qwen3-moe", 0), ("deepseek-v3", 2)])
def test_experts_that_are_placed_by_their_load_say_the_same(
    family: str, redundant: int, ranks: RankProcesses, models: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """Each rank has experts of both ends; with replicas, the busiest one is on both ranks."""
    model = models(family)
    config = read_model_config(model.path)
    assert config.mixture is not None
    count, digest = config.mixture.experts, model_digest(model.path, config)
    skewed = ExpertLoadFile(digest, "other", count, {layer: [900, 800, *range(1, count - 1)] for layer in range(3)})
    load_path(tmp_path, digest, "other", 0).write_bytes(msgspec.json.encode(skewed))
    settings = ExpertSettings(parallel=True, balanced=True, redundant=redundant, load_dir=tmp_path, engine="own")
    say_the_same(ranks, model, tp=2, experts=settings)


@pytest.mark.features("expert parallel", "tensor parallel", "chunked prefill", "prefix cache")
@pytest.mark.parametrize(("family", "stages", "ops"), [("deepseek-v3", 1, "native"), ("qwen3-moe", 2, "torch")])
def test_experts_that_move_while_an_engine_serves_say_the_same(
    family: str, stages: int, ops: OpsName, four: RankProcesses, models: Callable[[str], TinyModel]
) -> None:
    """Before, while and after they move; every other step it is looked which are picked."""
    model = models(family)
    moving = ExpertSettings(parallel=True, balanced=True, redundant=2, window=3, interval=2)
    engine = four.serve(model.path, tp=2, stages=stages, ops=ops, limits=LIMITS, experts=moving)
    requests = [(tokens, engine.ask(tokens, OUTPUT)) for tokens in PROMPTS]
    engine.run()
    others = [tokens for seed in range(4) for tokens in (prompt(30, 50 + seed), PROMPTS[-1])]
    requests += engine.run_until_experts_move(others, OUTPUT, rearrangements=2)
    requests += [(tokens, engine.ask(tokens, OUTPUT)) for tokens in PROMPTS]
    engine.run()
    assert [request.tokens for _, request in requests] == [model.greedy(tokens, OUTPUT) for tokens, _ in requests]


class FirstOfTwo:
    """A place among ranks that nobody joins: what cannot be had is found before."""

    rank, world_size = 0, 2
    in_memory = None

    def all_gather(self, value: str) -> list[str]:
        return [value, value]


def refusal(model: Path, experts: ExpertSettings, **different: object) -> str:
    with pytest.raises(ModelError) as error:
        tiny_backend(model, experts=experts, **different)
    return str(error.value)


def test_what_cannot_be_had_says_why(models: Callable[[str], TinyModel], tmp_path: Path) -> None:
    library_model("Olmoe", tmp_path / "library")
    two = {"communicator": FirstOfTwo()}
    no_experts = "enable_expert_parallel: the model (LlamaForCausalLM) has no experts"
    assert refusal(models("llama").path, PARALLEL) == no_experts
    assert refusal(models("llama").path, ExpertSettings(load_dir=tmp_path)).startswith("expert_load_dir: the model")
    placed = ExpertSettings(parallel=True, balanced=True)
    assert (
        refusal(tmp_path / "library", placed) == "enable_eplb: the model (OlmoeForCausalLM) is computed by transformers"
    )
    library_model("Cohere2", tmp_path / "dense")
    said = "enable_expert_parallel: transformers has no plan for Cohere2ForCausalLM (tp_plan) with experts"
    assert refusal(tmp_path / "dense", PARALLEL) == said
    shares = {"communicator": FirstOfTwo(), "shared_rows": 1}
    assert refusal(tmp_path / "dense", ExpertSettings(), **shares).startswith("enable_sp: only for architectures that")
    assert refusal(models("llama").path, ExpertSettings(), **shares).startswith("enable_sp: the ranks need the C++")
    prompts = {"communicator": FirstOfTwo(), "context_rows": 1}
    said = "prefill_context_parallel_size: only for architectures that"
    assert refusal(tmp_path / "dense", ExpertSettings(), **prompts).startswith(said)
    said = "prefill_context_parallel_size: the ranks need the C++"
    assert refusal(models("llama").path, ExpertSettings(), **prompts).startswith(said)
    uneven = ExpertSettings(parallel=True, balanced=True, redundant=1, load_dir=tmp_path)
    complaint = "num_redundant_experts 1: 8 experts and these do not divide over 2 ranks"
    assert refusal(models("deepseek-v2").path, uneven, **two) == complaint


@pytest.mark.features("speculative", "sequence parallel", "expert parallel")
@pytest.mark.features("speculative", "context parallel")
def test_a_model_s_own_module_drafts_on_ranks_that_share_rows(ranks: RankProcesses, tmp_path: Path) -> None:
    """It reads hidden states of all rows, which the first rank has whatever rows it computes."""
    made = make_mtp("deepseek-v3", tmp_path)
    prompts = [prompt(length, seed) for seed, length in enumerate((70, 9, 33))]
    expected = [made.model.greedy(tokens, OUTPUT) for tokens in prompts]
    drafts = SpeculationSettings(method="mtp", num_speculative_tokens=2)
    limits = EngineLimits(run_ahead=1, speculation="fixed", max_batch_tokens=40, max_running=4)
    shapes: tuple[dict[str, Any], ...] = (
        {"tp": 1},
        {"tp": 2, "shared_rows": 1},
        {"tp": 2, "shared_rows": 1, "experts": PARALLEL},
        {"tp": 2, "context_rows": 6},
    )
    drafted = []
    for shape in shapes:
        engine = ranks.serve(made.model.path, ops="native", limits=limits, speculation=drafts, **shape)
        requests = [engine.ask(tokens, OUTPUT) for tokens in prompts]
        engine.run()
        assert [request.tokens for request in requests] == expected, shape
        drafted.append((engine.drafted, engine.accepted))
    assert drafted[0][0] > 0
    assert drafted == [drafted[0]] * len(shapes)


@pytest.mark.features("context parallel", "states", refused=True)
def test_rows_that_go_on_from_others_states_are_not_shared(models: Callable[[str], TinyModel]) -> None:
    said = refusal(models("granite-hybrid-moe").path, ExpertSettings(), communicator=FirstOfTwo(), context_rows=1)
    assert said.startswith("prefill_context_parallel_size: not for a model with states")


def test_what_is_picked_is_counted_and_kept(models: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Two of six experts by each token in the layers that mix; in the last one only by those whose logits are wanted.
    What is computed before the first request, to size memory and to warm up, is no load."""
    model = models("qwen3-moe")
    backend = tiny_backend(model.path, experts=ExpertSettings(load_dir=tmp_path, engine="e"))
    assert backend.expert_load is not None
    assert backend.expert_load.layers == {0: [0] * 6, 2: [0] * 6}
    driver = Driver(backend)
    driver.add(PROMPTS[-1], OUTPUT)
    driver.run()
    tokens = len(PROMPTS[-1]) + OUTPUT - 1
    assert {layer: sum(counts) for layer, counts in backend.expert_load.layers.items()} == {
        0: 2 * tokens,
        2: 2 * OUTPUT,
    }
    backend.expert_load.save()
    assert read_loads(tmp_path, backend.expert_load.model, 6, 3)[0] == backend.expert_load.layers[0]
