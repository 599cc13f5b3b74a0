"""Models that `transformers` computes, split over real ranks by the library's plan, say what it says on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.scheduler.core.limits import EngineLimits
from services.worker.models.config import ModelError
from services.worker.ops.quantized import Code
from tests.integration.worker.test_hybrid_kv_cache import LIMITS as HYBRID
from tests.integration.worker.test_hybrid_kv_cache import agrees
from tests.support.models.library_models import library_model
from tests.support.models.rounded_models import rounded
from tests.support.worker.library_situations import LENGTHS, OUTPUT, prompt
from tests.support.worker.rank_processes import RankProcesses, rank_processes
from tests.support.worker.tiny_backend import tiny_backend

PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.parametrize("architecture", ["Cohere2", "GPTNeoX", "Olmo2", "Starcoder2"])
def test_two_ranks_say_what_the_library_does(architecture: str, ranks: RankProcesses, tmp_path: Path) -> None:
    """All heads split; queries, keys and values in one product; attention whole and the rest split; biases."""
    model = library_model(architecture, tmp_path)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    sizes = []
    for tp in (1, 2):
        engine = ranks.serve(model.path, tp=tp, ops="native", limits=limits)
        requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
        engine.run()
        assert [request.tokens for request in requests] == [model.greedy(tokens, OUTPUT) for tokens in PROMPTS]
        sizes.append(engine.serving[-1].block_bytes)
    assert sizes[1] == sizes[0] // (1 if architecture == "Olmo2" else 2)


@pytest.mark.parametrize(("architecture", "code"), [("GPTNeoX", "int8"), ("Olmo2", "int4")])
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


def test_layers_with_windows_have_block_tables_of_their_own(ranks: RankProcesses, tmp_path: Path) -> None:
    """With sinks, and fewer layers that see all than with windows."""
    model = library_model("GptOss", tmp_path)
    agrees(ranks.serve(model.path, ops="native", limits=HYBRID, hybrid="on"), model, [None, 24, 24])


class SecondOfThree:
    """A place among ranks that nobody joins: what cannot be split is found before."""

    rank, world_size = 1, 3


@pytest.mark.parametrize(
    ("architecture", "complaint"),
    [
        ("Cohere2", "num_attention_heads 4 does not divide over 3 tensor-parallel ranks"),
        ("Falcon", "transformers has no plan for FalconForCausalLM"),
    ],
)
def test_what_cannot_be_split_says_why(architecture: str, complaint: str, tmp_path: Path) -> None:
    library_model(architecture, tmp_path)
    with pytest.raises(ModelError, match=complaint):
        tiny_backend(tmp_path, rank=1, world_size=3, communicator=SecondOfThree())


def test_a_mixture_is_not_split(tmp_path: Path) -> None:
    library_model("Olmoe", tmp_path, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(ModelError, match=r"is to be split by .*, which is not supported"):
        tiny_backend(tmp_path, rank=1, world_size=3, communicator=SecondOfThree())
