"""Adapters that cannot be served as they were trained are refused in words: file, field, value, what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.lora.adapter_files import LoraAdapter, read_adapter
from services.worker.models.lora.slots import LoraSettings
from shared.ids import ModelName
from tests.support.models.library_models import library_model
from tests.support.models.tiny_adapters import write_adapter
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.tiny_backend import tiny_backend

NAME = ModelName("a")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model: TinyModel) -> ModelConfig:
    return read_model_config(model.path)


def read(folder: Path, config: ModelConfig) -> LoraAdapter:
    return read_adapter(NAME, folder, config, 16)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors by the ends of their names, or takes them out."""
    path = folder / "adapter_model.safetensors"
    found = load_file(path)
    for end, tensor in tensors.items():
        name = next(each for each in found if each.endswith(end.replace("__", ".")))
        del found[name]
        if tensor is not None:
            found[name] = tensor
    save_file(found, path)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("r", 17, r"adapter_config.json: r = 17 is not supported; 1 to max_lora_rank, which is 16, are"),
        ("peft_type", "IA3", r'peft_type = "IA3" is not supported; LORA is'),
        ("use_dora", True, "use_dora = true is not supported; false is"),
        ("bias", "all", 'bias = "all" is not supported; none is'),
        ("fan_in_fan_out", True, "fan_in_fan_out = true"),
        ("init_lora_weights", "pissa_niter_16", 'init_lora_weights = "pissa_niter_16"'),
        ("modules_to_save", ["score"], r'modules_to_save = \["score"\] is not supported; none is'),
        ("rank_pattern", {"q_proj": 4}, "rank_pattern = "),
        ("alpha_pattern", {"q_proj": 4}, "alpha_pattern = "),
        ("layer_replication", [[0, 2]], "layer_replication = "),
        ("trainable_token_indices", [3], "trainable_token_indices = "),
        ("lora_alpha", "much", r"adapter_config.json: .*lora_alpha"),
    ],
)
def test_a_configuration_that_is_computed_otherwise_is_refused(
    field: str, value: Any, complaint: str, model: TinyModel, config: ModelConfig, tmp_path: Path
) -> None:
    write_adapter(model, tmp_path, **{field: value})
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path, config)


def test_files_that_are_missing_or_broken(model: TinyModel, config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config.json: there is no such file"):
        read(tmp_path, config)
    write_adapter(model, tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"there is no such file, but adapter_model.bin; only safetensors can be read"):
        read(tmp_path, config)
    weights.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        read(tmp_path, config)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelError, match=r"adapter_config.json: .*\br\b"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    "whole",
    [
        "model.language_model",
        "language_model.model",
        "model.text_model",
        "thinker.model",
        "thinker.model.language_model",
    ],
)
def test_names_of_a_language_model_within_another_are_read(
    whole: str, model: TinyModel, config: ModelConfig, tmp_path: Path
) -> None:
    """As PEFT writes them of models that take images, by the release of `transformers`."""
    write_adapter(model, tmp_path)
    alone = read(tmp_path, config)
    path = tmp_path / "adapter_model.safetensors"
    found = {
        name.replace("base_model.model.model.", f"base_model.model.{whole}."): t for name, t in load_file(path).items()
    }
    assert found.keys().isdisjoint(load_file(path))
    save_file(found, path)
    assert read(tmp_path, config).id == alone.id


def test_tensors_of_wrong_shapes_names_and_values(model: TinyModel, config: ModelConfig, tmp_path: Path) -> None:
    for tensors, complaint in (
        ({"0__self_attn__q_proj__lora_A__weight": torch.ones(8, 40)}, r"has shape \[8, 40\], r and the model ask for"),
        ({"0__self_attn__q_proj__lora_B__weight": None}, "q_proj.lora_A.weight has no counterpart"),
        ({"1__mlp__up_proj__lora_B__weight": torch.full((80, 8), torch.nan)}, "holds NaN or infinity"),
        ({"1__mlp__up_proj__lora_B__weight": torch.ones(80, 8, dtype=torch.int8)}, "has dtype I8; F16, BF16"),
    ):
        write_adapter(model, tmp_path)
        change(tmp_path, **tensors)
        with pytest.raises(ModelError, match=complaint):
            read(tmp_path, config)
    save_file({"base_model.model.score.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"score.weight belongs to no module that can have an adapter here"):
        read(tmp_path, config)
    save_file({"base_model.model.lm_head.weight": torch.ones(161, 48)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="words were added"):
        read(tmp_path, config)


def test_what_the_model_cannot_have(tmp_path: Path) -> None:
    tied = make_model("qwen2", tmp_path / "tied")
    write_adapter(tied, tmp_path / "words", modules=("lm_head",))
    with pytest.raises(ModelError, match="target_modules: lm_head is not supported where embedding and head are tied"):
        read(tmp_path / "words", read_model_config(tied.path))
    mixing = make_model("qwen3-moe", tmp_path / "mixing")
    write_adapter(mixing, tmp_path / "shared", modules=("down_proj",))  # of its one dense layer
    assert {layer for layer, _ in read(tmp_path / "shared", read_model_config(mixing.path)).layers} == {1}
    tall = make_model("llama", tmp_path / "tall", num_hidden_layers=4)
    write_adapter(tall, tmp_path / "four")
    with pytest.raises(ModelError, match="the model has 3 layers"):
        read(tmp_path / "four", read_model_config(make_model("llama", tmp_path / "three").path))
    library = library_model("Olmo2", tmp_path / "library")
    tensors = {f"base_model.model.model.norm.lora_{half}.weight": torch.ones(8, 8) for half in "AB"}
    write_adapter(library, tmp_path / "norms")
    save_file(tensors, tmp_path / "norms" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"norm.lora_A.weight belongs to no module that can have an adapter here"):
        tiny_backend(library.path, loras=LoraSettings(((NAME, tmp_path / "norms"),)))


def test_names_are_the_operators_and_identities_the_contents(
    model: TinyModel, config: ModelConfig, tmp_path: Path
) -> None:
    one, same = write_adapter(model, tmp_path / "1", seed=1), write_adapter(model, tmp_path / "2", seed=1)
    found = {each.path.name: read(each.path, config).id for each in (one, same)}
    found["seed"] = read(write_adapter(model, tmp_path / "3", seed=2).path, config).id
    found["scale"] = read(write_adapter(model, tmp_path / "4", seed=1, alpha=17.0).path, config).id
    assert found["1"] == found["2"]
    assert len(set(found.values())) == 3
    for names, complaint in (((NAME, NAME), "lora = a: this name is given twice"), (("tiny",), "the model itself has")):
        with pytest.raises(ModelError, match=complaint):
            tiny_backend(model.path, loras=LoraSettings(tuple((ModelName(each), one.path) for each in names)))
