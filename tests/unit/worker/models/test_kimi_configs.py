"""Configurations of Kimi-Linear: as it is published, as `transformers` writes it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import KimiLinearConfig

from services.worker.backend import BackendError
from services.worker.models.config import DeltaConfig, LatentConfig, Mixture, ModelError
from services.worker.models.hf_config import has_head, is_native, read_model_config
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import active_parameters, assert_refused, read

ATTENDING = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": ATTENDING,
        "head_dim": 128,
        "kda_layers": [number for number in range(1, 28) if number not in ATTENDING],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""With the keys that the remote code of the published model has."""
LINEAR: dict[str, Any] = KIMI_LINEAR_48B["linear_attn_config"]


def test_kimi_linear_48b_is_read_as_it_is_published(tmp_path: Path) -> None:
    config = read(tmp_path, KIMI_LINEAR_48B)
    assert config.states == DeltaConfig(heads=32, head_dim=128, groups=32, state_dim=128, kernel=4, gate_rank=128)
    assert config.latent == LatentConfig(
        q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, interleaved=False
    )
    assert [number for number, layer in enumerate(config.layers, 1) if not layer.has_state] == ATTENDING
    assert [layer.mixes for layer in config.layers] == [False, *[True] * 26]
    assert config.mixture == Mixture(
        experts=256,
        chosen=8,
        intermediate_size=1024,
        renormalised=True,
        shared_size=1024,
        shared_gated=False,
        scoring="sigmoid",
        corrected=True,
        exact_router=True,
        scale=2.446,
    )
    assert (config.attention_scale, config.rotated_dim) == (192**-0.5, 0)
    assert (config.head_dim, config.num_kv_heads, config.max_positions) == (576, 1, 1 << 20)
    assert (config.eos_token_ids, config.dtype, config.norm_eps) == ((163586,), "bfloat16", 1e-5)
    assert round(config.parameters / 1e9, 1) == 49.1
    assert round(active_parameters(config) / 1e9, 1) == 3.1


def test_what_transformers_writes_of_it_says_the_same(tmp_path: Path) -> None:
    published = read(tmp_path / "published", KIMI_LINEAR_48B)
    written = KimiLinearConfig(**{key: value for key, value in KIMI_LINEAR_48B.items() if key != "rope_scaling"})
    written.save_pretrained(tmp_path)
    assert read_model_config(tmp_path) == published


def test_what_is_left_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    KimiLinearConfig(architectures=["KimiLinearForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path / "written")
    empty = read(tmp_path / "empty", {"architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16"})
    assert empty == read_model_config(tmp_path / "written")


def test_a_limit_without_an_end_is_read_as_python_writes_it(tmp_path: Path) -> None:
    """In any family, though JSON has none."""
    config = read(tmp_path / "endless", KIMI_LINEAR_48B, time_step_limit=[0.0, float("inf")])
    assert config == read(tmp_path / "without", KIMI_LINEAR_48B)


def test_a_kimi_linear_is_computed_here_and_not_by_the_simulation(tmp_path: Path) -> None:
    read(tmp_path, KIMI_LINEAR_48B)
    assert is_native(tmp_path)
    assert has_head(tmp_path)
    with pytest.raises(BackendError, match=r"no models with gated delta nets \(KimiLinearForCausalLM\)"):
        read_shape(tmp_path, "auto")


def test_groups_of_experts_count_where_they_are_used(tmp_path: Path) -> None:
    grouped = {**KIMI_LINEAR_48B, "num_expert_group": 8, "topk_group": 2}
    for used, groups in ((True, (8, 2)), (False, (1, 1))):
        mixture = read(tmp_path, {**grouped, "use_grouped_topk": used}).mixture
        assert mixture is not None
        assert (mixture.groups, mixture.chosen_groups) == groups


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mla_use_nope": False}, "mla_use_nope false is not supported: only attention without positions is"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate true is not supported: only attention without gates is"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 is not supported; num_attention_heads, 32, is"),
        ({"hidden_size": 0}, "hidden_size 0 is not positive"),
        ({"model_max_length": 0}, "model_max_length 0 is not positive"),
        ({"kv_lora_rank": -1}, "kv_lora_rank -1 is not positive"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"linear_attn_config": LINEAR | {"head_dim": 0}}, "linear_attn_config.head_dim 0 is not positive"),
        ({"linear_attn_config": LINEAR | {"num_heads": 0}}, "linear_attn_config.num_heads 0 is not positive"),
        (
            {"linear_attn_config": LINEAR | {"short_conv_kernel_size": 1}},
            "linear_attn_config.short_conv_kernel_size 1 is not supported; supported: 2 and more",
        ),
        ({"linear_attn_config": None, "linear_head_dim": 0}, "linear_head_dim 0 is not positive"),
        (
            {"linear_attn_config": LINEAR | {"full_attn_layers": [4, 28]}},
            "linear_attn_config: layer 28; num_hidden_layers is 27",
        ),
        (
            {"linear_attn_config": LINEAR | {"full_attn_layers": [4, 5]}},
            "linear_attn_config: layer 5 is in kda_layers and full_attn_layers; it must be in one of the two",
        ),
        (
            {"linear_attn_config": LINEAR | {"full_attn_layers": [4]}},
            "linear_attn_config: layer 8 is in neither kda_layers nor full_attn_layers; it must be in one of the two",
        ),
        (
            {"layer_types": ["kda"] * 27},
            "layer_types 'kda' is not supported; supported: linear_attention, full_attention",
        ),
        ({"layer_types": ["linear_attention"]}, "layer_types names 1 layers, num_hidden_layers 27"),
        ({"layer_types": ["full_attention"] * 27}, "layer_types: no layer is linear_attention"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers, num_hidden_layers 27"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
        (
            {"moe_router_activation_func": "softmax"},
            "moe_router_activation_func 'softmax' is not supported; supported: sigmoid",
        ),
        ({"num_experts": 0}, "num_experts 0 is not positive"),
        ({"num_expert_group": 3}, "num_expert_group 3: 256 experts are not so many groups of two and more"),
        ({"topk_group": 2}, "topk_group 2: there are 1 groups"),
        ({"num_experts_per_token": 257}, "num_experts_per_token 257: there are 256 experts in 1 groups"),
        ({"num_shared_experts": -1}, "num_shared_experts -1 is negative"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    assert_refused(tmp_path, KIMI_LINEAR_48B, changes, complaint)


def test_what_is_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: .*linear_attn_config\.head_dim"):
        read(tmp_path, KIMI_LINEAR_48B, linear_attn_config={"head_dim": "128"})
