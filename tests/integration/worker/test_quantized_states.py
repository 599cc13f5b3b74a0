"""Checkpoints of models with states that other programs quantised, against `transformers` with what codes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.executor.host_runner import HostRunner
from services.worker.models.decoder import Decoder
from services.worker.models.lora.slots import LoraSettings
from services.worker.models.weights import LayerWeights, MixtureMlp
from services.worker.ops.interface import OpsName
from services.worker.ops.torch_ops import ExpertLinears, QuantizedLinear
from shared.ids import ModelName
from tests.support.models.quantised_files import quantised
from tests.support.models.tiny_adapters import linear_layers, write_adapter
from tests.support.models.tiny_models import VOCABULARY, TinyModel, by_lane
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 4
PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(60)]
_MAMBA = {"mamba_n_heads": 8}
_SELECTIVE = {"time_step_rank": 32, "state_size": 16}
_DELTA = {"linear_value_head_dim": 32}
_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
CHANGES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "bamba": _MAMBA,
    "granite-hybrid": _MAMBA | {"shared_intermediate_size": 64},
    "granite-hybrid-moe": _MAMBA | {"shared_intermediate_size": 64},
    "qwen3-next": _DELTA | _EXPERTS,
    "qwen3.5": _DELTA,
    "qwen3.5-moe": _DELTA | _EXPERTS,
    "olmo-hybrid": _DELTA | {"linear_key_head_dim": 32},
    "kimi-linear": {"linear_head_dim": 32, "linear_num_heads": 4, "moe_intermediate_size": 64, "kv_lora_rank": 64}
    | {"qk_nope_head_dim": 32, "v_head_dim": 16},
    "ling-3": {"head_dim": 32, "moe_intermediate_size": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32}
    | {"v_head_dim": 16},
    "minimax": {},
    "nemotron-h": {"mamba_num_heads": 8},
    "nemotron-h-moe": {"mamba_num_heads": 8, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64},
    "falcon-h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "head_dim": 16},
    "zamba2": {"n_mamba_heads": 8, "head_dim": 32, "adapter_rank": 32},
    "lfm2": {},
    "mamba": _SELECTIVE,
    "falcon-mamba": _SELECTIVE,
    "jamba": {"mamba_dt_rank": 32, "mamba_d_state": 16},
    "lfm2-moe": {"moe_intermediate_size": 64},
    "lfm3": {},
}
"""So that inputs are whole groups."""


def quantised_states(path: Path, method: str, family: str, **changes: Any) -> TinyModel:
    return quantised(path, method, family, **CHANGES[family], **changes)


@pytest.mark.parametrize(
    ("family", "method", "ops"),
    [
        ("mamba2", "packed", "native"),
        ("bamba", "gptq in another order", "native"),
        ("granite-hybrid", "int8", "torch"),
        ("granite-hybrid-moe", "packed", "native"),
        ("qwen3-next", "fp8 of blocks", "native"),
        ("qwen3-next", "fp8 of whole blocks", "torch"),
        ("qwen3.5", "awq", "native"),
        ("qwen3.5-moe", "fp8 of whole blocks", "native"),
        ("qwen3.5-moe", "gptq", "torch"),
        *by_lane(["olmo-hybrid"], "gptq", "native"),
        *by_lane(["olmo-hybrid"], "fp8 of whole blocks", "torch"),
        *by_lane(["kimi-linear"], "gptq", "native"),
        *by_lane(["kimi-linear"], "fp8 of whole blocks", "torch"),
        *by_lane(["ling-3"], "gptq", "native"),
        *by_lane(["ling-3"], "fp8 of whole blocks", "torch"),
        *by_lane(["minimax"], "gptq", "native"),
        *by_lane(["minimax"], "fp8 of blocks", "torch"),
        *by_lane(["lfm2"], "awq", "native"),
        *by_lane(["lfm2-moe"], "fp8 of blocks", "torch"),
        *by_lane(["lfm3"], "int8", "native"),
        *by_lane(["lfm3"], "fp8 of blocks", "torch"),
        *by_lane(["mamba"], "int8", "native"),
        *by_lane(["falcon-mamba"], "packed", "torch"),
        *by_lane(["jamba"], "gptq", "native"),
        *by_lane(["falcon-h1"], "packed", "native"),
        *by_lane(["nemotron-h"], "gptq", "native"),
        *by_lane(["nemotron-h-moe"], "nvfp4", "native"),
        *by_lane(["zamba2"], "gptq", "native"),
        *by_lane(["zamba2"], "fp8 of blocks", "torch"),
    ],
)
def test_logits_are_those_of_the_numbers_that_the_checkpoint_stands_for(
    family: str, method: str, ops: OpsName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agrees(quantised_states(tmp_path, method, family), ops, monkeypatch)


def agrees(model: TinyModel, ops: OpsName, monkeypatch: pytest.MonkeyPatch) -> HostRunner:
    """Logits and greedy text of a prompt in chunks are the reference's."""
    recorded = record_logits(monkeypatch)
    backend = tiny_backend(model.path, ops=ops, dtype="float32")
    sequence = assert_logits_agree(backend, model, PROMPT, OUTPUT, recorded, budget=33)
    assert sequence.output == model.greedy(PROMPT, OUTPUT)
    return backend


