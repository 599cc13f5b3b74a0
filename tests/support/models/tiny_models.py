"""Tiny random checkpoints of every model family, and what `transformers` makes of them: the reference."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, PretrainedConfig

VOCABULARY = 160
POSITIONS = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_GEMMA3_ROPE = {
    "full_attention": {"rope_theta": 1_000_000.0, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
}

_DEEPSEEK_YARN = {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.0}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "rope_parameters": _DEEPSEEK_YARN,
}
_GROWING: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
}
"""Queries grow with every 16th position."""
_SPARSE: dict[str, Any] = {
    "q_lora_rank": 20,
    "index_topk": 12,
    "index_n_heads": 16,
    "index_head_dim": 20,
    "pad_token_id": None,
}
"""A part of most prompts is attended to. Scores are seldom equal, of which the library takes any: they were 0 of few
heads, and of a token whose embedding is."""
_COMPRESSED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "partial_rotary_factor": 8 / 24,
    "q_lora_rank": 20,
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention"),
        *("heavily_compressed_attention", "compressed_sparse_attention"),
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "sliding_window": 12,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 16,
    "index_head_dim": 20,
    "index_topk": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": _YARN,
    "pad_token_id": None,
}
"""A layer of each kind. Of most prompts a part of the entries is attended to."""
_PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
_MISTRAL_LARGE: dict[str, Any] = {
    **_LATENT,
    **_SPARSE,
    "n_group": 1,
    "topk_group": 1,
    "model_type": "mistral_large4_text",
    "num_hidden_layers": 6,
    "routed_scaling_factor": 1.7,
    "no_rope_layers": [1, 0, 1, 0, 0, 1],
    "kv_source_layers": [0, 1, 0, 3, 3, 5],
    "indexer_types": ["full", "full", "shared", "full", "full", "shared"],
    "rope_parameters": {**_YARN, "attention_factor": 1.0},
}
"""Of layers with and without rotation some attend to another's latents, by what they or another choose."""
_GLM_NEXT: dict[str, Any] = {
    **{key: value for key, value in (_LATENT | _SPARSE).items() if key not in ("rope_parameters", "head_dim")},
    "model_type": "glm5_next_text",
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
} | {"n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "qk_rope_head_dim": 0, "index_kpool": 4, "hc_mult": 3}
_GLM_NEXT |= {"linear_num_heads": 6, "linear_head_dim": 10}
_TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_GLM_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "out_hidden_size": 48,
    "intermediate_size": 48,
    "projection_intermediate_size": 48,
}
_TOWERS = {"mistral_large4_text": _TOWER, "glm5_next_text": _GLM_TOWER}
"""Beside language models that are never alone."""

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_MAMBA2: dict[str, Any] = {
    "num_heads": 6,
    "head_dim": 16,
    "state_size": 24,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
}
_SELECTIVE: dict[str, Any] = {"state_size": 12, "expand": 2, "time_step_rank": 5, "intermediate_size": 96}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}

DELTA: dict[str, Any] = {
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_value_head_dim": 10,
    "linear_key_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
}

_NOT_KIMIS = ("n_routed_experts", "first_k_dense_replace", "rope_parameters")

_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "time_step_min": 1e-30,  # which the library takes as the least step of prompts, and of prompts alone
    "chunk_size": 16,
}


