"""What configs say of Falcon-H1, whose mixers and attention are side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.models.config import MambaConfig, ModelConfig, ModelError
from services.worker.models.hf_config import is_native, read_model_config
from services.worker.models.sharding import shard_of, stage_of
from services.worker.models.states.multipliers import mixer_scales, mlp_scales

FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.65,
    "eos_token_id": 11,
    "head_dim": 64,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.25,
    "lm_head_multiplier": 0.04,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 16384,
    "mlp_multipliers": [0.88, 0.6],
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rope_theta": 1e11,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.3],
    "ssm_out_multiplier": 0.23,
    "time_step_limit": [0.0, float("inf")],
    "tie_word_embeddings": False,
    "vocab_size": 32784,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**FALCON, **changes}))
    return read_model_config(folder)


def test_a_layer_of_the_checkpoint_is_a_mixer_and_attention_beside_it(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert is_native(tmp_path)
    assert config.states == MambaConfig(
        heads=24, head_dim=64, groups=1, state_dim=128, kernel=4, conv_bias=True, bias=False, normed=False
    )
    first, second = config.layers[6:8]
    assert (first.has_state, first.beside, first.has_mlp, first.blocks) == (True, False, False, (3, 3))
    assert (second.has_state, second.beside, second.has_mlp, second.blocks) == (False, True, True, (3, 3))
    assert (config.num_layers, config.num_blocks, config.layers_of_block(3)) == (72, 36, (6, 7))
    assert config.logits_divisor == 25.0
    mixer, attention = 1024 * (1536 * 3 + 2 * 128 + 24), 1024 * 64 * (8 + 2 + 2 + 8)
    assert config.parameters == 36 * (mixer + attention + 3 * 1024 * 2048) + 2 * 32784 * 1024


def test_stages_keep_together_what_is_side_by_side(tmp_path: Path) -> None:
    config = read(tmp_path, num_hidden_layers=3)
    assert [(each.first_layer, each.end_layer) for each in (stage_of(config, n, 2) for n in range(2))] == [
        (0, 4),
        (4, 6),
    ]
    assert stage_of(config, 1, 2, (1, 2)).first_layer == 2
    with pytest.raises(ModelError, match="3 layers cannot be split as 2,4 over 2 pipeline stages"):
        stage_of(config, 0, 2, (2, 4))


def test_multipliers_are_those_of_a_ranks_outputs(tmp_path: Path) -> None:
    config = read(tmp_path)
    share = shard_of(config, 1, 2)
    found = [mixer_scales(config, share, has_state=True), mixer_scales(config, share, has_state=False)]
    found.append(mlp_scales(config, 1024))
    counts = [(768, 768, 128, 128, 12), (256, 64, 64), (1024, 1024)]
    factors = [[0.4375, 0.3125, 0.2125, 0.625, 0.375], [0.5, 0.125, 0.5], [0.88, 1.0]]
    for scales, count, factor, output in zip(found, counts, factors, (0.23, 0.9375, 0.6), strict=True):
        assert scales is not None
        assert scales[1] == output
        assert torch.equal(
            scales[0], torch.cat([torch.full((n,), each) for n, each in zip(count, factor, strict=True)])
        )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mamba_d_ssm": 1500}, "mamba_n_heads 24 of 64 elements are not mamba_d_ssm 1500"),
        ({"mamba_n_groups": 5}, "mamba_n_groups 5: 24 heads do not divide by it"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"lm_head_multiplier": 0}, "lm_head_multiplier 0 is not supported: all logits would be alike"),
        (
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "mamba_norm_before_gate true is not supported with mamba_rms_norm; supported: false",
        ),
        ({"mamba_n_heads": 0}, "mamba_n_heads 0 is not positive"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_key_and_value(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError) as error:
        read(tmp_path, **changes)
    assert str(error.value) == f"{tmp_path / 'config.json'}: {complaint}"
