"""What configs say of MiniMax-M3, HY4, Mistral Large 4, Mistral Small 4, Ministral 3, DeepSeek-OCR 2, GLM-5-Next and
Qwen4, as published files have it and as transformers 5 does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from transformers import Glm5NextTextConfig, GraniteDoclingConfig, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from services.worker.backend import BackendError
from services.worker.models.config import (
    BlockIndexConfig,
    DeltaConfig,
    GramConfig,
    HyperConnections,
    Mixture,
    ModelError,
    PositionSteps,
)
from services.worker.models.grams.hashes import multipliers, table_sizes
from services.worker.models.hf_config import is_native, read_model_config
from services.worker.models.published import glm_next, hunyuan, minimax, mistral_large
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import assert_refused, read, write

M3: dict[str, Any] = {
    "architectures": ["MiniMaxM3VLForCausalLM"],
    "hidden_act": "swigluoai",
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 64,
    "sparse_attention_config": {
        "sparse_attention_freq": [0] * 3 + [1] * 57,
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 64,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "sparse_local_block": 2,
        "sparse_init_block": 0,
        "sparse_score_type": "max",
        "use_sparse_attention": True,
    },
}
"""With the keys of published files; sizes are the defaults."""
HY4: dict[str, Any] = {"architectures": ["HYV4ForCausalLM"]}
LARGE: dict[str, Any] = {"architectures": ["MistralLarge4ForCausalLM"]}
SMALL: dict[str, Any] = {"architectures": ["Mistral4ForCausalLM"]}
GROWING = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}
NEXT: dict[str, Any] = {"architectures": ["Glm5NextForCausalLM"]}
QWEN4: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "ple_layer_ids": [2, 14],
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "eos_token_id": [248044, 248046],
}
"""The language models within; sizes are the defaults."""


def test_minimax_m3_is_read_with_its_indexer(tmp_path: Path) -> None:
    config = read(tmp_path, M3)
    assert is_native(tmp_path)
    assert config.max_positions == 524_288
    assert config.block_index == BlockIndexConfig(heads=4, dim=64, block=128, chosen=16, local=2)
    assert config.block_index.longest == 2048
    assert [layer.chooses for layer in config.layers] == [False] * 3 + [True] * 57
    without = read(tmp_path, M3, sparse_attention_config=None)
    assert without.block_index is None
    assert config.parameters - without.parameters == 57 * 6144 * 5 * 64
    assert config.mixture == Mixture(
        experts=128,
        chosen=4,
        intermediate_size=3072,
        renormalised=True,
        shared_size=3072,
        shared_gated=False,
        scoring="sigmoid",
        corrected=True,
        exact_router=True,
        scale=2.0,
    )
    assert [layer.mixes for layer in config.layers] == [False] * 3 + [True] * 57
    assert (config.intermediate_size, config.activation, config.rotary_dim) == (12_288, "swigluoai", 64)
    assert (config.norm_offset, config.qk_norm, config.post_norms) == (True, True, False)


def test_minimax_m3_is_found_within_the_model_with_a_tower(tmp_path: Path) -> None:
    text = {key: value for key, value in M3.items() if key != "architectures"}
    whole = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "text_config": text, "dtype": "bfloat16"}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    assert read_model_config(tmp_path / "whole") == read(tmp_path / "alone", M3, dtype="bfloat16")


def test_hy4_is_a_glm_5_with_streams_sinks_and_gates(tmp_path: Path) -> None:
    config = read(tmp_path, HY4)
    assert read(tmp_path, HY4, layer_types=["deepseek_sparse_attention"] * 34) == config
    assert is_native(tmp_path)
    assert config.connections == HyperConnections(4, 0, 1e-6, mixes=False, magnitude=2.0)
    assert config.attention_sinks
    latent, mixture = config.latent, config.mixture
    assert latent is not None
    assert (latent.gates, latent.interleaved, latent.query_dim, latent.value_dim) == ("elements", False, 256, 256)
    ungated = latent.parameters(2816, 32) - 2816 * 32 * 256
    assert msgspec.structs.replace(latent, gates=None).parameters(2816, 32) == ungated
    assert msgspec.structs.replace(latent, gates="heads").parameters(2816, 32) == ungated + 2816 * 32
    assert latent.index is not None
    assert (latent.index.chosen, latent.index.rotates_last, latent.index.norm_eps) == (2048, True, 1e-5)
    assert [number for number in range(34) if number not in latent.index.shared] == [0, *range(1, 34, 4)]
    assert mixture is not None
    assert (mixture.activation, mixture.scale, mixture.shared_size) == ("silu_limited", 2.827, 768)
    assert [layer.mixes for layer in config.layers] == [False] + [True] * 33


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (M3, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu, swigluoai"),
        (M3, {"swiglu_limit": -8.0}, "swiglu_limit -8.0 is not supported; positive numbers are"),
        (M3, {"rotary_dim": 32}, "rotary_dim 32: partial_rotary_factor 0.5 says 64 of 128 elements"),
        (
            *(M3, {"partial_rotary_factor": None}),
            "rotary_dim 64: partial_rotary_factor None says 128 of 128 elements",
        ),
        (
            M3,
            {"partial_rotary_factor": 1.5},
            "partial_rotary_factor 1.5: 192 of 128 elements of a head would be rotated",
        ),
        (M3, {"num_experts_per_tok": 129}, "num_experts_per_tok 129: there are 128 experts"),
        (M3, {"moe_layer_freq": [1]}, "mlp_layer_types names 1 layers, num_hidden_layers 60"),
        (
            *(M3, {"layer_types": ["sliding_attention"] * 60}),
            "layer_types 'sliding_attention' is not supported; supported: full_attention, minimax_m3_sparse",
        ),
        (
            *(M3, {"mlp_layer_types": ["hash"] * 60}),
            "mlp_layer_types 'hash' is not supported; supported: dense, sparse",
        ),
        (
            M3,
            {"sparse_attention_config": {}, "layer_types": ["minimax_m3_sparse"] * 60, "index_n_heads": 8},
            "index_n_heads 8 must be num_key_value_heads 4",
        ),
        (
            M3,
            {"sparse_attention_config": {"sparse_attention_freq": [1] * 60, "sparse_index_dim": 32}},
            "index_head_dim 32: 64 elements of a head are rotated",
        ),
        (
            M3,
            {"sparse_attention_config": {"sparse_attention_freq": [1] * 60, "sparse_local_block": 17}},
            "index_local_blocks 17 must be 0 to index_topk_blocks 16",
        ),
        (
            M3,
            {"sparse_attention_config": {"sparse_attention_freq": [1] * 60, "sparse_topk_blocks": 0}},
            "index_topk_blocks 0 of index_block_size 128 have to be two tokens and more",
        ),
        (
            M3,
            {"sparse_attention_config": {"sparse_attention_freq": [1] * 60, "sparse_init_block": 1}},
            "sparse_attention_config: sparse_init_block 1 is not supported; 0 is",
        ),
        (M3, {"shared_intermediate_size": 0}, "shared_intermediate_size 0 is not positive"),
        (HY4, {"swiglu_limit": 0}, "swiglu_limit 0.0 is not supported; positive numbers are"),
        (HY4, {"hc_mult": 0}, "hc_mult 0 is not positive"),
        (
            *(HY4, {"layer_types": ["full_attention"]}),
            "layer_types 'full_attention' is not supported; supported: indexed_attention, deepseek_sparse_attention",
        ),
        (
            *(LARGE, {"layer_types": ["full_attention"]}),
            "layer_types 'full_attention' is not supported; supported: indexed_attention, deepseek_sparse_attention",
        ),
        (NEXT, {"mhc": False}, "mhc False is not supported; True is"),
        (NEXT, {"scoring_func": "softmax"}, "scoring_func softmax is not supported; sigmoid is"),
        (
            *(NEXT, {"indexer_types": ["none"] * 45}),
            "indexer_types 'none' is not supported; supported: full, shared",
        ),
        (NEXT, {"swiglu_limit": 0}, "swiglu_limit 0.0 is not supported; positive numbers are"),
        (NEXT, {"qk_rope_head_dim": 64}, "qk_rope_head_dim 64 is not supported; 0 is"),
        (NEXT, {"qk_nope_head_dim": 2}, "qk_nope_head_dim 2 is not above 2"),
        (
            *(NEXT, {"index_kpool_always_select_tail": False}),
            "index_kpool_always_select_tail False is not supported; True is",
        ),
        (NEXT, {"index_topk": 2000, "index_kpool": 32}, "index_topk 2000 is no multiple of index_kpool 32"),
        (NEXT, {"index_kpool": 0}, "index_kpool 0 is not positive"),
        (NEXT, {"index_topk_freq": 2}, "index_topk_pattern and index_topk_freq are not supported; indexer_types is"),
        (NEXT, {"indexer_types": ["full"]}, "indexer_types names 1 layers, num_hidden_layers 45"),
        (
            *(NEXT, {"indexer_types": ["shared"] * 45}),
            "indexer_types 'shared' of layer 3: the layer before it chooses nothing",
        ),
        (NEXT, {"layer_types": ["linear_attention"]}, "layer_types names 1 layers, num_hidden_layers 45"),
        (
            *(NEXT, {"layer_types": ["sliding_attention"] * 45}),
            "layer_types 'sliding_attention' is not supported; supported: linear_attention, indexed_attention, "
            "deepseek_sparse_attention, full_attention",
        ),
        (
            QWEN4,
            {"output_gate_type": "gelu"},
            "output_gate_type 'gelu' is not supported; supported: sigmoid, silu, swish",
        ),
        (QWEN4, {"hc_count": 1}, "hc_count 1 is not above 1"),
        (QWEN4, {"hc_lowrank": 0}, "hc_lowrank 0 is not positive"),
        (QWEN4, {"norm_topk_prob": False}, "norm_topk_prob False is not supported; True is"),
        (
            QWEN4,
            {"layer_types": ["sliding_attention"] * 40},
            "layer_types 'sliding_attention' is not supported; supported: linear_attention, indexed_attention, "
            "full_attention",
        ),
        (QWEN4, {"layer_types": ["linear_attention"]}, "layer_types names 1 layers, num_hidden_layers 40"),
        (QWEN4, {"indexer_budget": None}, "indexer_budget None is not positive"),
        (QWEN4, {"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported; 1 is"),
        (QWEN4, {"indexer_head_dim": 32}, "indexer_head_dim 32: 64 elements of a head are rotated"),
        (QWEN4, {"indexer_budget": 2040}, "indexer_budget 2040 is no multiple of indexer_compress_ratio 16"),
        (QWEN4, {"ple_layer_ids": [4]}, "ple_layer_ids 4 is no layer of linear_attention"),
        (QWEN4, {"ngram_size": 1}, "ngram_size 1 is not above 1"),
        (QWEN4, {"ple_embed_dim": 100}, "ple_embed_dim 100 is no multiple of 16 embeddings of n-grams"),
        (QWEN4, {"eos_token_id": None}, "eos_token_id is missing, which n-grams of ple_layer_ids do not reach beyond"),
        (LARGE, {"n_group": 2}, "n_group 2 is not supported; 1 is"),
        (LARGE, {"final_logit_softcapping": 0.0}, "final_logit_softcapping 0.0 is not positive"),
        (LARGE, {"no_rope_layers": [1]}, "no_rope_layers names 1 layers, num_hidden_layers 72"),
        (LARGE, {"no_rope_layer_interval": 0}, "no_rope_layer_interval 0 is not positive"),
        (LARGE, {"kv_source_layers": [0]}, "kv_source_layers names 1 layers, num_hidden_layers 72"),
        (
            *(LARGE, {"kv_source_layers": [0] * 72}),
            "kv_source_layers: layer 3 names 0, but the last layer before it that is rotated alike and has latents for "
            "others is None",
        ),
        (
            *(LARGE, {"kv_source_layers": [0, 0, 2, 3, 2, 0, *range(6, 72)]}),
            "kv_source_layers: layer 5 names 0, but the last layer before it that is rotated alike and has latents for "
            "others is 2",
        ),
        (HY4, {"mlp_layer_types": ["moe"] * 34}, "mlp_layer_types 'moe' is not supported; supported: dense, sparse"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    assert_refused(tmp_path, base, changes, complaint)


def test_mistral_large_is_a_glm_5_that_shares_latents(tmp_path: Path) -> None:
    sources = [0, 0, 0, 3, 4, 4, 4, 3, *range(8, 72)]
    config = read(tmp_path, LARGE, kv_source_layers=sources)
    assert is_native(tmp_path)
    latent, mixture = config.latent, config.mixture
    assert latent is not None
    assert (latent.q_rank, latent.query_dim, latent.norm_eps, latent.interleaved) == (None, 128, 1e-5, True)
    assert latent.unrotated == tuple(range(3, 72, 4))
    assert latent.of_layer(3) == msgspec.structs.replace(latent, nope_dim=128, rope_dim=0)
    assert latent.of_layer(4) is latent
    assert [number for number in range(72) if latent.borrows(number)] == [1, 2, 5, 6, 7]
    assert [number for number in range(72) if latent.lends(number)] == [0, 3, 4]
    assert len({config.layers[number].rope for number in range(72)}) == 2
    assert latent.index is not None
    assert (latent.index.chosen, latent.index.reads_rows, latent.index.shared) == (2048, True, ())
    assert latent.index.parameters(6144, 0) == 6144 * (32 * 128 + 128 + 32)
    assert mixture == Mixture(
        experts=128,
        chosen=4,
        intermediate_size=6144,
        renormalised=True,
        shared_size=6144,
        shared_gated=False,
        scoring="softmax",
        exact_router=True,
    )
    assert (config.logits_softcap, config.max_positions, config.attention_scale) == (30.0, 1_048_576, 128**-0.5)
    assert [layer.mixes for layer in config.layers] == [False] + [True] * 71


def test_mistral_small_is_a_deepseek_v3_whose_queries_grow(tmp_path: Path) -> None:
    config = read(tmp_path, SMALL)
    assert is_native(tmp_path)
    latent, mixture = config.latent, config.mixture
    assert latent is not None
    assert (latent.q_rank, latent.kv_rank, latent.query_dim, latent.interleaved) == (1024, 256, 128, True)
    assert config.query_steps == PositionSteps(beta=0.1, length=8192)
    assert mixture == Mixture(
        experts=128, chosen=4, intermediate_size=2048, renormalised=True, shared_size=2048, shared_gated=False
    )
    assert [layer.mixes for layer in config.layers] == [True] * 36
    assert (config.max_positions, config.eos_token_ids) == (1_048_576, (2,))
    assert config.attention_scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
    without = read(tmp_path, SMALL, q_lora_rank=None).latent
    assert without is not None
    assert without.q_rank is None


def test_ministral_is_a_mistral_whose_queries_grow(tmp_path: Path) -> None:
    config = read(tmp_path, {"architectures": ["Ministral3ForCausalLM"]})
    assert is_native(tmp_path)
    assert config.query_steps == PositionSteps(beta=0.1, length=16_384)
    devstral = {**GROWING, "rope_type": "yarn", "rope_theta": 1e6, "factor": 64.0, "llama_4_scaling_beta": 0}
    assert read(tmp_path, {"architectures": ["Ministral3ForCausalLM"]}, rope_parameters=devstral).query_steps is None
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale) == (32, 8, 128, 128**-0.5)
    assert (config.max_positions, config.vocab_size, config.qkv_bias) == (262_144, 131_072, False)
    assert {layer.window for layer in config.layers} == {None}
    assert len(config.layers) == 34


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"n_group": 2}, "n_group 2 is not supported; 1 is"),
        ({"head_dim": 96, "rope_parameters": {"partial_rotary_factor": 0.5, **GROWING}}, "0.5 of head_dim 96 is not"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "llama_4_scaling_beta None and original"),
        (
            {"rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings 0 are not supported",
        ),
    ],
)
def test_what_mistral_small_cannot_be_is_refused(tmp_path: Path, different: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, SMALL, **different)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["dense", "sparse"], "names 2 layers, num_hidden_layers 3"),
        (["sparse", "dense", "sparse"], "layers with an MLP come first"),
        (["dense", "linear", "sparse"], "'linear'"),
    ],
)
def test_deepseek_ocr_names_its_layers_with_experts(tmp_path: Path, kinds: list[str], message: str) -> None:
    text = {"model_type": "deepseek_ocr2_text", "num_hidden_layers": 3, "num_experts_per_tok": 6}
    whole = {"architectures": ["DeepseekOcr2ForConditionalGeneration"], "dtype": "bfloat16"}
    config = read(tmp_path, whole, text_config={**text, "mlp_layer_types": ["dense", "sparse", "sparse"]})
    assert [layer.mixes for layer in config.layers] == [False, True, True]
    assert (config.vocab_size, config.hidden_size, config.num_kv_heads) == (102_400, 4096, 32)
    with pytest.raises(ModelError, match=message):
        read(tmp_path, whole, text_config={**text, "mlp_layer_types": kinds})


def test_granite_4_vision_names_the_layers_that_read_parts_of_images(tmp_path: Path) -> None:
    text = {"model_type": "granite4_vision_text", "num_hidden_layers": 40, "attention_multiplier": 0.015625}
    whole = {"architectures": ["Granite4VisionForConditionalGeneration"], "dtype": "bfloat16", "text_config": text}
    config = read(tmp_path, whole, deepstack_layer_map=[[-19, 9], [-13, 6], [-7, 3], [-1, 0]])
    assert (config.level_layers, config.image_row_size) == ((9, 6, 3, 0, 12, 15, 18, 21), 9 * config.hidden_size)
    assert [config.level_before(layer) for layer in (0, 1, 9, 21, 22)] == [3, None, 0, 7, None]
    assert (config.attention_scale, config.scales_inputs, config.max_positions) == (0.015625, True, 2048)
    for layers in ([40], [0]):
        with pytest.raises(ModelError, match=f"name layer {layers[0]}: each of the 40 layers may be named once"):
            read(tmp_path, whole, deepstack_layer_map=[[-1, 0]], spatial_target_layers=layers)


def test_granite_docling_is_a_granite_whose_first_layers_read_parts_of_images(tmp_path: Path) -> None:
    """What nothing says is the library's; the one of 258M is a Llama behind Idefics3's tower."""
    whole = {"architectures": ["GraniteDoclingForConditionalGeneration"], "dtype": "bfloat16", "text_config": {}}
    config, theirs = read(tmp_path, whole), GraniteDoclingConfig().text_config
    assert is_native(tmp_path)
    assert (config.input_levels, config.level_layers, config.image_row_size) == (3, (), 4 * 1024)
    assert [config.level_before(layer) for layer in (0, 1, 3, 4)] == [None, 0, 2, None]
    assert config.scales_inputs
    assert (config.embedding_scale, config.residual_scale) == (theirs.embedding_multiplier, theirs.residual_multiplier)
    assert (config.attention_scale, config.logits_divisor) == (theirs.attention_multiplier, theirs.logits_scaling)
    assert (config.vocab_size, config.num_kv_heads) == (theirs.vocab_size, theirs.num_key_value_heads)
    assert (len(config.layers), config.max_positions) == (theirs.num_hidden_layers, theirs.max_position_embeddings)
    taps = {"vision_config": {"deepstack_visual_indexes": [1]}}
    assert read(tmp_path, {**whole, **taps}).input_levels == 1
    text = {
        "architectures": ["VLlama3ForCausalLM"],
        "model_type": "llama",
        "is_llama_config": True,
        "perceiver_config": {"model_type": "vllama3", "qk_layer_norms_perceiver": False},
        "qk_layer_norms": False,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000.0,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "use_resampler": False,
    }
    tower = {"model_type": "idefics3_vision", "use_base_siglip": False, "deepstack_visual_indexes": False}
    older = {"architectures": ["Idefics3ForConditionalGeneration"], "text_config": text, "vision_config": tower}
    assert read(tmp_path, older).input_levels == 0
    assert is_native(tmp_path)


def test_glm_next_is_a_ling_3_in_streams_that_chooses_pools(tmp_path: Path) -> None:
    published = {"head_dim": 96, "num_heads": 32, "short_conv_kernel_size": 3, "gate_lower_bound": -4.0}
    config = read(tmp_path, NEXT, linear_attn_config=published)
    assert is_native(tmp_path)
    latent, mixture, states = config.latent, config.mixture, config.states
    assert config.connections == HyperConnections(4, 20, 1e-6, averaged=True)
    assert states == DeltaConfig(
        heads=32, head_dim=96, groups=32, state_dim=96, kernel=3, gate_rank=96, lower_bound=-4.0
    )
    assert [number for number, layer in enumerate(config.layers) if not layer.has_state] == list(range(3, 45, 4))
    assert latent is not None
    assert latent.unrotated == tuple(range(3, 45, 4))
    assert (latent.query_dim, latent.gates, latent.norm_eps, config.attention_scale) == (256, None, 1e-5, 1 / 16)
    assert latent.index is not None
    assert (latent.index.pool, latent.index.chosen, latent.index.cached_dim) == (16, 2048, 256)
    assert mixture is not None
    assert (mixture.experts, mixture.chosen, mixture.scale, mixture.groups) == (288, 8, 2.5, 1)
    assert (config.activation, config.max_positions) == ("silu_limited", 1_048_576)
    assert [layer.mixes for layer in config.layers] == [False] * 3 + [True] * 42


def test_qwen4_is_a_qwen3_5_in_gated_streams_with_n_grams(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN4)
    assert is_native(tmp_path)
    assert config.connections == HyperConnections(4, 0, 0.0, mixes=False, rank=320)
    assert isinstance(config.states, DeltaConfig)
    assert not config.states.sigmoid_gated
    gated = read(tmp_path, QWEN4, output_gate_type="sigmoid").states
    assert gated == replace(config.states, sigmoid_gated=True)
    assert config.grams == GramConfig(
        size=3, heads=8, dim=2048, kernel=4, base=20_000_000, divisor=128, seed=1234, shards=512, end=248_044
    )
    assert [(number, layer.grams) for number, layer in enumerate(config.layers) if layer.grams is not None] == [
        (1, 0),
        (13, 1),
    ]
    assert [number for number, layer in enumerate(config.layers) if not layer.has_state] == list(range(3, 40, 4))
    assert config.mixture is not None
    assert (config.mixture.experts, config.mixture.chosen, config.mixture.shared_size) == (512, 10, 512)
    assert (config.eos_token_ids, config.rotary_dim, config.gated_attention) == ((248_044, 248_046), 64, True)
    assert config.block_index == BlockIndexConfig(heads=16, dim=128, block=16, chosen=128, local=0, pooled=True)
    assert (config.block_index.longest, config.max_positions) == (2048 + 15, 32_768)
    assert [number for number, layer in enumerate(config.layers) if layer.chooses] == list(range(3, 40, 4))


@pytest.mark.parametrize("number", [0, 1])
def test_hashes_of_n_grams_are_the_librarys(number: int) -> None:
    grams = GramConfig(size=4, heads=3, dim=36, kernel=4, base=500, divisor=64, seed=99, shards=4, end=2)
    described = {"vocab_size": 300, "ngram_size": 4, "heads_per_ngram": 3, "ngram_vocab_size_base": 500, "seed": 99}
    config = Qwen4ExpTextConfig(**described, make_ngram_vocab_size_divisible_by=64, eos_token_id=2)
    theirs = Qwen4ExpTextNGramEmbedding(config, 36, 0, number)
    sizes, offsets, rows = table_sizes(grams, number)
    assert sizes.flatten().tolist() == theirs.head_vocab_sizes
    assert offsets.flatten().tolist() == theirs.head_offsets
    assert rows == len(theirs.ngram_embedding.weight)
    assert multipliers(grams, 300, number).tolist() == theirs.layer_multipliers.tolist()


def test_glm_next_is_read_as_it_is_published(tmp_path: Path) -> None:
    kinds = ["deepseek_sparse_attention" if number % 4 == 3 else "linear_attention" for number in range(45)]
    published: dict[str, Any] = {
        "layer_types": kinds,
        "indexer_types": ["full"] * 45,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "first_k_dense_replace": 3,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "mhc": True,
        "mla_use_nope": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    assert read(tmp_path / "published", NEXT, **published) == read(tmp_path / "left_out", NEXT, index_kpool=4)


@pytest.mark.parametrize(
    ("linear", "bound"),
    [
        ({}, -5.0),
        ({"gate_lower_bound": None}, -5.0),
        ({"gate_lower_bound": None, "safe_gate": False}, None),
        ({"gate_lower_bound": -3.0, "safe_gate": False}, -3.0),
    ],
)
def test_the_rates_of_glm_next_have_the_librarys_bound(
    tmp_path: Path, linear: dict[str, Any], bound: float | None
) -> None:
    states = read(tmp_path, NEXT, linear_attn_config=linear).states
    assert isinstance(states, DeltaConfig)
    published: dict[str, Any] = {"linear_attn_config": linear}  # a key that the library reads and does not declare
    assert states.lower_bound == bound == Glm5NextTextConfig(**published).linear_lower_bound


def test_who_names_no_end_of_texts_has_the_librarys(tmp_path: Path) -> None:
    assert read(tmp_path / "next", NEXT).eos_token_ids == ()
    assert read(tmp_path / "large", LARGE).eos_token_ids == (2,)


def test_mistral_large_is_found_within_the_model_with_a_tower(tmp_path: Path) -> None:
    text = {"model_type": "mistral_large4_text"}
    whole = {"architectures": ["MistralLarge4ForConditionalGeneration"], "text_config": text, "dtype": "bfloat16"}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    assert read_model_config(tmp_path / "whole") == read(tmp_path / "alone", LARGE, dtype="bfloat16")


@pytest.mark.parametrize(
    ("published", "own"),
    [
        ("tok_embeddings.weight", "model.embed_tokens.weight"),
        ("lerope.alpha", "model.rotary_emb.alpha"),
        ("norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("layers.1.attention.wkv_a_with_mqa.weight", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"),
        ("layers.1.attention.indexer.ssmax_scaling.b", "model.layers.1.self_attn.indexer.softmax_scaling.bias"),
        ("layers.1.gate.weight", "model.layers.1.mlp.gate.weight"),
        ("layers.1.experts.3.w2.weight", "model.layers.1.mlp.experts.3.down_proj.weight"),
        ("layers.1.shared_experts.w1.weight", "model.layers.1.mlp.shared_experts.gate_proj.weight"),
        ("layers.0.feed_forward.w3.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_names_of_mistral_large_are_the_librarys(published: str, own: str) -> None:
    assert mistral_large.library_name(published) == own
    assert mistral_large.library_name(own) == own


def test_published_names_are_the_librarys() -> None:
    assert minimax.library_name("model.layers.3.self_attn.index_q_norm.weight") == (
        "model.layers.3.self_attn.indexer.q_norm.weight"
    )
    assert minimax.library_name("model.layers.1.block_sparse_moe.experts.3.w2.weight") == (
        "model.layers.1.mlp.experts.3.down_proj.weight"
    )
    assert minimax.library_name("model.layers.1.block_sparse_moe.e_score_correction_bias") == (
        "model.layers.1.mlp.gate.e_score_correction_bias"
    )
    assert glm_next.library_name("model.layers.0.hc_attn_fn") == "model.layers.0.attn_hc.fn"
    assert glm_next.library_name("model.layers.0.self_attn.A_log") == "model.layers.0.self_attn.forget_gate.A_log"
    assert hunyuan.library_name("model.hc_pre.hc_head.hc_head_fn") == "model.hc_head.hc_fn"
    assert hunyuan.library_name("model.layers.0.hc_pre.hc_mlp_layer.hc_base") == "model.layers.0.ffn_hc.base"
    assert hunyuan.library_name("model.layers.0.self_attn.linear_gate.weight") == (
        "model.layers.0.self_attn.gate_proj.weight"
    )


def test_the_simulation_knows_no_streams(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"no models with several streams \(HYV4ForCausalLM\)"):
        read_shape(write(tmp_path, HY4), "auto")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MistralLarge4", "latents that layers share"),
        ("Glm5Next", "gated delta nets"),
        ("Qwen4Exp", "gated delta nets"),
    ],
)
def test_the_simulation_knows_no_model_with_a_tower_of_these(tmp_path: Path, name: str, kind: str) -> None:
    whole = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": {}}
    with pytest.raises(BackendError, match=rf"no models with {kind} \({name}For"):
        read_shape(write(tmp_path, whole), "auto")
