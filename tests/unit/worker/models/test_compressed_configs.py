"""DeepSeek-V4's `config.json` and names of tensors: as published, as `transformers` writes them; what is refused; and
where blocks hold what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import DeepseekV4Config

from services.worker.backend import BackendError
from services.worker.models.compressed.cache import CompressedLayout
from services.worker.models.config import Compression, ModelConfig, ModelError
from services.worker.models.expert_parallel.settings import ExpertSettings
from services.worker.models.hf_config import read_model_config
from services.worker.models.hyper_connections.limits import check_streams
from services.worker.models.loaded_model import LoadSettings
from services.worker.models.published.names import deepseek_v4_name
from services.worker.models.rope import PlainRope, YarnRope
from services.worker.models.sharding import stage_of
from services.worker.ops.interface import Routing
from services.worker.ops.torch_routing import route
from services.worker.platforms.installed import built_in_platform
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import active_parameters

YARN = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "num_hash_layers": 3,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "torch_dtype": "bfloat16",
}
"""V4-Flash as published, as far as it is no default; the last ratio is of a layer that predicts further tokens."""
SPARSE, HEAVY = Compression(4, sparse=True), Compression(128, sparse=False)


def read(folder: Path, **config: Any) -> ModelConfig:
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return read_model_config(folder)


def test_v4_flash_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, **FLASH)
    assert [layer.compression for layer in config.layers] == [None, None] + [SPARSE, HEAVY] * 20 + [SPARSE]
    assert [layer.hashed for layer in config.layers] == [True] * 3 + [False] * 40
    assert config.layers[0].rope == PlainRope(10_000.0)
    assert config.layers[2].rope == YarnRope(160_000.0, 16.0, 65536, 32.0, 1.0, magnitude=1.0, truncate=True)
    assert config.parameters / 1e9 == pytest.approx(284, abs=1)
    assert active_parameters(config) / 1e9 == pytest.approx(13, abs=0.5)


def test_what_the_library_writes_says_the_same(tmp_path: Path) -> None:
    published = {key: value for key, value in FLASH.items() if key != "architectures"}
    DeepseekV4Config(**published, architectures=FLASH["architectures"]).save_pretrained(tmp_path)
    assert read_model_config(tmp_path) == read(tmp_path, **FLASH)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"compress_ratios": [8] * 43}, "compress_ratios 8 is not supported; supported: 0, 4, 128"),
        ({"compress_ratios": [4] * 9}, "layer_types names 9 layers, num_hidden_layers 43"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types 'full_attention' is not supported"),
        (
            {"compress_rates": {"heavily_compressed_attention": 0}},
            "compress_rates heavily_compressed_attention 0 is not",
        ),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types 'dense' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sqrtsoftplus, sigmoid"),
        ({"swiglu_limit": 0.0}, "swiglu_limit 0.0 is not supported; positive numbers are"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported; supported: 1"),
        ({"o_groups": 7}, "o_groups 7: 64 heads do not divide by it"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63: rotated are pairs"),
        ({"index_topk": 0}, "index_topk 0 is not positive"),
        (
            {"rope_scaling": {**YARN, "type": "longrope", "short_factor": [1.0] * 32}},
            "rope_type 'longrope' is not supported for this architecture",
        ),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok 300: there are 256 experts"),
    ],
)
def test_what_cannot_be_is_refused_by_key_and_value(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        read(tmp_path, **{**FLASH, **changes})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8: compressed keys are kept in the model's dtype"),
        ({"attention": "flash-attn"}, "attention flash-attn: it knows no compressed keys"),
        ({"on_layer": print}, "kv_connector: not for a model with compressed keys"),
        ({"group": object()}, "data_parallel_size: not for a model with compressed keys"),
        ({"shared_rows": 64}, "enable_sp: not for a model with compressed keys"),
        ({"context_rows": 64}, "prefill_context_parallel_size: not for a model with compressed keys"),
        ({"experts": ExpertSettings(parallel=True)}, "enable_expert_parallel: not for a model with compressed keys"),
    ],
)
def test_what_it_is_not_combined_with_is_refused_by_the_setting(
    tmp_path: Path, settings: dict[str, Any], complaint: str
) -> None:
    config = read(tmp_path, **FLASH)
    chosen = LoadSettings(folder=tmp_path, platform=built_in_platform("cpu"))
    check_streams(chosen, config, stage_of(config, 0, 1), None)
    with pytest.raises(ModelError, match=complaint):
        check_streams(replace(chosen, **settings), config, stage_of(config, 0, 1), None)


def test_layers_that_choose_experts_by_tokens_are_of_the_first_stage(tmp_path: Path) -> None:
    config = read(tmp_path, **FLASH)
    chosen = LoadSettings(folder=tmp_path, platform=built_in_platform("cpu"))
    check_streams(chosen, config, stage_of(config, 1, 2, (3, 40)), None)
    with pytest.raises(ModelError, match="pp-layers: layer 2 chooses experts by tokens, which only the first stage"):
        check_streams(chosen, config, stage_of(config, 1, 2, (2, 41)), None)


def test_it_is_not_simulated(tmp_path: Path) -> None:
    read(tmp_path, **FLASH)
    with pytest.raises(BackendError, match="the simulation knows no models with compressed keys"):
        read_shape(tmp_path, "auto")


@pytest.mark.parametrize(
    ("published", "library"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
        ("hc_head_scale", "model.hc_head.hc_scale"),
        ("layers.0.hc_attn_scale", "model.layers.0.attn_hc.scale"),
        ("layers.3.attn.attn_sink", "model.layers.3.self_attn.sinks"),
        ("layers.3.attn.q_norm.weight", "model.layers.3.self_attn.q_a_norm.weight"),
        ("layers.3.attn.kv_norm.weight", "model.layers.3.self_attn.kv_norm.weight"),
        ("layers.3.attn.compressor.ape", "model.layers.3.self_attn.compressor.position_bias"),
        ("layers.3.attn.indexer.wq_b.weight", "model.layers.3.self_attn.compressor.indexer.q_b_proj.weight"),
        ("layers.3.attn.indexer.compressor.norm.weight", "model.layers.3.self_attn.compressor.indexer.kv_norm.weight"),
        ("layers.3.ffn.experts.17.w3.weight", "model.layers.3.mlp.experts.17.up_proj.weight"),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("layers.3.attn.wo_a.scale", "model.layers.3.self_attn.o_a_proj.weight_scale_inv"),
    ],
)
def test_published_names_are_the_library_s(published: str, library: str) -> None:
    assert deepseek_v4_name(published) == deepseek_v4_name(library) == library


def test_a_block_holds_entries_behind_what_they_are_made_of(tmp_path: Path) -> None:
    """Keys of 512, indexer's of 128; a block of 16 tokens has four entries of four, and room for one of 128."""
    layout = CompressedLayout(read(tmp_path, **FLASH), 16)
    assert layout.window == 128
    assert (layout.key_dim, layout.apart, layout.together) == (512, 4 * (512 + 128), 4 * (512 + 128) + (512 + 128) // 4)
    assert layout.entries_of_block(SPARSE) == 4
    assert layout.entries_of_block(HEAVY) == 1
    room = layout.apart * 16
    used = [0] * layout.holders
    for layer, place in zip(read(tmp_path, **FLASH).layers, layout.places, strict=True):
        if place is None or layer.compression is None:
            continue
        assert place.first == used[place.holder]
        used[place.holder] += 4 * 640 if layer.compression.sparse else 512
    assert max(used) <= room


def test_experts_that_a_table_has_are_weighed_by_their_scores() -> None:
    logits, given = torch.tensor([[0.5, -1.0, 2.0, 0.1]]), torch.tensor([[3, 1]])
    picks = route(logits, Routing(chosen=2, renormalised=True, scoring="sqrtsoftplus", scale=1.5, given=given))
    scores = torch.log1p(logits.double().exp()).sqrt()[0, [3, 1]]
    assert torch.equal(picks.experts, given)
    assert torch.allclose(picks.chances.double()[0], 1.5 * scores / scores.sum(), atol=1e-6)
