"""What is read of configurations of Qwen-VL and GLM-V: published files and those that `transformers` writes."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm46VConfig,
    GlmOcrConfig,
    PaddleOCRVLConfig,
    Qwen2_5OmniThinkerConfig,
    Qwen2VLConfig,
    Qwen3OmniMoeThinkerConfig,
    Qwen3VLConfig,
)
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


@pytest.mark.parametrize(
    ("architecture", "whole", "theirs", "own"),
    [
        ("Qwen2_5OmniModel", "qwen2_5_omni", Qwen2_5OmniThinkerConfig, {}),
        (
            "Qwen3OmniMoeForConditionalGeneration",
            "qwen3_omni_moe",
            Qwen3OmniMoeThinkerConfig,
            {"num_attention_heads": 32, "head_dim": 128},
        ),
    ],
)
def test_of_qwen_omni_the_part_that_writes_text_is_read(
    tmp_path: Path, architecture: str, whole: str, theirs: Any, own: dict[str, int]
) -> None:
    """Where it says no sizes, those of the library; Qwen3-Omni's make no heads there."""
    said = json.loads(theirs(text_config=own).to_json_string())
    outer = {"architectures": [architecture], "model_type": whole, "torch_dtype": "bfloat16"}
    config = read(tmp_path, {**outer, "thinker_config": {**said, "dtype": None}})
    text = said["text_config"]
    sizes = ("vocab_size", "hidden_size", "intermediate_size")
    assert [getattr(config, name) for name in sizes] == [text[name] for name in sizes]
    assert (config.num_layers, config.num_heads) == (text["num_hidden_layers"], text["num_attention_heads"])
    assert (config.dtype, config.tied_embeddings, config.max_positions) == ("bfloat16", False, 32_768)
    assert config.input_levels == len(said["vision_config"].get("deepstack_visual_indexes", ()))
    assert (
        read(tmp_path, {**outer, "thinker_config": {"vision_config": said["vision_config"], "text_config": own}})
        == config
    )


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
    for sections, why in (([16, 24], "3 numbers of frequencies"), ([16, 24, 25], "has 65 frequencies, 128 rotated")):
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


GLM: dict[str, Any] = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338, 151348],
    "hidden_size": 4096,
    "image_token_id": 151343,
    "intermediate_size": 13696,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {"depth": 24, "hidden_size": 1536, "out_hidden_size": 4096},
    "vocab_size": 151552,
}
"""GLM-4.1V 9B's, with its language model beside the tower."""


def test_glm_rotates_half_of_a_head(tmp_path: Path) -> None:
    config = read(tmp_path, GLM)
    assert (config.num_layers, config.head_dim, config.rotary_dim, config.rotary_pairs) == (40, 128, 64, True)
    assert (config.post_norms, config.norm_offset, config.qkv_bias, config.output_bias) == (True, False, True, False)
    assert config.rope_axes == (0,) * 8 + (1,) * 12 + (2,) * 12 + (0,) * 32
    assert config.norm_eps == 1e-5
    beside = ("architectures", "vision_config", "model_type")
    own = {key: value for key, value in deepcopy(GLM).items() if key not in beside}
    theirs = Glm4vConfig(text_config=own, tie_word_embeddings=False, dtype="bfloat16")
    theirs.architectures = GLM["architectures"]
    written = json.loads(theirs.to_json_string())
    assert read(tmp_path, {**written, "eos_token_id": GLM["eos_token_id"]}) == config


def test_glm_with_experts_is_the_librarys_where_nothing_is_said(tmp_path: Path) -> None:
    theirs = Glm4vMoeConfig(text_config={"head_dim": 128})
    theirs.architectures = ["Glm4vMoeForConditionalGeneration"]
    said = json.loads(theirs.to_json_string())
    whole = read(tmp_path, said)
    assert whole.mixture is not None
    assert (whole.mixture.experts, whole.mixture.chosen, whole.mixture.shared_size) == (128, 8, 1408)
    assert (whole.mixture.groups, whole.mixture.scale, whole.mixture.scoring) == (1, 1.0, "sigmoid")
    assert [layer.mixes for layer in whole.layers] == [False] + 45 * [True]
    assert (whole.rotary_dim, whole.rotary_pairs, whole.qkv_bias) == (whole.head_dim // 2, False, True)
    for key in _LEFT_OUT:
        del said["text_config"][key]
    assert read(tmp_path, said) == whole


PADDLE: dict[str, Any] = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "head_dim": 128,
    "hidden_size": 1024,
    "image_token_id": 100295,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "paddleocr_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "vision_config": {"hidden_size": 1152, "spatial_merge_size": 2},
    "vocab_size": 103424,
}
"""PaddleOCR-VL 0.9B's, with its language model beside the tower."""