def first_layer(backend: HostRunner) -> LayerWeights:
    decoder = backend.rank.decoder
    assert isinstance(decoder, Decoder)
    return decoder.weights.layers[0]


@pytest.mark.parametrize(("family", "method"), [("qwen3-next", "fp8 of whole blocks"), ("qwen3.5", "gptq")])
def test_what_projects_most_stays_codes_beside_what_was_left_alone(family: str, method: str, tmp_path: Path) -> None:
    """In the order of `StateOps.mix`, which is not the file's."""
    model = quantised_states(tmp_path, method, family)
    layer = first_layer(tiny_backend(model.path, ops="torch", dtype="float32"))
    assert isinstance(layer.qkv, QuantizedLinear)
    assert layer.steps is not None
    assert not isinstance(layer.steps, QuantizedLinear)


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
def test_what_is_codes_of_one_kind_is_one_product(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.models.quantised_files.LEFT_ALONE", ("lm_head",))
    backend = agrees(quantised_states(tmp_path, "int8", family), "torch", monkeypatch)
    layer = first_layer(backend)
    assert isinstance(layer.qkv, QuantizedLinear)
    assert layer.steps is None


def test_granites_experts_may_be_codes_in_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = agrees(granite_together(tmp_path, "fp8 of outputs"), "torch", monkeypatch)
    mlp = first_layer(backend).mlp
    assert isinstance(mlp, MixtureMlp)
    experts = mlp.experts.packed
    assert isinstance(experts, ExpertLinears)
    assert all(isinstance(each, QuantizedLinear) for each in experts.gate_up + experts.down)


def granite_together(path: Path, method: str, **changes: Any) -> TinyModel:
    """As llm-compressor wrote Granite 4's experts until 0.11: [experts, out, in], with scales [experts, out, 1]."""
    model = quantised_states(path, method, "granite-hybrid-moe", **changes)
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        block = f"model.layers.{layer}.block_sparse_moe"
        for kind in ("weight", "weight_scale"):
            gates, ups, downs = (
                torch.stack([tensors.pop(f"{block}.experts.{expert}.{part}_proj.{kind}") for expert in range(6)])
                for part in ("gate", "up", "down")
            )
            tensors[f"{block}.input_linear.{kind}"] = torch.cat((gates, ups), dim=1)
            tensors[f"{block}.output_linear.{kind}"] = downs
    save_file(tensors, path / "model.safetensors")
    return model


def test_of_a_quantised_checkpoint_with_a_vision_tower_the_language_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen3.5 is published in fp8: what is quantised is said of the whole."""
    model = quantised_states(tmp_path, "fp8 of whole blocks", "qwen3.5-moe")
    tensors = load_file(tmp_path / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    save_file(inner, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "quantization_config": text.pop("quantization_config"),
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    agrees(model, "native", monkeypatch)


@pytest.mark.features("LoRA", "states")
def test_adapters_change_both_products(tmp_path: Path) -> None:
    model = quantised_states(tmp_path / "model", "fp8 of whole blocks", "qwen3-next")
    modules = linear_layers(model)
    assert {"in_proj_ba", "in_proj_qkvz"} <= set(modules)
    adapted = write_adapter(model, tmp_path / "adapter", modules=modules, strength=0.1)
    loras = LoraSettings(((ModelName("adapter"), adapted.path),), 1, 8)
    backend = tiny_backend(model.path, ops="native", dtype="float32", loras=loras)
    driver = Driver(backend, budget=33)
    sequences = [driver.add(PROMPT, 12, lora=lora) for lora in (None, backend.card.loras[0].id)]
    driver.run()
    assert [each.output for each in sequences] == [each.greedy(PROMPT, 12) for each in (model, adapted)]
