"""What configs say of Mamba-2 layers, in the spellings of the Hub and of transformers 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.worker.backend import BackendError
from services.worker.models.config import MambaConfig, Mixture, ModelError
from services.worker.models.hf_config import is_native
from services.worker.models.rope import PlainRope
from services.worker.models.sharding import MixerShard, shard_of
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import active_parameters, assert_refused, read

MAMBA2_130M: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 50288,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, float("inf")],
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
BAMBA_9B: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GRANITE_1B: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 100352,
    "hidden_size": 1536,
    "shared_intermediate_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 34,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
    "embedding_multiplier": 12,
    "logits_scaling": 6,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def test_mamba2_of_130_million_is_read_with_its_limit_that_is_no_json(tmp_path: Path) -> None:
    config = read(tmp_path, MAMBA2_130M)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert is_native(tmp_path)
    assert config.states == MambaConfig(
        heads=24, head_dim=64, groups=1, state_dim=128, kernel=4, conv_bias=True, bias=False
    )
    assert (config.num_layers, config.num_heads, config.intermediate_size, config.eos_token_ids) == (24, 0, 0, (0,))
    assert round(config.parameters / 1e6) == 129
    assert config.state_elements == 24 * (24 * 64 * 128 + 3 * (1536 + 256))


@pytest.mark.parametrize("limit", [None, [0.0, None], [0.0, {"__float__": "Infinity"}]], ids=str)
def test_a_limit_without_an_end_has_many_spellings(tmp_path: Path, limit: object) -> None:
    assert read(tmp_path, MAMBA2_130M, time_step_limit=limit).states is not None


def test_bamba_9b_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, BAMBA_9B)
    assert [number for number, layer in enumerate(config.layers) if not layer.has_state] == [9, 18, 27]
    assert (config.num_kv_heads, config.head_dim, config.rotated_dim, config.max_positions) == (8, 128, 64, 262144)
    assert config.layers[9].rope == PlainRope(10_000.0)
    assert round(config.parameters / 1e9, 1) == 9.8
    newer = read(tmp_path, BAMBA_9B, rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.5})
    assert newer.layers[9].rope == PlainRope(500_000.0)


def test_granite_4_without_experts_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE_1B)
    assert [layer.has_state for layer in config.layers] == [True] * 5 + [False] + [True] * 34
    assert (config.rotated_dim, config.head_dim, config.attention_scale) == (0, 128, 0.0078125)
    assert (config.embedding_scale, config.residual_scale, config.logits_divisor) == (12, 0.22, 6)
    assert read(tmp_path, GRANITE_1B, position_embedding_type="rope").rotated_dim == 128


def test_granite_4_with_experts_is_read(tmp_path: Path) -> None:
    tiny = {"num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512, "num_attention_heads": 12}
    config = read(tmp_path, GRANITE_1B, **tiny, shared_intermediate_size=1024)
    assert config.mixture == Mixture(
        experts=64, chosen=6, intermediate_size=512, renormalised=True, shared_size=1024, shared_gated=False
    )
    assert all(layer.mixes for layer in config.layers)
    assert round(config.parameters / 1e9, 1) == 7.0
    assert round(active_parameters(config) / 1e9, 1) == 1.5


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (MAMBA2_130M, {"num_heads": 0}, "num_heads 0 is not positive"),
        (MAMBA2_130M, {"num_heads": 23}, "23 heads of 64 are not 2 * hidden_size 768"),
        (MAMBA2_130M, {"n_groups": 5}, "n_groups 5: 24 heads do not divide by it"),
        (MAMBA2_130M, {"conv_kernel": 1}, "conv_kernel 1 is not supported; supported: 2 and more"),
        (MAMBA2_130M, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        (
            MAMBA2_130M,
            {"time_step_limit": [0.001, 0.1]},
            "time_step_limit [0.001, 0.1] is not supported; supported: from 0 without an end",
        ),
        (MAMBA2_130M, {"torch_dtype": "int8"}, "dtype 'int8' is not supported; supported: float32, bfloat16, float16"),
        (BAMBA_9B, {"attn_layer_indices": [32]}, "attn_layer_indices 32: there are 32 layers"),
        (BAMBA_9B, {"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of 5 KV heads"),
        (BAMBA_9B, {"mamba_d_state": 0}, "mamba_d_state 0 is not positive"),
        (GRANITE_1B, {"num_local_experts": -1}, "num_local_experts -1 is not positive"),
        (
            GRANITE_1B,
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5: there are 4 experts",
        ),
        (GRANITE_1B, {"layer_types": ["mamba"]}, "layer_types names 1 layers, num_hidden_layers 40"),
        (GRANITE_1B, {"layer_types": []}, "layer_types names 0 layers, num_hidden_layers 40"),
        (
            GRANITE_1B,
            {"layer_types": None, "layers_block_type": ["mamba"]},
            "layers_block_type names 1 layers, num_hidden_layers 40",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_key_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    assert_refused(tmp_path, base, changes, complaint)


def test_heads_of_a_rank_are_whole_groups_or_of_the_only_one(tmp_path: Path) -> None:
    """Of several groups each rank has some; a single one is everywhere, and its norm goes over the ranks."""
    one = read(tmp_path, MAMBA2_130M)
    shares = [shard_of(one, rank, 2).mixer for rank in range(2)]
    assert shares == [MixerShard((0, 12), (0, 1), 2), MixerShard((12, 24), (0, 1), 2)]
    four = read(tmp_path, MAMBA2_130M, n_groups=4)
    assert shard_of(four, 1, 2).mixer == MixerShard((12, 24), (2, 4), 1)
    with pytest.raises(ModelError, match="state-space layers: 4 groups of heads do not divide over 3 tensor-parallel"):
        shard_of(four, 0, 3)
    with pytest.raises(ModelError, match="state-space layers: 24 heads do not divide over 5 tensor-parallel ranks"):
        shard_of(one, 0, 5)


def test_the_simulation_knows_no_states(tmp_path: Path) -> None:
    read(tmp_path, BAMBA_9B)
    with pytest.raises(BackendError, match=r"no models with state-space layers \(BambaForCausalLM\)"):
        read_shape(tmp_path, "auto")
