"""Configurations of Ling 3: as it is published, as `transformers` writes it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BailingHybridConfig

from services.worker.backend import BackendError
from services.worker.models.config import DeltaConfig, ExpertLimits, LatentConfig, Mixture
from services.worker.models.hf_config import has_head, is_native, read_model_config
from services.worker.models.published.names import ling_3_name
from services.worker.models.rope import YarnRope
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import assert_refused, read

LING_3_TINY: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "dtype": "bfloat16",
    "eos_token_id": 156895,
    "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "kda_lower_bound": -5.0,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 4,
    "max_position_embeddings": 131072,
    "model_type": "bailing_hybrid",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "q_lora_rank": 256,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": None,
    "rope_theta": 6000000.0,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "v_head_dim": 128,
    "vocab_size": 157184,
}
"""With the keys that the published code reads, and the sizes of Ling-3.0-tiny."""
_OF_THE_LIBRARY = {"architectures": ["BailingHybridForCausalLM"]}


def test_ling_3_is_read_as_it_is_published(tmp_path: Path) -> None:
    config = read(tmp_path, LING_3_TINY)
    assert config.states == DeltaConfig(
        heads=16, head_dim=128, groups=16, state_dim=128, kernel=4, element_rates=True, lower_bound=-5.0
    )
    assert config.latent == LatentConfig(
        q_rank=256, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, interleaved=True, gates="heads"
    )
    assert [number for number, layer in enumerate(config.layers, 1) if not layer.has_state] == [4, 8, 12, 16, 20, 24]
    assert [layer.mixes for layer in config.layers] == [False, *[True] * 23]
    assert config.mixture == Mixture(
        experts=128,
        chosen=8,
        intermediate_size=512,
        renormalised=True,
        shared_size=512,
        shared_gated=False,
        scoring="sigmoid",
        groups=8,
        chosen_groups=4,
        corrected=True,
        exact_router=True,
        scale=2.5,
    )
    assert (config.attention_scale, config.rotated_dim) == (192**-0.5, 64)
    assert (config.head_dim, config.num_kv_heads, config.max_positions) == (576, 1, 131072)
    assert (config.eos_token_ids, config.dtype, config.norm_eps) == ((156895,), "bfloat16", 1e-6)
    assert round(config.parameters / 1e9, 1) == 7.9


def test_how_much_of_a_head_is_rotated_is_said_by_its_size(tmp_path: Path) -> None:
    """As published files that `transformers` 5 wrote say it besides, of what they call a head."""
    rotation = {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"}
    unlimited = {"expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": [0.0] * 24}
    written = read(tmp_path / "written", LING_3_TINY, rope_parameters=rotation, partial_rotary_factor=0.5, **unlimited)
    assert written == read(tmp_path / "published", LING_3_TINY)


def test_experts_are_limited_where_their_lists_say_so(tmp_path: Path) -> None:
    """A layer without experts has no limits, whatever they say, nor have those behind their end."""
    lists = {"expert_swiglu_limit_list": [4, 0, None, 4], "share_expert_swiglu_limit_list": [5] * 2}
    found = [layer.limits for layer in read(tmp_path, LING_3_TINY, **lists).layers]
    assert found[:4] == [ExpertLimits(), ExpertLimits(shared=5), ExpertLimits(), ExpertLimits(routed=4)]
    assert set(found[4:]) == {ExpertLimits()}


def test_what_transformers_writes_of_it_says_the_same(tmp_path: Path) -> None:
    """With other names of keys, and types of layers."""
    published = read(tmp_path / "published", LING_3_TINY | _OF_THE_LIBRARY)
    kept = {key: value for key, value in LING_3_TINY.items() if key not in ("rope_scaling", "rope_interleave")}
    BailingHybridConfig(**kept | _OF_THE_LIBRARY).save_pretrained(tmp_path)
    assert read_model_config(tmp_path) == published


def test_what_is_left_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    own = {**_OF_THE_LIBRARY, "dtype": "bfloat16"}
    BailingHybridConfig(**own).save_pretrained(tmp_path / "written")
    assert read(tmp_path / "empty", own) == read_model_config(tmp_path / "written")


def test_rates_may_have_no_bound(tmp_path: Path) -> None:
    states = read(tmp_path, LING_3_TINY, kda_safe_gate=False).states
    assert isinstance(states, DeltaConfig)
    assert (states.by_element, states.lower_bound) == (True, None)


def test_yarn_scales_scores_as_in_deepseek_v3(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "mscale_all_dim": 1.0}
    config = read(tmp_path, LING_3_TINY, rope_scaling=yarn)
    assert isinstance(config.layers[0].rope, YarnRope)
    assert config.attention_scale > 192**-0.5


def test_a_ling_3_is_computed_here_and_not_by_the_simulation(tmp_path: Path) -> None:
    read(tmp_path, LING_3_TINY)
    assert is_native(tmp_path)
    assert has_head(tmp_path)
    with pytest.raises(BackendError, match=r"no models with gated delta nets \(BailingMoeV3ForCausalLM\)"):
        read_shape(tmp_path, "auto")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"architectures": ["BailingMoeV2_5ForCausalLM"]},
            "architectures 'BailingMoeV2_5ForCausalLM' is not supported: lightning attention of rotated queries and "
            "keys; of model_type bailing_hybrid BailingMoeV3ForCausalLM and BailingHybridForCausalLM are",
        ),
        ({"attention_bias": True}, "attention_bias true is not supported; supported: false"),
        ({"use_bias": True}, "use_bias true is not supported; supported: false"),
        ({"use_qkv_bias": True}, "use_qkv_bias true is not supported; supported: false"),
        ({"rope_interleave": False}, "rope_interleave false is not supported; supported: true"),
        ({"no_kda_lora": False}, "no_kda_lora false is not supported; supported: true"),
        (
            {"gated_attention_proj_granularity_type": "element_wise"},
            'gated_attention_proj_granularity_type "element_wise" is not supported; supported: "head_wise"',
        ),
        (
            {"gated_attention_proj_granularity_type": None},
            'gated_attention_proj_granularity_type null is not supported; supported: "head_wise"',
        ),
        ({"score_function": "softmax"}, 'score_function "softmax" is not supported; supported: "sigmoid"'),
        (
            {"moe_router_enable_expert_bias": False},
            "moe_router_enable_expert_bias false is not supported; supported: true",
        ),
        ({"use_mla_nope": True}, "use_mla_nope true is not supported; supported: false"),
        (
            {"expert_swiglu_limit_list": [0, -4]},
            "expert_swiglu_limit_list -4.0 is not supported; supported: null, 0 and positive numbers",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 is not supported; num_attention_heads, 16, is"),
        ({"hidden_size": 0}, "hidden_size 0 is not positive"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0 is not positive"),
        ({"q_lora_rank": -1}, "q_lora_rank -1 is not positive"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"head_dim": 0}, "head_dim 0 is not positive"),
        ({"linear_head_dim": 0}, "linear_head_dim 0 is not positive"),
        ({"short_conv_kernel_size": 1}, "short_conv_kernel_size 1 is not supported; supported: 2 and more"),
        ({"kda_lower_bound": 0.0}, "kda_lower_bound 0.0 is not negative, as kda_safe_gate true needs it"),
        ({"kda_lower_bound": None}, "kda_lower_bound None is not negative, as kda_safe_gate true needs it"),
        (
            {"num_hidden_layers": 23},
            "num_hidden_layers 23 is no multiple of layer_group_size 4: name layer_types",
        ),
        (
            {"layer_types": ["kda"] * 24},
            "layer_types 'kda' is not supported; supported: linear_attention, full_attention",
        ),
        ({"layer_types": ["full_attention"] * 24}, "layer_types: no layer is linear_attention"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers, num_hidden_layers 24"),
        ({"num_experts": 0}, "num_experts 0 is not positive"),
        ({"n_group": 3}, "num_expert_group 3: 128 experts are not so many groups of two and more"),
        ({"topk_group": 9}, "topk_group 9: there are 8 groups"),
        ({"num_experts_per_tok": 65}, "num_experts_per_token 65: there are 64 experts in 4 groups"),
        ({"num_shared_experts": -1}, "num_shared_experts -1 is negative"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    assert_refused(tmp_path, LING_3_TINY, changes, complaint)


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        ("model.word_embeddings.weight", "model.embed_tokens.weight"),
        ("model.layers.0.attention.f_proj.weight", "model.layers.0.self_attn.f_proj.weight"),
        ("model.layers.0.attention.o_proj.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("model.layers.3.attention.dense.weight", "model.layers.3.self_attn.o_proj.weight"),
        ("model.layers.0.self_attn.forget_gate.A_log", "model.layers.0.self_attn.A_log"),
        ("model.layers.3.mlp.gate.expert_bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
    ],
)
def test_tensors_are_found_by_each_of_their_names(stored: str, here: str) -> None:
    assert ling_3_name(stored) == ling_3_name(here) == here
