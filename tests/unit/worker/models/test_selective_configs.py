"""What configs say of Mamba-1 layers: Mamba's and FalconMamba's of the Hub, and Jamba's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.backend import BackendError
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import Mixture, ModelError, SelectiveConfig
from services.worker.models.hf_config import is_native, read_model_config
from services.worker.models.loading import load_weights
from services.worker.models.sharding import MixerShard, shard_of
from services.worker.ops.interface import SelectiveSpace
from services.worker.ops.torch_ops import TorchOps
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import active_parameters, assert_refused, read
from tests.support.models.tiny_models import make_model

MAMBA_130M: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "conv_kernel": 4,
    "d_inner": 1536,
    "d_model": 768,
    "eos_token_id": 0,
    "expand": 2,
    "fused_add_norm": True,
    "hidden_act": "silu",
    "hidden_size": 768,
    "intermediate_size": 1536,
    "layer_norm_epsilon": 1e-5,
    "n_layer": 24,
    "num_hidden_layers": 24,
    "residual_in_fp32": True,
    "rms_norm": True,
    "ssm_cfg": {},
    "state_size": 16,
    "time_step_floor": 0.0001,
    "time_step_init_scheme": "random",
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 48,
    "time_step_scale": 1.0,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 50280,
}
FALCON_MAMBA_7B: dict[str, Any] = {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "conv_kernel": 4,
    "eos_token_id": 11,
    "expand": 16,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-6,
    "num_hidden_layers": 64,
    "state_size": 16,
    "tie_word_embeddings": False,
    "time_step_rank": 256,
    "torch_dtype": "bfloat16",
    "use_falcon_mambapy": False,
    "vocab_size": 65024,
}
JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "calc_logits_for_entire_prompt": False,
    "eos_token_id": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_mamba_kernels": True,
    "vocab_size": 65536,
}


def test_mamba_of_130_million_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, MAMBA_130M)
    assert is_native(tmp_path)
    assert config.states == SelectiveConfig(
        heads=1536,
        state_dim=16,
        kernel=4,
        step_rank=48,
        conv_bias=True,
        bias=False,
        norm_eps=None,
        norm_weights=False,
    )
    assert (config.num_layers, config.num_heads, config.intermediate_size, config.eos_token_ids) == (24, 0, 0, (0,))
    assert config.tied_embeddings, "as the library has it where nothing is said"
    assert round(config.parameters / 1e6) == 128
    assert config.state_elements == 24 * 1536 * (16 + 3)
    auto = read(tmp_path, MAMBA_130M, time_step_rank="auto", hidden_size=100, intermediate_size=None).states
    assert isinstance(auto, SelectiveConfig)
    assert (auto.step_rank, auto.heads) == (7, 200)


def test_falcon_mamba_is_as_large_as_it_says_and_not_as_it_expands(tmp_path: Path) -> None:
    config = read(tmp_path, FALCON_MAMBA_7B)
    assert isinstance(config.states, SelectiveConfig)
    assert (config.states.heads, config.states.norm_eps, config.states.norm_weights) == (8192, 1e-6, False)
    assert round(config.parameters / 1e9, 1) == 7.3
    assert not config.tied_embeddings


def test_jamba_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, JAMBA)
    assert [number for number, layer in enumerate(config.layers) if not layer.has_state] == [4, 12, 20, 28]
    assert [number for number, layer in enumerate(config.layers) if layer.mixes] == list(range(1, 32, 2))
    assert config.mixture == Mixture(experts=16, chosen=2, intermediate_size=14336, renormalised=False)
    assert (config.num_kv_heads, config.head_dim, config.rotated_dim, config.max_positions) == (8, 128, 0, 262144)
    assert (round(config.parameters / 1e9, 1), round(active_parameters(config) / 1e9, 1)) == (51.6, 11.8)
    dense = read(tmp_path, JAMBA, num_experts=1, num_experts_per_tok=1)
    assert (dense.mixture, any(layer.mixes for layer in dense.layers)) == (None, False)


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (MAMBA_130M, {"state_size": 0}, "state_size 0 is not positive"),
        (MAMBA_130M, {"conv_kernel": 1}, "conv_kernel 1 is not supported; supported: 2 and more"),
        (MAMBA_130M, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        (FALCON_MAMBA_7B, {"time_step_rank": -1}, "time_step_rank -1 is not positive"),
        (JAMBA, {"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of 5 KV heads"),
        (JAMBA, {"num_experts_per_tok": 17}, "num_experts_per_tok 17: there are 16 experts"),
        (JAMBA, {"attn_layer_period": 0}, "attn_layer_period 0 is not positive"),
        (
            JAMBA,
            {"attn_layer_period": 1, "attn_layer_offset": 0},
            "attn_layer_period 1: no layer has a mixer with states",
        ),
        (JAMBA, {"sliding_window": 4096}, "sliding_window 4096 is not supported; supported: null"),
        (JAMBA, {"mamba_inner_layernorms": False}, "mamba_inner_layernorms false is not supported; supported: true"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_key_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    assert_refused(tmp_path, base, changes, complaint)


def test_ranks_have_channels_of_their_own(tmp_path: Path) -> None:
    config = read(tmp_path, MAMBA_130M)
    assert shard_of(config, 1, 2).mixer == MixerShard((768, 1536), (768, 1536), 1)
    with pytest.raises(ModelError, match="selective state-space layers: 1536 heads do not divide over 5 tensor-par"):
        shard_of(config, 0, 5)


def test_what_ranks_have_is_the_checkpoint(tmp_path: Path) -> None:
    """The parts of two ranks side by side."""
    model = make_model("mamba", tmp_path, use_bias=True)
    config = read_model_config(tmp_path)
    ops, device = TorchOps(torch.device("cpu"), torch.float32), torch.device("cpu")
    with open_checkpoint(tmp_path, torch.float32) as checkpoint:
        first, second = (
            load_weights(checkpoint, config, shard_of(config, rank, 2), ops, device, 64).layers[1].mixer
            for rank in range(2)
        )
    assert isinstance(first, SelectiveSpace)
    assert isinstance(second, SelectiveSpace)
    mixer = model.reference.backbone.layers[1].mixer
    for one, other, whole in (
        (first.decay, second.decay, -mixer.A_log.exp()),
        (first.skip, second.skip, mixer.D),
        (first.step_bias, second.step_bias, mixer.dt_proj.bias),
        (first.conv_bias, second.conv_bias, mixer.conv1d.bias),
    ):
        assert torch.equal(torch.cat((one, other)), whole)


def test_the_simulation_knows_no_states(tmp_path: Path) -> None:
    read(tmp_path, JAMBA)
    with pytest.raises(BackendError, match=r"no models with selective state-space layers \(JambaForCausalLM\)"):
        read_shape(tmp_path, "auto")
