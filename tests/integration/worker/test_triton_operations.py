"""Whole models on Triton's kernels: on a GPU where there is one, else in the interpreter, against `transformers`.

The interpreter takes a second for a few rows, so models have a layer or two and prompts a few tokens; blocks, windows,
heads of all sizes and long contexts are the business of the kernels' own tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.backend import Backend
from services.worker.ops.interface import CacheDtype, OpsName, OpsUnavailable
from services.worker.ops.quantized import Scheme
from services.worker.ops.selector import OpsChoice
from services.worker.ops.triton_ops import TritonOps
from services.worker.platforms.installed import built_in_platform
from tests.support.kernels.kernel_device import DEVICE
from tests.support.models.rounded_models import SIZES, rounded
from tests.support.models.tiny_images import picture
from tests.support.models.tiny_models import TinyModel, by_lane, make_model
from tests.support.models.tiny_qwen_vl import make_qwen_model
from tests.support.worker.emulated_graphs import RunAgain
from tests.support.worker.image_chats import ImageChat
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_runner import tiny_runner

pytestmark = pytest.mark.kernels

PROMPTS = [[7, 3, 99, 12, 150, 31, 8], [44, 5]]
OUTPUT = 3

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": 5},
    "qwen3-moe": {"num_hidden_layers": 1},
    "falcon-mamba": {"num_hidden_layers": 1},
    "jamba": {"num_hidden_layers": 2},
    "kimi-linear": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "deepseek-v3.2": {"num_hidden_layers": 2, "index_topk": 4, "mlp_layer_types": ["dense", "sparse"]},
}
"""A plain one; one with soft caps, a window in one of its layers, and norms behind attention and MLP; one with norms of
queries and keys, and experts; some with states, of which the last two attend in one of their layers, one of them to
latents, and have experts; one that attends to the few tokens that an indexer chooses."""
WITH_STATES: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 1},
    "mamba2": {"num_hidden_layers": 1},
    "qwen3-next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "zamba2": {"num_hidden_layers": 1, "layers_block_type": ["hybrid"], "num_mem_blocks": 1},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("llama"), **MODELS["llama"])


def generated(runner: Backend, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The second prompt comes when the first one decodes, so that one step has both."""
    driver = Driver(runner, budget=7)
    sequences = [driver.add(prompts[0], OUTPUT)]
    driver.step()
    sequences += [driver.add(prompt, OUTPUT) for prompt in prompts[1:]]
    driver.run()
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("family", list(MODELS))
def test_models_on_triton_generate_what_the_reference_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family, tmp_path, **MODELS[family])
    logits = record_logits(monkeypatch)
    output = generated(tiny_runner(model.path, "triton", device=str(DEVICE), dtype="float32"))
    assert output == [model.greedy(prompt, OUTPUT) for prompt in PROMPTS]
    first, mixed = logits[0].cpu(), logits[1].cpu()
    assert_near(first[0], model.logits(PROMPTS[0])[-1])
    assert_near(mixed[0], model.logits([*PROMPTS[0], output[0][0]])[-1])
    assert_near(mixed[1], model.logits(PROMPTS[1])[-1])


