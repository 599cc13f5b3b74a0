"""What configs say of Zamba2, whose layers share blocks of attention and an MLP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from services.worker.models.config import MambaConfig, ModelConfig, ModelError, SharedBlocks
from services.worker.models.hf_config import is_native, read_model_config
from services.worker.models.sharding import stage_of
from tests.support.models.tiny_models import make_config

ZAMBA: dict[str, Any] = {
    "adapter_rank": 128,
    "architectures": ["Zamba2ForCausalLM"],
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layers_block_type": ["mamba" if number not in (6, 12, 18) else "hybrid" for number in range(20)],
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "max_position_embeddings": 4096,
    "n_mamba_heads": 80,
    "num_attention_heads": 32,
    "num_hidden_layers": 20,
    "num_key_value_heads": 32,
    "num_mem_blocks": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "time_step_limit": None,
    "use_mem_rope": False,
    "vocab_size": 32000,
}
"""As the 2.7B is published, with fewer layers."""


def read(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**ZAMBA, **changes}))
    return read_model_config(folder)


def test_a_layer_with_a_block_is_that_and_the_mixer_behind_it(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert is_native(tmp_path)
    assert config.states == MambaConfig(
        heads=80, head_dim=64, groups=1, state_dim=64, kernel=4, conv_bias=True, bias=False
    )
    assert config.shared == SharedBlocks(blocks=2, adapter_rank=128, adapts_attention=False)
    assert (config.num_layers, config.num_blocks, config.head_dim, config.attention_inputs) == (23, 20, 160, 5120)
    assert (config.attention_scale, config.rotary_dim) == (80**-0.5, 0)
    block, mixer = config.layers[6:8]
    assert (block.depth, block.part, block.has_state, block.blocks) == (0, "shared_transformer", False, (6, 6))
    assert (mixer.depth, mixer.part, mixer.has_state, mixer.blocks) == (None, "mamba_decoder", True, (6, 6))
    assert [layer.depth for layer in config.layers if layer.depth is not None] == [0, 1, 2]
    assert config.layers_of_block(12) == (13, 14)


def test_stages_have_a_block_and_its_mixer_together(tmp_path: Path) -> None:
    config = read(tmp_path)
    stages = [stage_of(config, index, 3, (7, 6, 7)) for index in range(3)]
    assert [(stage.first_layer, stage.end_layer) for stage in stages] == [(0, 8), (8, 15), (15, 23)]
    with pytest.raises(ModelError, match=r"20 layers cannot be split as 7,7 over 2 pipeline stages"):
        stage_of(config, 0, 2, (7, 7))


@pytest.mark.parametrize("changes", [{}, {"num_mem_blocks": 1}, {"use_shared_attention_adapter": False}], ids=str)
def test_weights_that_are_shared_count_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_config(make_config("zamba2", **changes))
    model.config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Zamba2ForCausalLM"]})
    )
    config = read_model_config(tmp_path)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    assert config.parameters == matrices


def test_without_names_of_layers_they_are_those_of_the_2_7b(tmp_path: Path) -> None:
    config = read(tmp_path, layers_block_type=None, num_hidden_layers=54)
    found = [layer.blocks[0] for layer in config.layers if layer.depth is not None and layer.blocks is not None]
    hybrid = [number for number, kind in enumerate(_library_kinds()) if kind == "hybrid"]
    assert found == hybrid


def _library_kinds() -> list[str]:
    kinds: list[str] = make_config("zamba2", num_hidden_layers=54, layers_block_type=None).layers_block_type
    return kinds


def test_positions_are_rotated_where_it_says_so(tmp_path: Path) -> None:
    config = read(tmp_path, use_mem_rope=True, rope_theta=500_000)
    assert config.rotary_dim is None
    assert config.layers[6].rope.theta == 500_000


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: gelu"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06 is not supported; supported: 1e-05"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings false is not supported; supported: true"),
        ({"add_bias_linear": True}, "add_bias_linear true is not supported"),
        ({"use_long_context": True}, "use_long_context true is not supported; supported: false"),
        ({"num_mem_blocks": 0}, "num_mem_blocks 0 is not positive"),
        ({"adapter_rank": -1}, "adapter_rank -1 is not positive"),
        ({"n_mamba_heads": 0}, "n_mamba_heads 0 is not positive"),
        ({"n_mamba_heads": 7}, "n_mamba_heads 7: 5120 elements do not divide by it"),
        ({"mamba_ngroups": 3}, "mamba_ngroups 3: 80 heads do not divide by it"),
        ({"mamba_d_conv": 1}, "mamba_d_conv 1 is not supported; supported: 2 and more"),
        ({"intermediate_size": 0}, "intermediate_size 0 is not positive"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 is not positive"),
        ({"layers_block_type": []}, "layers_block_type names 0 layers, num_hidden_layers 20"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of 5 KV heads"),
        ({"num_attention_heads": 33}, "num_attention_heads 33 is no multiple of 32 KV heads"),
        ({"attention_head_dim": 161}, "attention_head_dim 161 is not even"),
        ({"head_dim": 0}, "attention_head_dim 0 is not positive"),
        ({"attention_hidden_size": 2560}, "attention_hidden_size 2560 is not twice hidden_size 2560"),
        ({"mamba_headdim": 32}, "mamba_headdim 32: 80 heads of so many are not 5120"),
        (
            {"num_key_value_heads": 16, "use_shared_attention_adapter": True},
            "use_shared_attention_adapter: 32 heads, and 16 KV heads, of 160 elements are not twice hidden_size 2560",
        ),
        ({"layers_block_type": ["mamba"] * 20}, "layers_block_type: no layer is hybrid"),
        ({"layers_block_type": ["hybrid"] * 3}, "layers_block_type names 3 layers, num_hidden_layers 20"),
        ({"layers_block_type": ["moe"] * 20}, "layers_block_type 'moe' is not supported; supported: mamba"),
        ({"layers_block_type": None}, "layers_block_type is missing, which says what each of 20 layers is"),
        ({"hidden_size": "2560"}, ".hidden_size"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=re.escape(complaint)) as error:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(error.value)
