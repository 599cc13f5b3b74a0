"""Models that `transformers` computes, split over real ranks by the library's plan, say what it says on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.scheduler.core.limits import EngineLimits
from services.worker.distributed.communicator import SingleRank
from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.settings import ExpertSettings
from services.worker.models.fallback.tensor_parallel import shard_model
from services.worker.models.fallback.whole_experts import StageMeeting, keep_whole_experts
from services.worker.models.loaded_model import ModelImpl
from services.worker.ops.quantized import Code
from tests.integration.worker.test_hybrid_kv_cache import LIMITS as HYBRID
from tests.integration.worker.test_hybrid_kv_cache import agrees
from tests.support.models.library_models import library_model
from tests.support.models.mxfp4 import mxfp4_model
from tests.support.models.quantised_files import quantise
from tests.support.models.rounded_models import SIZES, rounded
from tests.support.worker.library_situations import FEW_LENGTHS, OUTPUT, generated, prompt
from tests.support.worker.rank_processes import EngineOfRanks, RankProcesses, rank_processes
from tests.support.worker.tiny_backend import tiny_backend

PROMPTS = [prompt(length, seed) for seed, length in enumerate(FEW_LENGTHS)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(4, tmp_path_factory.mktemp("four")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.parametrize("architecture", ["Falcon", "Falcon (ALiBi)", "Olmo2", "Starcoder2"])
def test_two_ranks_say_what_the_library_does(architecture: str, ranks: RankProcesses, tmp_path: Path) -> None:
    """All heads split; queries, keys and values in one product with a key that all have; attention whole and the rest
    split; biases, those of positions too. Others are cells of `test_model_features`."""
    model = library_model(architecture, tmp_path)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    sizes = []
    whole_keys = ("Olmo2", "Falcon")
    for tp in (1, 2):
        engine = ranks.serve(model.path, tp=tp, ops="native", limits=limits)
        requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
        engine.run()
        said = [request.tokens for request in requests]
        assert said == generated(model, PROMPTS, said)
        sizes.append(engine.serving[-1].block_bytes)
    assert sizes[1] == sizes[0] // (1 if architecture in whole_keys else 2)


@pytest.mark.parametrize(
    ("architecture", "code"),
    [("GPTNeoX", "int8"), ("Olmo2", "int4"), ("Phi3", "int8"), ("GPT2", "int4"), ("Falcon", "int8")],
)
def test_two_ranks_share_the_weights_that_one_would_have_rounded(
    architecture: str, code: Code, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Biases; groups of 32 inputs that the ranks' shares of 48 cut."""
    model = library_model(architecture, tmp_path)
    rounded(model.reference, code)
    engine = ranks.serve(model.path, tp=2, ops="native", quantization=code)
    request = engine.ask(PROMPTS[0], OUTPUT)
    engine.run()
    expected = model.logits(PROMPTS[0] + request.tokens)[len(PROMPTS[0]) - 1 : -1]
    assert torch.tensor(engine.logits).sub(expected).abs().max() < 1e-3


