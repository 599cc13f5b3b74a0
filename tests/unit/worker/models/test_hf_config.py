"""Hugging Face configs: what is read, in which spellings, and what is refused in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_config import is_native, read_model_config
from services.worker.models.rope import LinearRope, Llama3Rope, PlainRope, YarnRope
from services.worker.models.sharding import shard_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA3 = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "sliding_window_pattern": 2,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}


def read(tmp_path: Path, base: dict[str, Any] = LLAMA, **changes: Any) -> ModelConfig:
    config = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model_config(tmp_path)


def test_a_config_of_transformers_4_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, rope_theta=500_000.0)
    assert (config.head_dim, config.attention_scale, config.dtype) == (16, 0.25, "bfloat16")
    assert (config.num_layers, config.max_positions, config.eos_token_ids) == (4, 256, (2,))
    assert {layer.rope for layer in config.layers} == {PlainRope(500_000.0)}
    assert not config.tied_embeddings
    assert not config.qkv_bias


def test_both_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = read(tmp_path, rope_theta=500_000.0, rope_scaling=scaling)
    new = read(tmp_path, rope_parameters={"rope_theta": 500_000.0, **scaling}, dtype="bfloat16", torch_dtype=...)
    assert old == new
    assert old.layers[0].rope == Llama3Rope(500_000.0, 8.0, 1.0, 4.0, 64)


def test_linear_scaling_lengthens_the_context(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert config.layers[0].rope == LinearRope(10_000.0, 4.0)
    assert config.max_positions == 1024


def test_yarn_takes_what_it_is_not_told_from_the_paper(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0})
    rope = config.layers[0].rope
    assert isinstance(rope, YarnRope)
    assert (rope.original_positions, rope.beta_fast, rope.beta_slow) == (256, 32.0, 1.0)
    assert rope.magnitude == pytest.approx(1.138629436)
    assert config.max_positions == 1024


def test_gemma_3_alternates_windows_and_rope_bases_in_both_spellings(tmp_path: Path) -> None:
    old = read(tmp_path, GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = read(
        tmp_path,
        GEMMA3,
        rope_theta=...,
        rope_local_base_freq=...,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    assert old == new
    assert [layer.window for layer in old.layers] == [512, None, 512, None]
    assert old.layers[0].rope == PlainRope(10_000.0)
    assert old.layers[1].rope == LinearRope(1_000_000.0, 8.0)
    assert (old.tied_embeddings, old.norm_offset, old.embedding_scale, old.head_dim) == (True, True, 8.0, 256)


def test_qwen_2_slides_only_where_it_says_so(tmp_path: Path) -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 3}
    silent = read(tmp_path, qwen)
    assert (silent.qkv_bias, silent.output_bias) == (True, False)
    assert [layer.window for layer in silent.layers] == [None] * 4
    told = read(tmp_path, qwen, use_sliding_window=True)
    assert [layer.window for layer in told.layers] == [None, None, None, 64]


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read(tmp_path, eos_token_id=9).eos_token_ids == (7, 2, 9)


@pytest.mark.parametrize(
    "config",
    [{"num_hidden_layers": 1 << 31}, {"n_layer": 1 << 31}, {"text_config": {"num_hidden_layers": 1 << 31}}],
    ids=str,
)
def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **config}))
    with pytest.raises(ModelError, match=r"config\.json: \w+ 2147483648 is more than 10000"):
        is_native(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"layer_norm_epsilon": 0.0},
        {"text_config": {"rms_norm_eps": 0.0}},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 0.0}}},
        {"layers": [{"norm_eps": 0.0}]},
    ],
    ids=str,
)
def test_numbers_that_make_logits_no_numbers_are_refused_of_every_model(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **config}))
    with pytest.raises(ModelError, match=r"config\.json: \w+ 0\.0 is not positive"):
        is_native(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["ZambaForCausalLM"]}, "architectures ['ZambaForCausalLM'] is not supported"),
        ({"architectures": ...}, "architectures"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size 66"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 is not positive"),
        ({"num_key_value_heads": -1}, "num_key_value_heads -1 is not positive"),
        ({"head_dim": 0}, "head_dim 0 is not positive"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0 is not positive"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0 is not positive"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps -1e-06 is not positive"),
        ({"rope_theta": -10000.0}, "rope_theta -10000.0 is not positive"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta 0 is not positive"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor -2.0 is not positive"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is set"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_type 'su' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type longrope needs short_factor"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": {**LONGROPE, "short_factor": [1.0] * 8}},
            "rope_type 'longrope' is not supported for this architecture",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' needs factor"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters: "),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
            "layer_types 'chunked_attention' is not supported",
        ),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError) as error:
        read(tmp_path, **changes)
    assert complaint in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_model_config(tmp_path)


def test_a_directory_without_safetensors_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"neither model\.safetensors nor"),
        open_checkpoint(tmp_path, torch.float32),
    ):
        pass


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match=r"model\.safetensors"), open_checkpoint(tmp_path, torch.float32):
        pass


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, torch.float32) as checkpoint:
        with pytest.raises(ModelError, match="has no tensor b"):
            checkpoint.read("b", (2, 3))
        with pytest.raises(ModelError, match=r"tensor a has shape \[2, 3\], the config asks for \[3, 2\]"):
            checkpoint.read("a", (3, 2))


def test_a_rank_reads_only_its_part(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, torch.bfloat16) as checkpoint:
        assert checkpoint.read("a", (2, 3), rows=(1, 2)).tolist() == [[3, 4, 5]]
        assert checkpoint.read("a", (2, 3), columns=(1, 3)).tolist() == [[1, 2], [4, 5]]
        assert checkpoint.read("a", (2, 3)).dtype == torch.bfloat16


def test_shares_cover_the_model_and_kv_heads_are_replicated(tmp_path: Path) -> None:
    scheduled = [shard_of(read(tmp_path, vocab_size=159), rank, 4) for rank in range(4)]
    assert [share.heads for share in scheduled] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [share.kv_heads for share in scheduled] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [share.mlp for share in scheduled] == [(0, 24), (24, 48), (48, 72), (72, 96)]
    assert [share.vocab for share in scheduled] == [(0, 40), (40, 80), (80, 120), (120, 159)]


@pytest.mark.parametrize(
    ("changes", "world_size", "complaint"),
    [
        ({}, 3, "num_attention_heads 4"),
        ({"intermediate_size": 97}, 2, "intermediate_size 97"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16},
            2,
            "num_key_value_heads 3 neither divides",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_named(
    tmp_path: Path, changes: dict[str, Any], world_size: int, complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        shard_of(read(tmp_path, **changes), 0, world_size)


@pytest.mark.parametrize("text", ["{nope", '{"top_p": Infinity'])
def test_a_broken_generation_config_is_named_itself(tmp_path: Path, text: str) -> None:
    """As one that only Python's own reader takes."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError) as error:
        read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'generation_config.json'}: ")
