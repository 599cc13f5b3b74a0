"""What configs say of short convolutions, as LFM2's and LFM3's on the Hub have it and as transformers 5 does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.backend import BackendError
from services.worker.models.config import ConvolutionConfig, Mixture, ModelError
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.hf_config import is_native
from services.worker.models.loading import load_weights
from services.worker.models.rope import PlainRope, ProportionalRope
from services.worker.models.sharding import MixerShard, shard_of
from services.worker.ops.interface import ShortConvolution
from services.worker.ops.torch_ops import TorchOps
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import active_parameters, assert_refused, read

LFM2_1B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
LFM2_8B_A1B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if each in (2, 6, 10, 14, 18, 21) else "conv" for each in range(24)],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
LFM3_2B: dict[str, Any] = {"architectures": ["Lfm3ForCausalLM"], "torch_dtype": "bfloat16"}
"""Whose defaults are the sizes of LFM3-1.7B."""


def _rotated(share: float) -> dict[str, Any]:
    return {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": share}}


def test_lfm2_of_1_billion_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2_1B)
    assert is_native(tmp_path)
    assert [number for number, layer in enumerate(config.layers) if not layer.has_state] == [2, 5, 8, 10, 12, 14]
    assert config.states == ConvolutionConfig(heads=2048, kernel=3, bias=False)
    assert (config.intermediate_size, config.head_dim, config.tied_embeddings) == (8192, 64, True)
    assert config.layers[2].rope == PlainRope(1_000_000.0)
    assert round(config.parameters / 1e9, 2) == 1.17
    assert config.state_elements == 10 * 2 * 2048
    as_said = read(tmp_path, LFM2_1B, block_auto_adjust_ff_dim=False, tie_embedding=False)
    assert (as_said.intermediate_size, as_said.tied_embeddings) == (12288, False)


def test_lfm2_with_experts_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2_8B_A1B)
    assert config.mixture == Mixture(
        experts=32, chosen=4, intermediate_size=1792, renormalised=True, scoring="sigmoid", corrected=True
    )
    assert [layer.mixes for layer in config.layers] == [False] * 2 + [True] * 22
    assert round(config.parameters / 1e9, 1) == 8.3
    assert round(active_parameters(config) / 1e9, 1) == 1.6


def test_lfm3_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, LFM3_2B)
    assert is_native(tmp_path)
    assert config.states == ConvolutionConfig(heads=2048, kernel=7, bias=False)
    assert [number for number, each in enumerate(config.layers) if each.window == 256] == [4, 8, 12, 16, 20]
    assert [number for number, each in enumerate(config.layers) if not each.has_state][:3] == [2, 4, 6]
    assert config.layers[2].rope == ProportionalRope(1_000_000.0, 0.5, 1.0)
    assert config.layers[4].rope == PlainRope(10_000.0)
    assert (config.head_gates, config.post_norms, config.qk_norm, config.tied_embeddings) == (True,) * 4
    plain = read(tmp_path, LFM3_2B, use_attention_gate=False, use_sandwich_norm=False, tie_word_embeddings=False)
    assert (plain.head_gates, plain.post_norms, plain.tied_embeddings) == (False,) * 3
    assert config.parameters - plain.parameters == 11 * 16 * 2048 - 128_000 * 2048


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (LFM2_1B, {"conv_L_cache": 1}, "conv_L_cache 1 is not supported; supported: 2 and more"),
        (LFM2_1B, {"full_attn_idxs": [16]}, "full_attn_idxs 16: there are 16 layers"),
        (LFM2_1B, {"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of 5 KV heads"),
        (LFM2_1B, {"block_multiple_of": 0}, "block_multiple_of 0 is not positive"),
        (LFM2_8B_A1B, {"layer_types": ["conv"]}, "layer_types names 1 layers, num_hidden_layers 24"),
        (LFM2_8B_A1B, {"num_experts_per_tok": 33}, "num_experts_per_tok 33: there are 32 experts"),
        (LFM2_8B_A1B, {"num_experts": 0}, "num_experts 0 is not positive"),
        (LFM3_2B, {"sliding_window": None}, "sliding_window None is not positive: layer_types has sliding_attention"),
        (
            *(LFM3_2B, {"layer_types": ["mamba"] * 24}),
            "layer_types 'mamba' is not supported; supported: conv, sliding_attention, full_attention",
        ),
        (LFM3_2B, {"layer_types": ["conv"]}, "layer_types names 1 layers, num_hidden_layers 24"),
        (
            *(LFM3_2B, {"rope_parameters": {"rope_theta": 1e6}}),
            "rope_parameters has no full_attention: each kind of layers that attend has its own",
        ),
        (LFM3_2B, {"num_key_value_heads": 3}, "num_attention_heads 16 is no multiple of 3 KV heads"),
        (
            *(LFM3_2B, {"layer_types": ["full_attention"] * 24, "rope_parameters": _rotated(2.0)}),
            "partial_rotary_factor 2.0 is not between 0 and 1",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_key_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    assert_refused(tmp_path, base, changes, complaint)


def test_channels_are_split_over_ranks(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2_1B)
    assert shard_of(config, 1, 4).mixer == MixerShard((512, 1024), (512, 1024), 1)
    with pytest.raises(ModelError, match="num_attention_heads 32 does not divide over 3"):
        shard_of(config, 0, 3)


def test_dummy_weights_have_the_shapes_of_a_rank(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    config = read(tmp_path, LFM2_1B, **small, block_ff_dim=48, block_multiple_of=16, conv_bias=True)
    tensors, ops, device = (
        DummyTensors(torch.float32, torch.device("cpu")),
        TorchOps(torch.device("cpu"), torch.float32),
        torch.device("cpu"),
    )
    weights = load_weights(tensors, config, shard_of(config, 1, 2), ops, device, 32)
    mixers = [layer.mixer for layer in weights.layers if layer.mixer is not None]
    assert len(mixers) == 10
    for mixer in mixers:
        assert isinstance(mixer, ShortConvolution)
        assert (tuple(mixer.conv_weight.shape), tuple(mixer.conv_bias.shape)) == ((3, 32), (32,))


@pytest.mark.parametrize("base", [LFM2_1B, LFM3_2B], ids=lambda each: str(each["architectures"][0]))
def test_the_simulation_knows_no_states(tmp_path: Path, base: dict[str, Any]) -> None:
    read(tmp_path, base)
    with pytest.raises(BackendError, match=rf"no models with short convolutions \({base['architectures'][0]}\)"):
        read_shape(tmp_path, "auto")
