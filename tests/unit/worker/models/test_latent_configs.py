"""What configs say of latent attention and of DeepSeek's routers, in the spellings of the Hub and of transformers 5."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaConfig

from services.worker.models.config import LatentConfig, Mixture
from services.worker.models.hf_layers.latent import IndexConfig
from services.worker.ops.interface import Routing
from services.worker.ops.torch_routing import route
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import active_parameters, assert_refused, read

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "torch_dtype": "bfloat16",
}
V3: dict[str, Any] = {
    **LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}

V32: dict[str, Any] = {
    **V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "dtype": "bfloat16",
}


def test_deepseek_v2_lite_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, LITE)
    assert config.latent == LatentConfig(
        q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, interleaved=True
    )
    assert config.mixture == Mixture(
        experts=64,
        chosen=6,
        intermediate_size=1408,
        renormalised=False,
        shared_size=2816,
        shared_gated=False,
        exact_router=True,
    )
    assert [layer.mixes for layer in config.layers] == [False] + [True] * 26
    assert (config.num_kv_heads, config.head_dim, config.rotated_dim, config.max_positions) == (1, 576, 64, 163840)
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    # The model card: 15.7 billion in total, 2.4 activated.
    assert round(config.parameters / 1e9, 1) == 15.7
    assert round((active_parameters(config) + 102400 * 2048) / 1e9, 1) == 2.7


def test_deepseek_v3_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, V3)
    assert config.latent is not None
    assert (config.latent.q_rank, config.latent.cached_dim) == (1536, 576)
    assert config.mixture == Mixture(
        experts=256,
        chosen=8,
        intermediate_size=2048,
        renormalised=True,
        shared_size=2048,
        shared_gated=False,
        scoring="sigmoid",
        groups=8,
        chosen_groups=4,
        corrected=True,
        exact_router=True,
        scale=2.5,
    )
    assert round(config.parameters / 1e9) == 671


def test_deepseek_v3_2_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, V32)
    assert config.latent is not None
    assert config.latent.index == IndexConfig(heads=64, dim=128, chosen=2048, interleaved=False)
    assert (config.latent.cached_dim, config.latent.beside_dim) == (576, 192)
    # V3's, and in each layer an indexer's of 14 million.
    assert config.parameters - read(tmp_path, V3).parameters == 61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    assert read_shape(tmp_path, "auto").kv_bytes_per_token == 61 * 576 * 2
    read(tmp_path, V32)
    assert read_shape(tmp_path, "auto").kv_bytes_per_token == 61 * 704 * 2


def test_glm_5_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, GLM5)
    assert config.latent == LatentConfig(
        q_rank=2048,
        kv_rank=512,
        nope_dim=192,
        rope_dim=64,
        value_dim=256,
        interleaved=True,
        index=IndexConfig(heads=32, dim=128, chosen=2048, interleaved=True),
    )
    assert config.mixture is not None
    assert (config.mixture.groups, config.mixture.shared_size, config.norm_eps) == (1, 2048, 1e-5)
    assert round(config.parameters / 1e9) == 744  # the model card
    left_out = {key: value for key, value in GLM5.items() if not key.startswith(("index", "q_lora", "v_head", "qk_"))}
    assert read(tmp_path, left_out).latent == config.latent


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ({}, ()),
        ({"indexer_types": ["full", "full", "shared", "full"]}, (2,)),
        ({"index_topk_pattern": "FSSF"}, (1, 2)),
        ({"index_topk_freq": 2}, (2,)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, (1, 2, 3)),
    ],
    ids=str,
)
def test_layers_may_share_what_the_one_before_chose(
    tmp_path: Path, keys: dict[str, Any], shared: tuple[int, ...]
) -> None:
    latent = read(tmp_path, GLM5, num_hidden_layers=4, **keys).latent
    assert latent is not None
    assert latent.index is not None
    assert latent.index.shared == shared
    types = GlmMoeDsaConfig(num_hidden_layers=4, **keys).indexer_types
    assert [kind == "shared" for kind in types] == [number in shared for number in range(4)]


def test_the_simulation_caches_and_computes_latents(tmp_path: Path) -> None:
    read(tmp_path, LITE)
    shape = read_shape(tmp_path, "auto")
    assert (shape.kv_heads, shape.kv_bytes_per_token) == (1, 27 * 576 * 2)
    assert shape.flops_per_pair == 2 * 27 * 16 * (576 + 512)


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (LITE, {"kv_lora_rank": 0}, "kv_lora_rank 0 is not positive"),
        (LITE, {"q_lora_rank": -1}, "q_lora_rank -1 is not positive"),
        (LITE, {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        (LITE, {"norm_topk_prob": True}, "norm_topk_prob true is not supported for DeepseekV2ForCausalLM"),
        (LITE, {"mlp_bias": True}, "mlp_bias true is not supported for DeepseekV2ForCausalLM"),
        (LITE, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
        (LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; supported: softmax"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported: noaux_tc"),
        (V3, {"n_group": 7}, "n_group 7: 256 experts do not divide by it"),
        (V3, {"topk_group": 9}, "topk_group 9: there are 8 groups"),
        (V3, {"num_experts_per_tok": 129}, "num_experts_per_tok 129: there are 128 experts in 4 groups"),
        (V3, {"n_group": 256, "topk_group": 8}, "n_group 256: a group of 256 experts needs two of them"),
        (V32, {"index_topk": 0}, "index_topk 0 is not positive"),
        (V32, {"q_lora_rank": None}, "q_lora_rank null: the indexer's queries are made of the latent of queries"),
        (
            V32,
            {"index_head_dim": 32},
            "index_head_dim 32 is less than qk_rope_head_dim 64, of which its rotated elements are",
        ),
        (
            GLM5,
            {"num_hidden_layers": 2, "indexer_types": ["shared", "full"]},
            "indexer_types ['shared', 'full']: must name 2 layers, of which the first is full",
        ),
        (
            GLM5,
            {"num_hidden_layers": 1, "indexer_types": ["some"]},
            "indexer_types 'some' is not supported; supported: full, shared",
        ),
        (V32, {"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers, num_hidden_layers 61"),
        (V32, {"mlp_layer_types": ["some"]}, "mlp_layer_types 'some' is not supported; supported: dense, sparse"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_key_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    assert_refused(tmp_path, base, changes, complaint)


def test_a_bias_chooses_experts_and_groups_but_is_not_in_their_chances() -> None:
    logits = torch.tensor([[3.0, 0.0, 2.0, 1.0, 1.5, 0.5]])
    scores = logits.sigmoid()[0]
    bias = torch.tensor([0.0, -5.0, 0.0, 0.0, 0.1, 0.0])
    # The best expert is in a group whose other one is bad: the groups are worth -3.5, 1.6 and 1.5.
    routing = Routing(2, False, "sigmoid", groups=3, chosen_groups=1, bias=bias, scale=2.0)
    chances, experts = route(logits, routing)
    assert sorted(experts[0].tolist()) == [2, 3]
    assert torch.allclose(chances[0], 2.0 * scores[experts[0]])
    best, plain = route(logits, routing._replace(chosen_groups=3)), route(logits, Routing(2, False))
    assert (sorted(best[1][0].tolist()), sorted(plain[1][0].tolist())) == ([0, 4], [0, 2])


def test_without_a_bias_a_group_is_as_good_as_its_best_expert() -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 1.9, 0.0, 0.0]])
    _, experts = route(logits, Routing(2, False, groups=3, chosen_groups=1))
    assert sorted(experts[0].tolist()) == [0, 1]
