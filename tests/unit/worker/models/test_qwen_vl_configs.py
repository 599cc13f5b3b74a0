"""What is read of Qwen2-VL's configurations: published files and those that `transformers` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2VLConfig, Qwen3VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.rope import PlainRope, cos_sin_table, rotations

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "eos_token_id": 151645,
    "hidden_size": 2048,
    "image_token_id": 151655,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 2048},
    "vocab_size": 151936,
}
"""Qwen2.5-VL 3B's."""


def read(folder: Path, content: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(content))
    return read_model_config(folder)


def test_published_files_have_the_language_model_beside_the_tower(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    assert (config.architecture, config.dtype, config.num_layers, config.hidden_size) == (
        "Qwen2ForCausalLM",
        "bfloat16",
        36,
        2048,
    )
    assert (config.tied_embeddings, config.eos_token_ids, config.qkv_bias) == (True, (151645,), True)
    assert config.rope_axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert {layer.rope for layer in config.layers} == {PlainRope(1_000_000.0)}
    assert {layer.window for layer in config.layers} == {None}


def test_what_a_file_leaves_out_is_the_librarys(tmp_path: Path) -> None:
    theirs = Qwen2VLConfig()
    theirs.architectures = ["Qwen2VLForConditionalGeneration"]
    said = json.loads(theirs.to_json_string())
    whole = read(tmp_path, said)
    for key in ("rms_norm_eps", "rope_parameters"):
        del said["text_config"][key]
    assert read(tmp_path, said) == whole


def test_qwen3_interleaves_its_sections_and_has_levels(tmp_path: Path) -> None:
    theirs = Qwen3VLConfig()
    theirs.architectures = ["Qwen3VLForConditionalGeneration"]
    said = json.loads(theirs.to_json_string())
    whole = read(tmp_path, said)
    assert (whole.input_levels, whole.image_row_size, whole.rope_axes[:6]) == (3, 4 * 4096, (0, 1, 2, 0, 1, 2))
    assert [whole.rope_axes.count(axis) for axis in range(3)] == [24, 20, 20]
    for key in ("rms_norm_eps", "rope_parameters", "head_dim"):
        del said["text_config"][key]
    assert read(tmp_path, said) == whole
    said["vision_config"]["deepstack_visual_indexes"] = list(range(32))
    with pytest.raises(ModelError, match="32 levels, which is not below 32 layers"):
        read(tmp_path, said)


def test_sections_that_are_none_are_refused(tmp_path: Path) -> None:
    for sections, why in (([16, 24], "3 numbers of frequencies"), ([16, 24, 25], "has 65 frequencies, a head of 128")):
        with pytest.raises(ModelError, match=why):
            read(tmp_path, {**PUBLISHED, "rope_scaling": {"type": "mrope", "mrope_section": sections}})


def test_rows_are_turned_as_in_the_library() -> None:
    positions = torch.randint(0, 100, (3, 7))
    text = Qwen2VLConfig(
        text_config={
            "hidden_size": 64,
            "num_attention_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        }
    ).text_config
    cosines, sines = Qwen2VLRotaryEmbedding(text)(torch.empty(0), positions.unsqueeze(1))
    found = rotations(cos_sin_table(PlainRope(1e4), 32, 100), torch.tensor([0] * 4 + [1] * 6 + [2] * 6), positions)
    assert torch.allclose(found, torch.cat((cosines[0, :, :16], sines[0, :, :16]), 1), atol=1e-6)