@pytest.mark.parametrize("code", ["int4", "w8a8_int8"])
def test_weights_of_few_bits_on_triton_are_the_references_rounded_ones(
    code: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product by the kernel that reads codes, of which tests/unit/worker/ops/triton has each kind; rows are
    rounded as the reference's are."""
    model = make_model("qwen2", tmp_path, num_hidden_layers=1, **SIZES)
    rounded(model.reference, code)
    logits = record_logits(monkeypatch)
    output = generated(tiny_runner(model.path, "triton", device=str(DEVICE), dtype="float32", quantization=code))
    assert output == [model.greedy(prompt, OUTPUT) for prompt in PROMPTS]
    assert_near(logits[0].cpu()[0], model.logits(PROMPTS[0])[-1])


def test_images_turn_what_follows_them_on_triton(tmp_path: Path) -> None:
    """Cosines and sines of each row, launched ahead; what decodes behind an image is no captured step."""
    model, capture = make_qwen_model(tmp_path, num_hidden_layers=1), RunAgain()
    runner = tiny_runner(model.path, "triton", device=str(DEVICE), dtype="float32", capture=capture, launching=True)
    chats = [ImageChat(picture(0, (80, 30)), "?"), ImageChat("Hm?")]
    driver = Driver(runner, budget=17)
    sequences = [chat.add_to(driver, model, OUTPUT) for chat in chats]
    driver.run()
    assert [each.output for each in sequences] == [chat.expected(model, OUTPUT) for chat in chats]
    assert capture.replayed < OUTPUT


def assert_near(logits: Tensor, expected: Tensor) -> None:
    assert logits.sub(expected).abs().max() < 1e-3
    assert expected.std() > 0.3, "a reference this flat would agree with anything"


def test_captured_decodes_generate_what_launched_ones_do(llama: TinyModel) -> None:
    """Padded to three rows, beside steps that are no decodes."""
    capture = RunAgain()
    runner = tiny_runner(llama.path, "triton", device=str(DEVICE), dtype="float32", capture=capture, launching=True)
    output = generated(runner)
    assert output == [llama.greedy(prompt, OUTPUT) for prompt in PROMPTS]
    assert (capture.captured, capture.replayed) == (1, 2)


@pytest.mark.parametrize("family", by_lane(WITH_STATES))
def test_captured_decodes_go_on_with_their_states(family: str, tmp_path: Path) -> None:
    """Padded to three rows, of which some are nobody's."""
    model, capture = make_model(family, tmp_path, **WITH_STATES[family]), RunAgain()
    runner = tiny_runner(
        model.path, "triton", device=str(DEVICE), dtype="float32", max_num_seqs=3, capture=capture, launching=True
    )
    output = generated(runner)
    assert output == [model.greedy(prompt, OUTPUT) for prompt in PROMPTS]
    assert (capture.captured, capture.replayed) == (1, 2)


@pytest.mark.parametrize(("family", "captured"), [("nemotron-h", True), ("nemotron-h-moe", False)])
def test_experts_without_gates_are_not_captured(family: str, captured: bool, tmp_path: Path) -> None:
    """They are multiplied one after the other, for which the host has to know which were chosen."""
    runner = tiny_runner(make_model(family, tmp_path).path, "triton", device=str(DEVICE), dtype="float32")
    assert runner.rank.decoder.capturable == captured


@pytest.mark.parametrize("family", ["gemma2", "qwen2-moe"])
def test_nothing_in_a_model_waits_for_the_device(family: str, tmp_path: Path) -> None:
    """Or it could not be captured: scaled embeddings, soft caps; routers, experts of all and of some tokens."""
    model = make_model(family, tmp_path, num_hidden_layers=1)
    capture = RunAgain()
    tiny_runner(model.path, "triton", device=str(DEVICE), dtype="float32", max_num_seqs=1, capture=capture)
    assert capture.captured == 1


def test_a_draft_models_decodes_are_captured_too(llama: TinyModel) -> None:
    """The model drafts for itself, so that every draft stands."""
    captures = RunAgain()
    runner = tiny_runner(
        llama.path,
        "triton",
        device=str(DEVICE),
        dtype="float32",
        max_num_seqs=3,
        capture=captures,
        launching=True,
        drafted_by=llama.path,
    )
    driver = Driver(runner, speculate=2)
    sequence = driver.add(PROMPTS[1], 7)
    driver.run()
    assert sequence.output == llama.greedy(PROMPTS[1], 7)
    assert driver.accepted == driver.drafted == 4
    assert captures.captured == 2
    # Two steps with drafts, of which the first follows a prompt that is read as such: each reads, drafts on, verifies.
    assert captures.replayed == 5


def test_keys_and_values_in_fp8_are_near_those_in_full(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = record_logits(monkeypatch)
    runner = tiny_runner(llama.path, "triton", device=str(DEVICE), dtype="float32", cache="fp8")
    assert runner.kv.layout.dtype == "float8_e4m3fn"
    driver = Driver(runner)
    sequence = driver.add(PROMPTS[0], 2)
    driver.run()
    for row, expected in zip(logits, llama.logits(sequence.tokens)[6:-1], strict=False):
        error = row[0].cpu().sub(expected)
        assert 1e-4 < error.abs().mean() < 0.1 * expected.std()


def test_keys_and_values_in_fp8_take_half_the_memory() -> None:
    full, half = (TritonOps(DEVICE, torch.bfloat16, cache) for cache in (None, torch.float8_e4m3fn))
    assert full.kv_block_bytes(8, 128) == 2 * half.kv_block_bytes(8, 128) == 2 * 8 * 16 * 128 * 2
    assert sum(cache.nbytes for cache in half.allocate_kv(3, 8, 128)) == 3 * half.kv_block_bytes(8, 128)


@pytest.mark.parametrize(
    ("ops", "cache", "whose"),
    [
        ("torch", "fp8", "PyTorch's own"),
        ("torch", "int8_per_token_head", "PyTorch's own"),
        ("triton", "int8_per_token_head", "Triton's"),
    ],
)
def test_operations_that_keep_no_such_keys_and_values_say_so(ops: OpsName, cache: CacheDtype, whose: str) -> None:
    with pytest.raises(OpsUnavailable, match=f"kv_cache_dtype = {cache}: {whose} operations read no such"):
        built_in_platform(DEVICE.type).create_ops(OpsChoice(ops, DEVICE, torch.bfloat16, cache))


def test_without_a_gpu_or_the_interpreter_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(OpsUnavailable, match=r"run on GPUs, not on cpu"):
        built_in_platform("cpu").create_ops(OpsChoice("triton", torch.device("cpu"), torch.float32))
