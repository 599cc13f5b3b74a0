"""What configs say of RecurrentGemma: as the Hub's 2B has it, and as transformers 5 writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.backend import BackendError
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import ModelError, RecurrentConfig
from services.worker.models.hf_config import is_native, read_model_config
from services.worker.models.loading import load_weights
from services.worker.models.sharding import MixerShard, shard_of
from services.worker.ops.interface import RecurrentUnit
from services.worker.ops.torch_ops import TorchOps
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import assert_refused, read
from tests.support.models.tiny_models import make_model

RECURRENT_GEMMA_2B: dict[str, Any] = {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "_block_types": ["recurrent", "recurrent", "attention"] * 8 + ["recurrent"] * 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4,
    "embeddings_scale_by_sqrt_dim": True,
    "eos_token_id": 1,
    "final_w_init_variance_scale": 0.07692307692307693,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 15360,
    "logits_soft_cap": 30.0,
    "lru_width": 2560,
    "model_type": "recurrent_gemma",
    "num_attention_heads": 10,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
    "w_init_variance_scale": 0.01,
}


def test_the_hubs_config_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, RECURRENT_GEMMA_2B)
    assert is_native(tmp_path)
    assert config.states == RecurrentConfig(heads=2560, kernel=4, block=256)
    assert [number for number, each in enumerate(config.layers) if not each.has_state] == [*range(2, 26, 3)]
    assert {each.window for each in config.layers} == {2048}
    assert (config.intermediate_size, config.rotary_dim, config.max_positions) == (7680, 128, 8192)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.scales_inputs) == (False, True, True, True)
    assert config.embedding_scale == torch.tensor(2560**0.5, dtype=torch.bfloat16).item()
    assert 2.6e9 < config.parameters < 2.75e9


@pytest.mark.parametrize("hidden", [3, 17, 48, 2048, 4096, 5000])
def test_the_factor_of_embeddings_is_rounded_as_pytorch_does(tmp_path: Path, hidden: int) -> None:
    changes = {"hidden_size": 2 * hidden, "num_attention_heads": 1, "lru_width": 8, "head_dim": 2 * hidden}
    config = read(tmp_path, RECURRENT_GEMMA_2B, **changes, partial_rotary_factor=1.0)
    assert config.embedding_scale == torch.tensor((2 * hidden) ** 0.5, dtype=torch.bfloat16).item()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"block_types": ["mamba"]}, "block_types 'mamba' is not supported; supported: recurrent, attention"),
        ({"block_types": ["attention"]}, "block_types: no layer is recurrent"),
        ({"block_types": []}, "block_types 0 is not positive"),
        ({"conv1d_width": 1}, "conv1d_width 1 is not supported; supported: 2 and more"),
        ({"head_dim": 128}, "head_dim 128: 10 heads of so many are not hidden_size 2560"),
        ({"lru_width": 2561}, "lru_width 2561 does not divide by num_attention_heads 10"),
        ({"intermediate_size": 7}, "intermediate_size 7 is not even"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap 0.0 is not positive"),
        ({"attention_window_size": 0}, "attention_window_size 0 is not positive"),
        (
            {"hidden_activation": "silu"},
            "hidden_activation 'silu' is not supported; supported: gelu_pytorch_tanh",
        ),
        (
            {"embeddings_scale_by_sqrt_dim": False},
            "embeddings_scale_by_sqrt_dim false is not supported; supported: true",
        ),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor 2.0 is no number from above 0 to 1"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported; supported: default"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_key_and_value(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    assert_refused(tmp_path, RECURRENT_GEMMA_2B, changes, complaint)


def test_ranks_have_whole_blocks_and_these_are_the_checkpoint(tmp_path: Path) -> None:
    """The parts of two ranks side by side."""
    model = make_model("recurrent-gemma", tmp_path)
    config = read_model_config(tmp_path)
    assert shard_of(config, 1, 2).mixer == MixerShard((32, 64), (32, 64), 1)
    with pytest.raises(ModelError, match="num_attention_heads 4 does not divide over 3 tensor-parallel ranks"):
        shard_of(config, 0, 3)
    ops, device = TorchOps(torch.device("cpu"), torch.float32), torch.device("cpu")
    with open_checkpoint(tmp_path, torch.float32) as checkpoint:
        first, second = (
            load_weights(checkpoint, config, shard_of(config, rank, 2), ops, device, 64).layers[1].mixer
            for rank in range(2)
        )
    assert isinstance(first, RecurrentUnit)
    assert isinstance(second, RecurrentUnit)
    block = model.reference.model.layers[1].temporal_block
    for one, other, whole in (
        (first.decay, second.decay, -8 * torch.nn.functional.softplus(block.rg_lru.recurrent_param)),
        (first.conv_bias, second.conv_bias, block.conv_1d.bias),
    ):
        assert torch.equal(torch.cat((one, other)), whole)


def test_the_simulation_knows_no_states(tmp_path: Path) -> None:
    read(tmp_path, RECURRENT_GEMMA_2B)
    with pytest.raises(BackendError, match=r"no models with recurrent units \(RecurrentGemmaForCausalLM\)"):
        read_shape(tmp_path, "auto")