def _blocks(pattern: str) -> list[str]:
    """As Nemotron-H's `hybrid_override_pattern` says it."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [kinds[letter] for letter in pattern]


_ZAMBA2: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_key_value_heads": 4,
    "head_dim": 24,
    "n_mamba_heads": 6,
    "mamba_d_state": 24,
    "mamba_ngroups": 2,
    "num_mem_blocks": 2,
    "use_shared_attention_adapter": True,
    "adapter_rank": 6,
    "use_mem_rope": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "time_step_min": 1e-30,  # as Nemotron-H's
    "chunk_size": 16,
}

_CONVOLUTION: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_bias": True,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
MINIMAX_M3: dict[str, Any] = {
    "intermediate_size": 32,
    "dense_intermediate_size": 80,
    "shared_intermediate_size": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 16,
    "index_topk_blocks": 2,
}
LFM3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
    "sliding_window": 24,
    "conv_L_cache": 4,
    "conv_bias": True,
    "attention_bias": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    },
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-biased-tied": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "llama-linear": ("LlamaConfig", {"rope_parameters": _LINEAR}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-yarn-sliding": (
        "Qwen2Config",
        {"rope_parameters": _YARN, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 24, "swiglu_limit": 0.1},
    ),
    "qwen2-moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "deepseek-v2": (
        "DeepseekV2Config",
        {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**_LATENT, "q_lora_rank": 20, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
    ),
    "deepseek-v3.2": ("DeepseekV32Config", {**_LATENT, **_SPARSE, "n_shared_experts": 1}),
    "glm-5": (
        "GlmMoeDsaConfig",
        {**_LATENT, **_SPARSE, "rope_parameters": _PLAIN, "indexer_types": ["full", "shared", "full"]},
    ),
    "deepseek-v4": ("DeepseekV4Config", _COMPRESSED),
    "hy4": (
        "HYV4Config",
        {**_LATENT, **_SPARSE, "n_group": 1, "topk_group": 1, "rope_parameters": _PLAIN}
        | {"indexer_types": ["full", "shared", "full"], "hc_mult": 3},
    ),
    "glm-5-next": ("Glm5NextConfig", _GLM_NEXT),
    "mistral-large-4": ("MistralLarge4Config", _MISTRAL_LARGE),
    "mistral-small-4": (
        "Mistral4Config",
        {**_LATENT, **_GROWING, "head_dim": 24, "q_lora_rank": 20, "n_group": 1, "topk_group": 1},
    ),
    "ministral-3": ("Ministral3Config", _GROWING),
    "mamba2": (
        "Mamba2Config",
        {**_MAMBA2, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False},
    ),
    "mamba": ("MambaConfig", _SELECTIVE),
    "falcon-mamba": ("FalconMambaConfig", {**_SELECTIVE, "mixer_rms_eps": 1e-5, "tie_word_embeddings": False}),
    "jamba": (
        "JambaConfig",
        {"mamba_d_state": 12, "attn_layer_period": 3, "attn_layer_offset": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "attn_layer_indices": [1]}),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "embedding_multiplier": 6.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid-moe": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "residual_multiplier": 0.7,
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", {**DELTA, **_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**DELTA, **_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen4": (
        "Qwen4ExpTextConfig",
        {**DELTA, **_EXPERTS, "shared_expert_intermediate_size": 40}
        | {"hc_count": 3, "hc_lowrank": 12, "ple_layer_ids": [1], "ple_embed_dim": 24, "heads_per_ngram": 2}
        | {"ngram_vocab_size_base": 60, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 3}
        | {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16}
        | {"indexer_budget": 32, "indexer_compress_ratio": 16, "output_gate_type": "sigmoid"},
    ),
    "olmo-hybrid": (
        "OlmoHybridConfig",
        {key: value for key, value in DELTA.items() if key != "partial_rotary_factor"}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},  # as the published model has it
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        {key: value for key, value in _LATENT.items() if key not in _NOT_KIMIS}
        | {"num_local_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
        | {"linear_num_heads": 6, "linear_head_dim": 10, "layer_types": DELTA["layer_types"]},
    ),
    "ling-3": (
        "BailingHybridConfig",
        {key: value for key, value in _LATENT.items() if key != "n_routed_experts"}
        | {"num_local_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "pad_token_id": None}
        | {"head_dim": 10, "layer_types": DELTA["layer_types"]},
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "intermediate_size": 32,
            "block_size": 16,
            "full_attn_alpha_factor": 1.7,
            "full_attn_beta_factor": 0.9,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 1.3,
            "mlp_beta_factor": 0.8,
        },
    ),
    "nemotron-h": ("NemotronHConfig", {**_NEMOTRON, "layers_block_type": _blocks("MM-*-M")}),
    "nemotron-h-moe": (
        "NemotronHConfig",
        {**_NEMOTRON, "layers_block_type": _blocks("MEM*EM-"), "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 40, "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 2.5},
    ),
    "falcon-h1": (
        "FalconH1Config",
        {
            **_MAMBA,
            "mamba_d_ssm": 96,
            "head_dim": 12,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "mlp_multipliers": [0.8, 1.3],
            "key_multiplier": 0.6,
            "attention_out_multiplier": 1.2,
            "attention_in_multiplier": 1.1,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.9,
        },
    ),
    "zamba2": ("Zamba2Config", _ZAMBA2),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 5, "head_dim": 12, "lru_width": 64, "attention_window_size": 24, "logits_soft_cap": 5.0}
        | {"w_init_variance_scale": 0.5},
    ),
    "minimax-m3": ("MiniMaxM3VLTextConfig", MINIMAX_M3),
    "lfm2": ("Lfm2Config", {**_CONVOLUTION, "block_multiple_of": 16}),
    "lfm3": ("Lfm3Config", LFM3),
    "lfm2-moe": ("Lfm2MoeConfig", {**_CONVOLUTION, **_EXPERTS, "num_dense_layers": 1}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 24, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 24, "sliding_window_pattern": 3, "rope_parameters": _GEMMA3_ROPE},
    ),
}


STATE_FAMILIES = (
    *("mamba2", "bamba", "granite-hybrid", "granite-hybrid-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe"),
    *("olmo-hybrid", "kimi-linear", "ling-3", "minimax", "nemotron-h", "nemotron-h-moe", "falcon-h1"),
    *("lfm2", "lfm2-moe", "lfm3"),
    *("glm-5-next", "qwen4", "mamba", "falcon-mamba", "jamba", "zamba2", "recurrent-gemma"),
)
"""With Mamba-1 or Mamba-2 layers, gated delta nets, short convolutions, lightning attention or recurrent units."""
IN_EXTRAS = (
    *("olmo-hybrid", "kimi-linear", "ling-3", "minimax", "nemotron-h", "nemotron-h-moe", "falcon-h1", "lfm2-moe"),
    *("lfm3", "falcon-mamba", "jamba", "zamba2", "glm-5", "deepseek-v4", "hy4", "mistral-large-4", "minimax-m3"),
    *("glm-5-next", "qwen4", "mistral-small-4", "ministral-3", "recurrent-gemma"),
)
"""Made of what other families have: where all are tried, these are in `make test-extras`."""


def by_lane(families: Iterable[str], *others: str) -> list[Any]:
    """Parameters of a test of these families, each with what others it has, some of them marked."""
    marks = {each: [pytest.mark.extras] for each in IN_EXTRAS}
    return [pytest.param(each, *others, marks=marks.get(each, [])) for each in families]


@dataclass(frozen=True)
class TinyModel:
    """One checkpoint on disk, and the reference that wrote it."""

    family: str
    path: Path
    reference: Any
    generated: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict, compare=False, repr=False)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocabulary] of the reference."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return logits

    def greedy(self, prompt: list[int], count: int, said: Sequence[int] = ()) -> list[int]:
        """`count` tokens as `transformers` generates them; found once for each prompt. `said`: what somebody holds them
        to be; one pass shows whether each is the likeliest behind those before it, a fifth of `generate`'s time."""
        asked = (tuple(prompt), count)
        if asked not in self.generated:
            found = list(said)
            if len(found) != count or self.logits(prompt + found)[-count - 1 : -1].argmax(-1).tolist() != found:
                found = self._generated(prompt, count)
            self.generated[asked] = found
        return list(self.generated[asked])

    def _generated(self, prompt: list[int], count: int) -> list[int]:
        config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            output = self.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                generation_config=config,
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


