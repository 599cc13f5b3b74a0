"""Models whose blocks differ in key/value heads and columns, or lack attention or an MLP: what is computed, and what is
refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.hf_config import read_model_config
from services.worker.models.lora.slots import LoraSettings
from shared.ids import ModelName
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_adapters import linear_layers, write_adapter
from tests.support.models.tiny_nas import CONFIG, NasModel, make_nas
from tests.support.worker.library_situations import check_mixed_batch, check_resumed_sequences, prompt
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NasModel:
    return make_nas(tmp_path_factory.mktemp("nas"))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


@pytest.mark.parametrize("ops", ["native", "torch"])
def test_logits_are_those_of_the_library(ops: str, model: NasModel, recorded: list[Tensor]) -> None:
    backend = tiny_backend(model.path, ops=ops)
    decoder = backend.rank.decoder
    assert isinstance(decoder, Decoder)
    assert (decoder.native is not None) == (ops == "native")
    assert_logits_agree(backend, model, prompt(70), OUTPUT, recorded, budget=32)


def test_batches_and_shared_prefixes(model: NasModel) -> None:
    backend = tiny_backend(model.path, ops="native")
    check_mixed_batch(model, backend)
    backend.reset()
    check_resumed_sequences(model, backend)


def test_only_blocks_that_attend_have_a_cache(model: NasModel) -> None:
    backend = tiny_backend(model.path, ops="native")
    config = read_model_config(model.path)
    assert config.num_layers == len(backend.rank.caches) == 4
    assert [layer.blocks for layer in config.layers] == [(0, 2), (3, 3), (4, 6), (7, 8)]
    assert config.parameters == sum(each.numel() for each in model.reference.parameters() if each.ndim > 1)


def test_weights_in_int8(model: NasModel, recorded: list[Tensor]) -> None:
    reference = copy.deepcopy(model.reference)
    rounded(reference, "int8")
    backend = tiny_backend(model.path, ops="native", quantization="int8")
    assert_logits_agree(backend, NasModel(model.family, model.path, reference), prompt(40), OUTPUT, recorded)


@pytest.mark.features("LoRA")
@pytest.mark.parametrize("ops", ["native", "torch"])
def test_adapters_have_the_names_of_each_block(
    ops: str, model: NasModel, tmp_path: Path, recorded: list[Tensor]
) -> None:
    modules = linear_layers(model)
    assert {"linear_attn", "linear_mlp", "k_proj", "down_proj"} <= set(modules)
    merged = write_adapter(model, tmp_path / "adapter", modules=modules)
    settings = LoraSettings(((ModelName("a"), merged.path),), 1, 8)
    backend = tiny_backend(model.path, ops=ops, loras=settings)
    driver, tokens = Driver(backend, budget=32), prompt(40)
    recorded.clear()
    sequence = driver.add(tokens, OUTPUT, lora=backend.card.loras[0].id)
    driver.run()
    expected = merged.logits(sequence.tokens)[len(tokens) - 1 : -1]
    assert torch.cat(recorded[-OUTPUT:]).sub(expected).abs().max() < 1e-3 * expected.abs().max()
    assert (model.logits(sequence.tokens)[len(tokens) - 1 : -1] - expected).abs().max() > 0.1


def test_an_adapter_of_a_block_without_attention_is_refused(model: NasModel, tmp_path: Path) -> None:
    reference = copy.deepcopy(model.reference)
    layers = reference.model.layers
    layers[1].self_attn = copy.deepcopy(layers[0].self_attn)
    write_adapter(NasModel(model.family, model.path, reference), tmp_path / "adapter", modules=("q_proj",))
    settings = LoraSettings(((ModelName("a"), tmp_path / "adapter"),), 1, 8)
    with pytest.raises(ModelError, match=r"1\.self_attn\.q_proj of layer 0 is no module"):
        tiny_backend(model.path, ops="native", loras=settings)


def test_heads_that_count_blocks_are_refused(model: NasModel) -> None:
    """EAGLE-3's."""
    decoder = tiny_backend(model.path, ops="native").rank.decoder
    assert isinstance(decoder, Decoder)
    with pytest.raises(ModelError, match="layers of this model are several blocks each"):
        decoder.use_taps((1, 2))


def test_a_model_of_one_list_of_heads(tmp_path: Path) -> None:
    """DeciLM-7B."""
    keys = {"block_configs": None, "intermediate_size": 128, "num_key_value_heads_per_layer": [2, 4, 1, 4] + [2] * 5}
    config = described(tmp_path, **keys)
    assert config.num_kv_heads == 4
    assert [layer.kv_heads for layer in config.layers] == [2, None, 1, None, *[2] * 5]
    assert {layer.following[0].columns for layer in config.layers} == {128}


def attention(block: int, **keys: Any) -> dict[str, Any]:
    return changed("attention", block, keys)


def ffn(block: int, **keys: Any) -> dict[str, Any]:
    return changed("ffn", block, keys)


def changed(part: str, block: int, keys: dict[str, Any]) -> dict[str, Any]:
    blocks = copy.deepcopy(CONFIG["block_configs"])
    blocks[block][part] |= keys
    return {"block_configs": blocks}


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (attention(0, no_op=True), "block_configs: the first block has to attend"),
        (attention(3, window_length=64), r"block_configs\[3\]\.attention: .*window_length"),
        (attention(3, num_sink_tokens=4), r"block_configs\[3\]\.attention: .*num_sink_tokens"),
        (attention(3, mamba={"state_dim": 8}), r"block_configs\[3\]\.attention: .*mamba"),
        (attention(3, n_heads_in_group=3), r"block_configs\[3\]\.attention\.n_heads_in_group 3: 4 heads have to be"),
        (attention(3, n_heads_in_group=None), r"block_configs\[3\]\.attention\.n_heads_in_group None"),
        (ffn(0, moe={"num_local_experts": 4}), r"block_configs\[0\]\.ffn: .*moe"),
        (ffn(0, hidden_act="gelu"), r"block_configs\[0\]\.ffn: .*hidden_act"),
        (ffn(0, gated=False), r"block_configs\[0\]\.ffn: .*gated"),
        (ffn(0, intermediate_size=None), r"block_configs\[0\]\.ffn: intermediate_size None, ffn_mult None"),
        ({"num_hidden_layers": 3}, "9 blocks are described, num_hidden_layers is 3"),
        ({"block_configs": None}, "block_configs, or num_key_value_heads_per_layer and intermediate_size, are missing"),
        ({"position_embedding_type": "rope_llama4"}, "position_embedding_type"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(keys: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{complaint}"):
        described(tmp_path, **keys)


def described(folder: Path, **keys: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIG | keys))
    return read_model_config(folder)
