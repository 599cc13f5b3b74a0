"""Checkpoints that other programs quantised, against `transformers` with the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from services.worker.models.checkpoint import CPU, open_checkpoint, stored_bytes
from services.worker.models.config import ModelError
from services.worker.models.fallback.library_decoder import LibraryDecoder
from services.worker.models.hf_config import read_model_config
from services.worker.models.mixture.loading import read_experts
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.models.quantization.method import read_method
from services.worker.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from services.worker.models.tensor_file import TensorFiles
from services.worker.ops.interface import OpsName
from services.worker.ops.quantized import Code, QuantizedStack, QuantizedWeight
from services.worker.ops.torch_ops import QuantizedLinear, TorchOps
from tests.support.models.library_models import library_model
from tests.support.models.quantised_files import (
    LEFT_ALONE,
    METHODS,
    compressed_config,
    quantise,
    quantised,
    quark,
    torchao,
)
from tests.support.models.rounded_models import SIZES, assert_same_steps, round_inputs
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import last_logits, record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 4
PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(40)]


def assert_logits_are_those_of(model: TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served of the checkpoint in `folder`, natively in float32, has the logits of `model`."""
    recorded = record_logits(monkeypatch)
    driver = Driver(tiny_backend(folder, ops="native", dtype="float32"))
    recorded.clear()  # what it tried when it was started
    sequence = driver.add(PROMPT, OUTPUT)
    driver.run()
    expected = model.logits(sequence.tokens)[len(PROMPT) - 1 : -1]
    assert (torch.cat(recorded[:OUTPUT]) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_numbers_that_the_checkpoint_stands_for(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_logits_are_those_of(quantised(tmp_path, method), tmp_path, monkeypatch)


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    quantised(tmp_path, "modelopt's nvfp4")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    method = read_method(tmp_path)
    assert method is not None
    assert (method.name, method.growth) == ("modelopt", 2)
    tiny_backend(tmp_path, dtype="float32")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: quant_algo 'W4A8_AWQ' is not supported"):
        tiny_backend(tmp_path)


def test_groups_of_no_known_size_are_refused(tmp_path: Path) -> None:
    settings, _ = METHODS["gptq whose last groups are smaller"]
    quantised(tmp_path, "gptq whose last groups are smaller")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {key: value for key, value in settings.items() if key != "group_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"down_proj has 3 scales for 128 inputs, and .* it says no group_size"):
        tiny_backend(tmp_path)


def test_a_model_of_images_may_say_it_of_its_language_model(tmp_path: Path) -> None:
    quantised(tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"text_config": {"quantization_config": config.pop("quantization_config")}})
    )
    method = read_method(tmp_path)
    assert method is not None
    assert (method.name, method.group_size) == ("awq", 64)
    with pytest.raises(ModelError, match="quantization_config is set"):
        read_model_config(tmp_path)


def test_towers_and_further_predictions_take_no_memory_of_the_language_models(tmp_path: Path) -> None:
    tensors = {
        name: torch.zeros(100, dtype=torch.int8)
        for name in (
            *("model.layers.0.mlp.up_proj.qweight", "model.layers.1.mlp.up_proj.qweight", "lm_head.weight"),
            *("model.layers.2.eh_proj.weight", "mtp.layers.0.fc.weight"),
            *("visual.blocks.0.weight", "model.vision_tower.layers.0.weight", "multi_modal_projector.weight"),
            "mm_projector.proj.0.weight",
        )
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_bytes(tmp_path, num_layers=2) == 300


def rounding(method: str, activations: dict[str, Any]) -> dict[str, Any]:
    """The scheme of a method, with one for activations."""
    config = json.loads(json.dumps(METHODS[method][0]))
    config["config_groups"]["group_0"]["input_activations"] = activations
    return config


BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_BY_TOKEN = BY_TOKEN | {"type": "float"}
BY_TENSOR = {"strategy": "tensor", "dynamic": False}
DYNAMIC_INT8 = {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": True, "symmetric": True}
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("method", "config", "rounds"),
    [
        ("int8", rounding("int8", BY_TOKEN), "int8"),
        ("int8", rounding("int8", BY_TOKEN | {"symmetric": False}), None),
        ("int8", rounding("int8", BY_TOKEN | BY_TENSOR), None),
        ("int8", rounding("int8", FP8_BY_TOKEN), None),
        ("fp8 of outputs", rounding("fp8 of outputs", FP8_BY_TOKEN), "fp8"),
        ("fp8 of outputs", rounding("fp8 of outputs", FP8_BY_TOKEN | BY_TENSOR), "fp8"),
        ("fp8", DYNAMIC, "fp8"),
        ("modelopt's fp8", METHODS["modelopt's fp8"][0], "fp8"),
        ("fbgemm_fp8", METHODS["fbgemm_fp8"][0], "fp8"),
        ("torchao's fp8", torchao("Float8DynamicActivationFloat8WeightConfig"), "fp8"),
        ("quark's fp8", quark("fp8_e4m3", "per_tensor", {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}), "fp8"),
        ("quark's int8", quark("int8", "per_channel", DYNAMIC_INT8), "int8"),
        ("quark's int8", quark("int8", "per_channel", DYNAMIC_INT8 | {"qscheme": "per_tensor"}), None),
        ("fp8 of whole blocks", DYNAMIC | {"weight_block_size": [32, 32]}, None),
        ("modelopt's fp8 of blocks", DYNAMIC | {"weight_block_size": [128, 128]}, None),
    ],
)
def test_activations_are_rounded_where_the_scheme_asks_for_it(
    method: str, config: dict[str, Any], rounds: Code | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does; where it asks for something else, they stay more exact: blocks do, also such as have all inputs."""
    monkeypatch.setitem(METHODS, "w8a8", (config, METHODS[method][1]))
    model = quantised(tmp_path, "w8a8")
    exact = model.logits(PROMPT)
    if rounds is not None:
        for name, module in model.reference.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith(LEFT_ALONE):
                round_inputs(module, code=rounds)
        assert (model.logits(PROMPT) - exact).abs().median() > 1e-2
    recorded = record_logits(monkeypatch)
    # Native operations round no rows to fp8.
    ops: OpsName = "torch" if rounds == "fp8" or "weight_block_size" in config else "native"
    backend = tiny_backend(tmp_path, ops=ops, dtype="float32")
    prompts = [PROMPT[first : first + 12] for first in range(0, 25, 4)]
    found = [last_logits(backend, prompt, recorded) for prompt in prompts]
    assert_same_steps(found, [model.logits(prompt)[-1] for prompt in prompts])


@pytest.mark.parametrize(
    ("method", "keeps"),
    [
        *(("gptq", True), ("awq", True), ("packed with zero points", True), ("int8", True), ("fp8 of blocks", False)),
        *(("nvfp4", True), ("modelopt's nvfp4", True), ("torchao's int4", True), ("hqq", True)),
    ],
)
def test_experts_stay_codes_where_products_know_their_groups(
    method: str, keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised(tmp_path, method, "qwen3-moe", moe_intermediate_size=64)
    config, found = read_model_config(tmp_path, quantized=True), read_method(tmp_path)
    assert config.mixture is not None
    assert found is not None
    with open_checkpoint(tmp_path, torch.float32) as checkpoint:
        tensors = QuantizedCheckpoint(checkpoint, found, torch.float32)
        matrices = MatrixLoader(tensors, TorchOps(CPU, torch.float32), CPU)
        experts = read_experts(matrices, "model.layers.0", config.mixture, config.hidden_size, (0, 64))
    assert [isinstance(stack, QuantizedStack) for stack in (experts.gate_up, experts.down)] == [keeps] * 2
    assert_logits_are_those_of(model, tmp_path, monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_has_its_part_of_a_weight(method: str, tmp_path: Path) -> None:
    """Whether its bounds are those of groups or not."""
    whole = quantised(tmp_path, method).reference.model.layers[0].mlp.down_proj.weight.detach()
    found = read_method(tmp_path)
    assert found is not None
    with open_checkpoint(tmp_path, torch.float32) as checkpoint:
        tensors = QuantizedCheckpoint(checkpoint, found, torch.float32)
        for rows, columns in (((32, 64), (0, 128)), ((0, 64), (64, 128)), ((0, 64), (48, 96))):
            part = tensors.read_linear("model.layers.0.mlp.down_proj", (64, 128), rows=rows, columns=columns)
            numbers = part.dequantized(torch.float32) if isinstance(part, QuantizedWeight) else part
            torch.testing.assert_close(numbers, whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "exl3"}, "quant_method 'exl3' is not supported; supported: compressed-tensors, gptq, awq"),
        ({"quant_method": "gptq", "bits": 5}, "bits 5 is not supported; supported: 2, 3, 4, 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4"}}},
            r"global_quant_config\.weight\.dtype 'uint4' is not supported; supported: fp8_e4m3, int8, fp4",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "data_type": "mx_int"},
            "data_type 'mx_int' is not supported; supported: mx_fp, nv_fp",
        ),
        (
            torchao("MXDynamicActivationMXWeightConfig"),
            "quant_type 'MXDynamicActivationMXWeightConfig' is not supported",
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "supported: Float8WeightOnlyConfig, Float8Dyn"),
        (
            {"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:auto_awq"},
            "bits 2 is not supported; supported: 4",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:mlx"},
            "packing_format 'auto_round:mlx' is not supported; supported: auto_round:auto_gptq, auto_round:auto_awq",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
            "quant_algo 'NVFP4_AWQ' is not supported; supported: FP",
        ),
        (compressed_config(4, "float", "group", "pack-quantized"), "num_bits 4 is not supported; supported: 8"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=says):
        tiny_backend(tmp_path)


LIBRARY_SIZES = {**SIZES, "head_dim": 16}


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        *(("Olmo2", "gptq"), ("Phi3", "awq"), ("Cohere2", "packed with zero points"), ("Glm4", "int8")),
        *(("Olmo2", "fp8 of blocks"), ("Olmo2", "nvfp4"), ("Olmo2", "nested nf4")),
    ],
)
def test_transformers_computes_with_linear_layers_of_codes(
    architecture: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantise(library_model(architecture, tmp_path, **LIBRARY_SIZES), method)
    assert_logits_are_those_of(model, tmp_path, monkeypatch)


def test_its_layers_stay_codes_and_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    quantise(library_model("Olmo2", tmp_path / "dense", **LIBRARY_SIZES), "gptq")
    decoder = tiny_backend(tmp_path / "dense", ops="torch").rank.decoder
    assert isinstance(decoder, LibraryDecoder)
    products = decoder.named_modules().products
    assert isinstance(products["model.layers.0.mlp.down_proj"].packed, QuantizedLinear)
    for method in ("gptq", "fp8"):
        quantise(library_model("Glm4Moe", tmp_path / method, **LIBRARY_SIZES), method)
        with pytest.raises(ModelError, match=r"experts\.0\..* is of codes, and of no linear layer of Glm4Moe"):
            tiny_backend(tmp_path / method)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.scales", "model.layers.1.input_layernorm.weight"])
def test_what_is_missing_beside_codes_is_named(name: str, tmp_path: Path) -> None:
    quantise(library_model("Phi3", tmp_path, **LIBRARY_SIZES), "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"the checkpoint has no tensor {name}"):
        tiny_backend(tmp_path)


def test_a_quantised_checkpoint_is_not_rounded_again(tmp_path: Path) -> None:
    quantised(tmp_path, "int8")
    with pytest.raises(ModelError, match="quantization int8: the checkpoint is quantised already, by"):
        tiny_backend(tmp_path, quantization="int8")


@pytest.mark.parametrize(
    ("method", "tensor"), [("gptq", "qweight"), ("gptq", "scales"), ("awq", "qzeros"), ("fp8", "weight")]
)
def test_what_does_not_fit_in_the_last_layer_is_found_before_the_first_is_read(
    method: str, tensor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised(tmp_path, method)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.2.self_attn.o_proj.{tensor}"
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def reads(*_: Any) -> None:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(TensorFiles, "read_together", reads)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.self_attn\.o_proj"):
        tiny_backend(tmp_path)


@pytest.mark.parametrize(("tensor", "words"), [("qweight", 7), ("qzeros", 5)])
def test_codes_of_three_bits_that_end_within_a_word_are_named(tensor: str, words: int, tmp_path: Path) -> None:
    quantised(tmp_path, "gptq of three bits")
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.2.self_attn.o_proj.{tensor}"
    found = tensors[name]
    if tensor == "qweight":
        tensors[name] = torch.cat((found, found))[:words].contiguous()
    else:
        tensors[name] = found[:, :words].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"o_proj\.{tensor} has {words} words of codes of 3 bits; a multiple of 3"):
        tiny_backend(tmp_path)
