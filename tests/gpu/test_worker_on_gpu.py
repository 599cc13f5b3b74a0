"""A whole worker on a real GPU: what it computes is what a CPU computes, with graphs and without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deploy.model_choice import DEMO_MODEL
from services.worker.executor.torch_backend import create_backend
from services.worker.graphs.decode_inputs import DecodeInputs
from services.worker.models.config import ModelError
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.tiny_models import FAMILIES, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

TEXTS = [
    "The capital of France is",
    "1 + 1 =",
    "Once upon a time there was a little",
    "<|im_start|>user\nWhat is the capital of Spain?<|im_end|>\n<|im_start|>assistant\n",
    "def add(a, b):\n",
]
OUTPUT = 48
GIB = 1 << 30


@cache
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def demo(device: str, dtype: str, **different: Any) -> Any:
    settings: dict[str, Any] = {"kv_memory_bytes": 256 << 20, "max_batch_tokens": 512, "ops": "auto"}
    return create_backend(tiny_settings(DEMO_MODEL, device=device, dtype=dtype, **(settings | different)))


def generated(backend: Any, count: int = OUTPUT) -> list[list[int]]:
    """Prompts of all lengths at once, in chunks, then decodes of all."""
    driver = Driver(backend, budget=11)
    sequences = [driver.add(prompt, count) for prompt in prompts()]
    driver.run()
    return [sequence.output for sequence in sequences]


def logits_of_first_tokens(backend: Any, recorded: list[Tensor]) -> list[Tensor]:
    """Behind each prompt alone."""
    found = []
    for prompt in prompts():
        backend.reset()
        recorded.clear()
        driver = Driver(backend)
        driver.add(prompt, 1)
        driver.run()
        found.append(recorded[0][0].float().cpu())
    return found


def differences(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Of logits, in standard deviations of those wanted, on average."""
    return sum(float((ours - each).abs().mean() / each.std()) for ours, each in zip(found, wanted, strict=True))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_greedy_tokens_of_the_demo_model_are_those_of_a_cpu() -> None:
    expected = generated(demo("cpu", "float32", ops="torch"))
    assert generated(demo("cuda:0", "float32")) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(TEXTS)


def test_logits_in_bfloat16_are_as_near_those_in_float32_as_a_cpu_s(recorded: list[Tensor]) -> None:
    expected = logits_of_first_tokens(demo("cpu", "float32", ops="torch"), recorded)
    on_cpu = logits_of_first_tokens(demo("cpu", "bfloat16", ops="torch"), recorded)
    found = logits_of_first_tokens(demo("cuda:0", "bfloat16"), recorded)
    assert differences(found, expected) < 1.5 * differences(on_cpu, expected)


def test_captured_decodes_give_what_launched_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = 0
    fill = DecodeInputs.fill

    def counting(*args: Any) -> None:
        nonlocal replayed
        replayed += 1
        fill(*args)

    monkeypatch.setattr(DecodeInputs, "fill", counting)
    captured = generated(demo("cuda:0", "float32"))
    assert replayed > OUTPUT // 2
    before = replayed
    assert generated(demo("cuda:0", "float32", enforce_eager=True)) == captured
    assert replayed == before


def test_captured_decodes_in_bfloat16_are_near_launched_ones(recorded: list[Tensor]) -> None:
    """Padded products may round otherwise; so only what follows from equal tokens is compared."""
    steps: dict[bool, list[Tensor]] = {}
    for eager in (False, True):
        backend = demo("cuda:0", "bfloat16", enforce_eager=eager)
        recorded.clear()
        generated(backend, 2)
        steps[eager] = [logits.float().cpu() for logits in recorded]
    assert len(steps[False]) == len(steps[True]) > len(TEXTS) // 2
    for captured, launched in zip(steps[False], steps[True], strict=True):
        assert (captured - launched).abs().mean() < 0.02 * launched.std()


def test_drafts_change_nothing_with_graphs_or_without() -> None:
    expected = generated(demo("cuda:0", "float32"))
    speculation = SpeculationSettings(
        method="draft", num_speculative_tokens=3, model=str(DEMO_MODEL.with_name("draft"))
    )
    for eager in (False, True):
        backend = demo("cuda:0", "float32", speculation=speculation, enforce_eager=eager)
        driver = Driver(backend, budget=64, speculate=3)
        sequences = [driver.add(prompt, OUTPUT) for prompt in prompts()]
        driver.run()
        assert [sequence.output for sequence in sequences] == expected
        assert driver.accepted > 0


ONE_GROUP = {"mamba2": {"n_groups": 1}} | {
    family: {"mamba_n_groups": 1} for family in ("bamba", "granite-hybrid", "granite-hybrid-moe")
}
"""transformers 5.17, which GPUs' machines may have, norms the groups of a state space as one; 5.24 each by itself."""


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_generates_what_the_reference_does(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path, **ONE_GROUP.get(family, {}))
    backend = create_backend(tiny_settings(tmp_path, device="cuda:0", dtype="float32", ops="triton"))
    driver = Driver(backend, budget=23)
    asked = [[7, 3, 99, 12, 150, 31, 8], [44, 5], [(11 * place) % 150 + 3 for place in range(70)]]
    sequences = [driver.add(tokens, 8) for tokens in asked]
    driver.run()
    assert [sequence.output for sequence in sequences] == [model.greedy(tokens, 8) for tokens in asked]


def test_keys_and_values_in_fp8_are_as_near_those_in_full_as_a_cpu_s(recorded: list[Tensor]) -> None:
    """A CPU's native operations, which keep them in the same numbers, differ by 0.28 (AMD EPYC, 2026-11-27)."""
    full = logits_of_first_tokens(demo("cuda:0", "bfloat16"), recorded)
    half = logits_of_first_tokens(demo("cuda:0", "bfloat16", kv_cache_dtype="fp8"), recorded)
    assert 0 < differences(half, full) < 1.5 * 0.28


def test_a_worker_stays_within_its_share_of_the_gpu() -> None:
    """Of a model whose sequences could fill far more than the share; the driver's own memory is not counted, nor what
    tests beside this one take."""
    total, before = torch.cuda.mem_get_info()[1], torch.cuda.memory_reserved()
    backend = demo("cuda:0", "bfloat16", kv_memory_bytes=None, max_num_seqs=4096, gpu_memory_utilization=0.2)
    generated(backend, 8)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_reserved() - before
    assert 0.15 * total < taken < 0.2 * total + GIB // 4
    assert backend.num_blocks > 1000


def test_a_share_that_the_weights_fill_is_refused_with_what_takes_what() -> None:
    with pytest.raises(ModelError, match=r"nothing is left .* weights take"):
        demo("cuda:0", "bfloat16", kv_memory_bytes=None, gpu_memory_utilization=0.0001)