def make_config(family: str, **changes: Any) -> PretrainedConfig:
    """The tiny configuration of `family`, with `changes`."""
    kind, own = FAMILIES[family]
    chosen = {**_SHAPE, **own, **changes}
    if "kv_lora_rank" in own:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]  # each has keys and values, made of the latent
    if own.get("model_type") in _TOWERS:
        chosen = {"text_config": chosen, "vision_config": _TOWERS[own["model_type"]]}
    if "o_groups" in own:
        chosen["num_key_value_heads"] = 1  # which all heads read
    config: PretrainedConfig = getattr(transformers, kind)(**copy.deepcopy(chosen))  # which some of them change
    return config


def make_model(family: str, path: Path, *, shard_size: str = "1GB", **changes: Any) -> TinyModel:
    """Writes the checkpoint to `path`. The same weights every time; norms and biases too are random."""
    torch.manual_seed(sum(map(ord, family)))
    # Eager attention is the one that every family has, soft caps included.
    config = make_config(family, **changes)
    sees = "text_config" in config.sub_configs or config.model_type == "mistral4"  # where the library has it
    build = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = build.from_config(config, attn_implementation="eager")
    randomize(model)
    model.eval().save_pretrained(path, max_shard_size=shard_size)
    # The reference goes on after an end token, as a backend does that is not stopped.
    model.generation_config.eos_token_id = None
    return TinyModel(family, path, model)


def randomize(model: Any) -> None:
    """Norms, biases and what else the library begins with equal numbers."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or name.endswith("proj_bias"):  # those of experts
                weight.add_(torch.randn_like(weight) * (0.5 if "bias" in name else 0.2))
            if "rg_lru" in name and weight.ndim > 1:
                weight.normal_(std=0.5)
            if name.endswith("ple.conv1d.weight"):  # which begins with zeros
                weight.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.randn_like(buffer) * 0.2)
            if name.endswith("tid2eid"):
                experts, chosen = model.config.n_routed_experts, buffer.shape[1]
                buffer.copy_(torch.stack([torch.randperm(experts)[:chosen] for _ in range(len(buffer))]))


def write_word_tokenizer(folder: Path) -> None:
    """A word for each token of a tiny model."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