def test_models_that_read_documents_are_the_librarys_where_nothing_is_said(tmp_path: Path) -> None:
    """Their sizes, too; and whether what PaddleOCR-VL multiplies by has biases."""
    config = read(tmp_path, PADDLE)
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("LlamaForCausalLM", 128, 2)
    assert (config.rope_axes, config.tied_embeddings) == ((0,) * 16 + (1,) * 24 + (2,) * 24, False)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)
    biased = read(tmp_path, PADDLE | {"use_bias": True})
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    for kind, name in ((PaddleOCRVLConfig, "PaddleOCRVL"), (GlmOcrConfig, "GlmOcr")):
        theirs: Any = kind()
        theirs.architectures = [f"{name}ForConditionalGeneration"]
        said = json.loads(theirs.to_json_string())
        whole = read(tmp_path, said)
        assert (whole.hidden_size, whole.num_layers) == (1024, theirs.text_config.num_hidden_layers)
        assert whole.layers[0].rope == PlainRope(theirs.text_config.rope_parameters["rope_theta"])
        said["text_config"] = {"model_type": said["text_config"]["model_type"]}
        assert read(tmp_path, said | {"dtype": "float32", "eos_token_id": list(whole.eos_token_ids)}) == whole


@pytest.mark.parametrize("tied", [False, True])
def test_whether_embeddings_are_tied_is_said_of_the_whole(tmp_path: Path, tied: bool) -> None:
    theirs = Glm4vMoeConfig(text_config={"head_dim": 128})
    theirs.architectures = ["Glm4vMoeForConditionalGeneration"]
    said = json.loads(theirs.to_json_string()) | {"tie_word_embeddings": tied}
    said["text_config"]["tie_word_embeddings"] = not tied
    assert read(tmp_path, said).tied_embeddings == tied


def test_glm_4_6_has_either_language_model(tmp_path: Path) -> None:
    for kind, whole in (("glm4v_text", Glm4vConfig), ("glm4v_moe_text", Glm4vMoeConfig)):
        rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5, "rope_theta": 1e4}
        text = {"head_dim": 128, "rope_parameters": rope}
        own = whole(text_config=deepcopy(text))
        own.architectures = [f"{whole.__name__.removesuffix('Config')}ForConditionalGeneration"]
        both = Glm46VConfig(text_config={"model_type": kind, **text})
        both.architectures = ["Glm46VForConditionalGeneration"]
        found = read(tmp_path, json.loads(both.to_json_string()))
        assert found == read(tmp_path, json.loads(own.to_json_string()))
        assert (found.mixture is None) == (kind == "glm4v_text")


_LEFT_OUT = (
    *("attention_bias", "first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts"),
    *("n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "rms_norm_eps", "routed_scaling_factor"),
    "topk_group",
)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01: 1 of 128 elements are no pairs"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5: 192 of 128 elements are no pairs"),
        ({"partial_rotary_factor": 0.25}, "has 32 frequencies, 32 rotated elements of a head half as many"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"rope_scaling": "mrope"}, "rope_scaling 'mrope' is not supported; an object of a rotation's parameters is"),
        ({"rope_scaling": {"mrope_section": []}}, r"mrope_section \[\] is not supported"),
        ({"vision_config": [1]}, "vision_config"),
    ],
)
def test_what_glm_does_not_have_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        read(tmp_path, {**GLM, **changes})


def test_what_is_null_is_as_if_it_were_not_said(tmp_path: Path) -> None:
    said = {**GLM["rope_scaling"], "mrope_section": None}
    assert read(tmp_path, {**GLM, "rope_scaling": said}) == read(tmp_path, GLM)


def test_other_models_are_not_rotated_in_part(tmp_path: Path) -> None:
    scaling = {**PUBLISHED["rope_scaling"], "partial_rotary_factor": 0.5}
    with pytest.raises(ModelError, match=r"partial_rotary_factor 0\.5 is not supported"):
        read(tmp_path, {**PUBLISHED, "rope_scaling": scaling})
