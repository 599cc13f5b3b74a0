"""Configurations of models with gated delta nets: the published ones, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.backend import BackendError
from services.worker.models.config import DeltaConfig, ModelError
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.hf_config import has_head, is_native
from services.worker.models.loading import load_weights
from services.worker.models.rope import PlainRope
from services.worker.models.sharding import shard_of
from services.worker.models.states.limits import check_states
from services.worker.ops.interface import DeltaNet
from services.worker.ops.torch_ops import TorchOps
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import active_parameters, assert_refused, read

QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN35_DENSE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "vocab_size": 248320,
}
QWEN35_MOE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "norm_topk_prob": False,
    "vocab_size": 248320,
}

OLMO_HYBRID_7B: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "num_key_value_heads": 30,
    "max_position_embeddings": 65536,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "vocab_size": 100352,
}


def test_olmo_hybrid_7b_is_read_with_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path, OLMO_HYBRID_7B)
    assert config.states == DeltaConfig(
        heads=30, head_dim=192, groups=30, state_dim=96, kernel=4, most_written=2, norm_eps=1e-5
    )
    assert [number for number, layer in enumerate(config.layers) if layer.norms_outputs] == list(range(3, 32, 4))
    assert [layer.norms_outputs for layer in config.layers] == [not layer.has_state for layer in config.layers]
    assert (config.head_dim, config.rotated_dim, config.norms_all_heads) == (128, 0, True)
    assert round(config.parameters / 1e9, 1) == 7.4
    rotated = read(tmp_path, OLMO_HYBRID_7B, rope_parameters=None)
    assert (rotated.rotated_dim, rotated.layers[3].rope) == (128, PlainRope(10_000.0))
    assert read(tmp_path, OLMO_HYBRID_7B, rope_parameters=None, rope_theta=None).rotated_dim == 0


def test_qwen3_next_80b_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_NEXT_80B)
    assert is_native(tmp_path)
    assert has_head(tmp_path)
    assert config.states == DeltaConfig(heads=32, head_dim=128, groups=16, state_dim=128, kernel=4)
    assert [number for number, layer in enumerate(config.layers) if not layer.has_state] == list(range(3, 48, 4))
    assert all(layer.mixes for layer in config.layers)
    assert config.mixture is not None
    assert (config.mixture.experts, config.mixture.chosen, config.mixture.shared_size) == (512, 10, 512)
    assert config.mixture.renormalised
    assert (config.head_dim, config.rotated_dim, config.layers[3].rope) == (256, 64, PlainRope(10_000_000.0))
    assert (config.norm_offset, config.gated_attention, config.max_positions) == (True, True, 262144)
    assert round(config.parameters / 1e9, 1) == 79.7
    assert round(active_parameters(config) / 1e9, 1) == 3.6
    assert config.state_elements == 36 * (32 * 128 * 128 + 3 * 8192)


def test_qwen3_5_is_read_with_the_defaults_of_transformers(tmp_path: Path) -> None:
    dense = read(tmp_path, QWEN35_DENSE)
    assert dense.mixture is None
    assert (dense.rotated_dim, dense.layers[3].rope, dense.dtype) == (64, PlainRope(10_000_000.0), "bfloat16")
    assert sum(layer.has_state for layer in dense.layers) == 24
    mixture = read(tmp_path, QWEN35_MOE).mixture
    assert mixture is not None
    assert (mixture.experts, mixture.chosen, mixture.intermediate_size, mixture.shared_size) == (256, 8, 512, 512)
    assert mixture.renormalised, "its router always does, whatever the configuration says"


def test_the_rotation_is_that_of_the_older_name_where_both_are_there(tmp_path: Path) -> None:
    """As `transformers` has it, the share of a head included."""
    older = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config = read(tmp_path, QWEN35_DENSE, rope_scaling=older)
    assert (config.rotated_dim, config.layers[3].rope) == (128, PlainRope(1e6))


def test_with_a_tower_frequencies_have_axes_as_far_as_heads_are_rotated(tmp_path: Path) -> None:
    """Of 32 frequencies 11 go by frames, 11 by rows and 10 by columns, in turns; the other 96 pairs stay."""
    sees = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": QWEN35_DENSE}
    axes = read(tmp_path, sees).rope_axes
    assert (axes[:6], axes[32:], read(tmp_path, QWEN35_DENSE).rope_axes) == (2 * (0, 1, 2), 96 * (0,), ())
    assert [axes[:32].count(axis) for axis in range(3)] == [11, 11, 10]


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (QWEN3_NEXT_80B, {"linear_num_key_heads": 0}, "linear_num_key_heads 0 is not positive"),
        (QWEN3_NEXT_80B, {"linear_num_value_heads": 24}, "linear_num_value_heads 24 is no multiple of 16 key heads"),
        (
            QWEN3_NEXT_80B,
            {"linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim 1 is not supported; supported: 2 and more",
        ),
        (QWEN3_NEXT_80B, {"num_key_value_heads": 3}, "num_attention_heads 16 is no multiple of 3 KV heads"),
        (QWEN3_NEXT_80B, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        (QWEN3_NEXT_80B, {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 is no number from 0 to 1"),
        (QWEN3_NEXT_80B, {"head_dim": 20}, "head_dim 20: 5 of its elements are no pairs"),
        (QWEN3_NEXT_80B, {"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers 48"),
        (
            QWEN3_NEXT_80B,
            {"layer_types": ["mamba"]},
            "layer_types 'mamba' is not supported; supported: linear_attention, full_attention",
        ),
        (
            QWEN3_NEXT_80B,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is set: a checkpoint that is read here may not be quantized",
        ),
        (OLMO_HYBRID_7B, {"linear_num_key_heads": 7}, "linear_num_value_heads 30 is no multiple of 7 key heads"),
        (OLMO_HYBRID_7B, {"num_key_value_heads": 4}, "num_attention_heads 30 is no multiple of 4 KV heads"),
        (OLMO_HYBRID_7B, {"hidden_size": 3841}, "hidden_size 3841 is no multiple of 30 heads"),
        (OLMO_HYBRID_7B, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        (OLMO_HYBRID_7B, {"linear_value_head_dim": 0}, "linear_value_head_dim 0 is not positive"),
        (OLMO_HYBRID_7B, {"layer_types": ["linear_attention"]}, "layer_types names 1 layers, num_hidden_layers 32"),
        (QWEN35_DENSE, {"intermediate_size": 0}, "intermediate_size 0 is not positive"),
        (
            {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {**QWEN35_DENSE, "head_dim": 128}},
            {},
            "mrope_section has 32 frequencies, 32 rotated elements half as many",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_key_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    assert_refused(tmp_path, base, changes, complaint)


def test_the_simulation_knows_none(tmp_path: Path) -> None:
    read(tmp_path, QWEN3_NEXT_80B)
    with pytest.raises(BackendError, match=r"no models with gated delta nets \(Qwen3NextForCausalLM\)"):
        read_shape(tmp_path, "auto")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"drafts": "ngram", "device": "cuda"},
            "speculative ngram: a model with gated delta nets (Qwen3_5ForCausalLM) takes no drafts on cuda",
        ),
        (
            {"drafts": "ngram", "stages": 2},
            "speculative ngram: a model with gated delta nets (Qwen3_5ForCausalLM) takes no drafts in several stages",
        ),
        (
            {"connector": True},
            "kv_connector: a model with gated delta nets (Qwen3_5ForCausalLM) has states, which no connector is told "
            "of",
        ),
        (
            {"grouped": True},
            "hybrid_kv_cache on: a model with gated delta nets (Qwen3_5ForCausalLM) has one block table, of the layers "
            "that attend",
        ),
    ],
    ids=["drafts", "stages", "connector", "groups"],
)
def test_what_does_not_combine_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], complaint: str) -> None:
    config = read(tmp_path, QWEN35_DENSE)
    with pytest.raises(ModelError) as error:
        check_states(
            config, **{"device": "cpu", "stages": 1, "drafts": None, "connector": False, "grouped": False, **settings}
        )
    assert str(error.value) == complaint


def test_dummy_weights_have_the_norm_behind_heads_as_it_is(tmp_path: Path) -> None:
    """Of all norms it alone is not stored as its difference from 1: zeros would silence the layer."""
    small = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 32, "head_dim": 16}
    config, device = read(tmp_path, QWEN35_DENSE, **small), torch.device("cpu")
    tensors = DummyTensors(torch.float32, device, norm_offset=config.norm_offset)
    weights = load_weights(tensors, config, shard_of(config, 0, 1), TorchOps(device, torch.float32), device, 64)
    for layer in weights.layers:
        assert layer.input_norm.eq(1.0).all()
        if isinstance(layer.mixer, DeltaNet):
            assert layer.mixer.norm.eq(1.0).all()
    assert sum(layer.mixer is not None for layer in weights.layers) == 3
