"""What configs say of MiniMax-Text-01 and M1, whose layers have lightning attention or attend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.models.config import LightningConfig, Mixture, ModelConfig, ModelError, ResidualScales
from services.worker.models.hf_config import is_native, read_model_config
from services.worker.models.rope import PlainRope
from services.worker.models.sharding import MixerShard, shard_of
from services.worker.models.states.lightning_loading import own_outputs
from tests.support.models.config_files import active_parameters

ALPHA = 3.5565588200778455
TEXT_01: dict[str, Any] = {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "layernorm_full_attention_alpha": ALPHA,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": ALPHA,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": ALPHA,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000,
    "model_type": "minimax_text_01",
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "postnorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 200064,
}
LIBRARYS: dict[str, Any] = {"architectures": ["MiniMaxForCausalLM"], "num_hidden_layers": 4}


def read(folder: Path, raw: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    return read_model_config(folder)


@pytest.mark.parametrize("architecture", ["MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxForCausalLM"])
def test_text_01_is_read_as_it_is_published(tmp_path: Path, architecture: str) -> None:
    config = read(tmp_path, TEXT_01, architectures=[architecture])
    assert is_native(tmp_path)
    assert config.states == LightningConfig(heads=64, head_dim=128, norm_eps=1e-6)
    assert config.mixture == Mixture(experts=32, chosen=2, intermediate_size=9216, renormalised=True)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (64, 8, 128, 64)
    assert [number for number, layer in enumerate(config.layers) if not layer.has_state] == list(range(7, 80, 8))
    scales = (ResidualScales(ALPHA, 1.0),) * 2
    assert all(layer.mixes and layer.residual == scales for layer in config.layers)
    assert (config.layers[7].rope, config.residual_normed) == (PlainRope(10_000_000.0), True)
    assert config.parameters == pytest.approx(456e9, rel=0.005)
    assert active_parameters(config) == pytest.approx(45.9e9, rel=0.05)
    assert config.state_elements == 70 * 64 * 128 * 128


def test_the_librarys_keys_come_before_those_of_the_hub(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        LIBRARYS,
        full_attn_alpha_factor=2,
        layernorm_full_attention_alpha=7.0,
        linear_attn_beta_factor=0.5,
        mlp_alpha_factor=3.0,
        layernorm_mlp_beta=0.25,
    )
    mlp = ResidualScales(3.0, 0.25)
    assert [layer.has_state for layer in config.layers] == [False, True, False, True]
    assert config.layers[0].residual == (ResidualScales(2.0, 1.0), mlp)
    assert config.layers[1].residual == (ResidualScales(1.0, 0.5), mlp)
    assert (config.rotary_dim, config.layers[0].rope, config.norm_eps) == (None, PlainRope(1_000_000.0), 1e-5)
    assert config.eos_token_ids == (2,)


def test_who_does_not_say_has_normed_residuals_by_the_library_and_others_by_the_hub(tmp_path: Path) -> None:
    silent = {key: value for key, value in TEXT_01.items() if key != "postnorm"}
    assert not read(tmp_path, silent).residual_normed
    assert read(tmp_path, LIBRARYS).residual_normed


def test_a_rank_has_the_values_keys_and_queries_of_its_heads() -> None:
    """Four heads of two elements, each with query, key, value in the checkpoint; the second rank of two."""
    sizes = LightningConfig(heads=4, head_dim=2, norm_eps=1e-6)
    own = own_outputs(sizes, MixerShard((2, 4), (2, 4), 1))
    assert own.tolist() == [16, 17, 22, 23, 14, 15, 20, 21, 12, 13, 18, 19]
    assert torch.equal(own_outputs(sizes, MixerShard((0, 4), (0, 4), 1)).sort().values, torch.arange(24))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"attn_type_list": [0, 1]}, "attn_type_list names 2 layers, num_hidden_layers 80"),
        ({"attn_type_list": [2] * 80}, "attn_type_list 2 is not supported; supported: 0, 1"),
        ({"attn_type_list": None}, "attn_type_list is missing: it says which layers have lightning attention"),
        ({"attn_type_list": [1] * 80}, "no layer has lightning attention"),
        ({"layer_types": ["mamba"] * 80}, "layer_types 'mamba' is not supported; supported: linear_attention, full_"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers 80"),
        ({"shared_intermediate_size": 512}, "shared_intermediate_size 512 is not supported; supported: 0"),
        ({"rotary_dim": 63}, "rotary_dim 63 is no even number up to head_dim 128"),
        ({"rotary_dim": 256}, "rotary_dim 256 is no even number up to head_dim 128"),
        ({"num_key_value_heads": 7}, "num_attention_heads 64 is no multiple of 7 KV heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 is not positive"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok 33: there are 32 experts"),
        ({"num_local_experts": 0}, "num_local_experts 0 is not positive"),
        ({"head_dim": 0}, "head_dim 0 is not positive"),
        ({"sliding_window": 0}, "sliding_window 0 is not positive"),
        ({"postnorm": "yes"}, "postnorm"),
        ({"layernorm_mlp_alpha": "1"}, "layernorm_mlp_alpha"),
    ],
)
def test_what_makes_no_model_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError) as error:
        read(tmp_path, TEXT_01, **changes)
    assert complaint in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


def test_heads_that_do_not_divide_over_ranks_are_refused(tmp_path: Path) -> None:
    config = read(tmp_path, TEXT_01 | {"num_attention_heads": 48})
    with pytest.raises(ModelError, match="num_attention_heads 48 does not divide over 32 tensor-parallel ranks"):
        shard_of(config, 0, 32)