@pytest.mark.parametrize(("architecture", "method"), [("Phi3", "gptq"), ("Olmo2", "fp8 of blocks"), ("Cohere2", "awq")])
@pytest.mark.parametrize("stages", [1, 2])
def test_two_ranks_share_the_codes_of_a_checkpoint(
    architecture: str, method: str, stages: int, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Several matrices in one; groups of 64 inputs that the ranks' shares of 32 cut."""
    model = quantise(library_model(architecture, tmp_path, **SIZES, head_dim=16), method)
    engine = ranks.serve(model.path, tp=3 - stages, stages=stages, ops="native")
    request = engine.ask(PROMPTS[0], OUTPUT)
    engine.run()
    expected = model.logits(PROMPTS[0] + request.tokens)[len(PROMPTS[0]) - 1 : -1]
    assert torch.tensor(engine.logits).sub(expected).abs().max() < 1e-3


def test_layers_with_windows_have_block_tables_of_their_own(ranks: RankProcesses, tmp_path: Path) -> None:
    """With sinks, and fewer layers that see all than with windows."""
    model = library_model("GptOss", tmp_path)
    agrees(ranks.serve(model.path, ops="native", limits=HYBRID, hybrid="on"), model, [None, 24, 24])


class SecondOfThree:
    """A place among ranks that nobody joins: what cannot be split is found before."""

    rank, world_size = 1, 3


@pytest.mark.refuses("of transformers, without a tp_plan (GPT-J, OPT, …)", "--tp 2")
@pytest.mark.parametrize(
    ("architecture", "complaint"),
    [
        ("Cohere2", "num_attention_heads 4 does not divide over 3 tensor-parallel ranks"),
        ("OPT", "transformers has no plan for OPTForCausalLM"),
        ("Gemma4Text", "tp: gemma4_text has layers with different heads, which one rank computes"),
    ],
)
def test_what_cannot_be_split_says_why(architecture: str, complaint: str, tmp_path: Path) -> None:
    library_model(architecture, tmp_path)
    with pytest.raises(ModelError, match=complaint):
        tiny_backend(tmp_path, communicator=SecondOfThree())


MIXTURES = (
    "Dots1",
    "Ernie4_5_Moe",
    "FlexOlmo",
    "Glm4Moe",
    "Glm4MoeLite",
    "GptOss",
    "GraniteMoe",
    "HunYuanMoEV1",
    "Llama4Text",
    "Olmoe",
    "Phimoe",
)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_ranks_have_some_columns_of_every_expert(architecture: str, ranks: RankProcesses, tmp_path: Path) -> None:
    """By the library's plan, gpt-oss by one of ours: gates and ups in one tensor, side by side or by turns, transposed;
    biases, sinks, experts beside those that are chosen, and latents that keys of all heads are made of."""
    model = library_model(architecture, tmp_path)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    engine = ranks.serve(model.path, tp=2, ops="native", limits=limits, model_impl="transformers")
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
    engine.run()
    said = [request.tokens for request in requests]
    assert said == generated(model, PROMPTS, said)


PARALLEL = ExpertSettings(parallel=True)


@pytest.mark.features("expert parallel", "tensor parallel", "chunked prefill", "prefix cache")
@pytest.mark.parametrize("architecture", MIXTURES)
def test_ranks_have_whole_experts(architecture: str, ranks: RankProcesses, tmp_path: Path) -> None:
    model = library_model(architecture, tmp_path)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    engine = ranks.serve(model.path, tp=2, ops="native", limits=limits, experts=PARALLEL, model_impl="transformers")
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
    engine.run()
    said = [request.tokens for request in requests]
    assert said == generated(model, PROMPTS, said)


GROUPS: tuple[tuple[str, int, int, ModelImpl], ...] = (
    ("GptOss", 2, 2, "transformers"),
    ("GptOss", 4, 1, "native"),
    ("Glm4Moe", 2, 1, "transformers"),
    ("Olmoe", 2, 2, "transformers"),
)


@pytest.mark.features("data parallel", "expert parallel", "tensor parallel", "chunked prefill")
@pytest.mark.parametrize(("architecture", "engines", "tp", "impl"), GROUPS)
def test_engines_of_a_group_share_experts(
    architecture: str, engines: int, tp: int, impl: ModelImpl, four: RankProcesses, tmp_path: Path
) -> None:
    """All work, then the last one alone: the others compute their experts for it. gpt-oss has biases, clamped gates,
    sinks, and experts in blocks of four bits; GLM-4.5 groups of experts, and one that every row goes through."""
    model = mxfp4_model(tmp_path) if architecture == "GptOss" else library_model(architecture, tmp_path)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    group = four.serve_group(model.path, engines=engines, tp=tp, limits=limits, model_impl=impl)
    asked = [(tokens, engine.ask(tokens, OUTPUT)) for tokens in PROMPTS for engine in group[:2]]
    run_group(group)
    asked += [(tokens, group[-1].ask(tokens, OUTPUT)) for tokens in PROMPTS[-2:]]
    run_group(group)
    said = [request.tokens for _, request in asked]
    assert said == generated(model, [tokens for tokens, _ in asked], said)


def run_group(engines: list[EngineOfRanks]) -> None:
    """Until nothing is in flight, each engine at its own pace."""
    while any(engine.in_flight for engine in engines):
        for engine in engines:
            if engine.in_flight:
                engine.step()


def test_a_model_whose_experts_compute_every_row_is_in_no_group(tmp_path: Path) -> None:
    model = library_model("Llama4Text", tmp_path).reference
    with pytest.raises(ModelError, match="data_parallel_size: every expert of Llama4ForCausalLM computes every row"):
        keep_whole_experts(model, 0, 2, StageMeeting(SingleRank()), grouped=True)


class FirstOfTwo:
    """A place among ranks that nobody joins."""

    rank, world_size = 0, 2


def test_a_rank_keeps_its_share_of_experts(tmp_path: Path) -> None:
    model = library_model("GptOss", tmp_path).reference
    whole = {name: weight.numel() for name, weight in model.named_parameters() if "experts" in name or "sinks" in name}
    assert shard_model(model, FirstOfTwo())
    shares = {name: model.get_parameter(name).numel() / count for name, count in whole.items()}
    # Rank 0 adds the bias that is added once.
    assert {name: share for name, share in shares.items() if share != 0.5} == {
        f"model.layers.{layer}.mlp.experts.down_proj_bias": 1.0 for layer in range(3)
    }


def test_experts_that_do_not_divide_say_so(tmp_path: Path) -> None:
    library_model("Olmoe", tmp_path, num_attention_heads=6, num_key_value_heads=3, intermediate_size=32)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj has 32 columns, which do not divide over 3"):
        tiny_backend(tmp_path, communicator=SecondOfThree())
