"""Reads the `config.json` of Qwen4 (experimental): a Qwen3.5 with experts whose residual is several streams, to which
some layers add embeddings of n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import (
    BlockIndexConfig,
    DeltaConfig,
    GramConfig,
    HyperConnections,
    ModelConfig,
    ModelError,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_layers.delta import QWEN4 as QWEN4
from services.worker.models.published.layout import Published

_LIKE, _LIKE_SEEING = "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"
"""The other one where rows of images have positions of three axes."""
_KINDS = {"linear_attention": "linear_attention", "indexed_attention": "full_attention"}
_KINDS["full_attention"] = _KINDS["indexed_attention"]
"""By all names that `transformers` reads; published files have the last one."""


class _RawQwen4(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 248_320
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_act: str = "silu"
    max_position_embeddings: int = 32_768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 10
    num_experts: int = 512
    norm_topk_prob: bool = True
    layer_types: list[str] | None = None
    full_attention_interval: int = 4
    output_gate_type: str | None = None
    hc_count: int = 4
    hc_lowrank: int = 320
    ple_layer_ids: list[int] | None = None
    ple_embed_dim: int | None = None
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    split_ngram_parts: int = 512
    eos_token_id: int | list[int] | None = None
    image_token_id: int | None = None
    indexer_n_heads: int | None = None
    indexer_kv_heads: int | None = None
    indexer_head_dim: int | None = None
    indexer_budget: int | None = None
    indexer_compress_ratio: int | None = None


_SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok"),
    *("num_experts", "full_attention_interval"),
)
"""Keys that Qwen3.5 has, too, with the same meaning."""
_PASSED_ON = (
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "eos_token_id", "dtype", "torch_dtype"),
)
"""The same, as they are."""
_INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_POSITIVE = (
    *("hc_lowrank", "ple_conv_kernel_size", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by"),
    *("split_ngram_parts", "heads_per_ngram", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
_GATES = ("sigmoid", "silu", "swish")
"""What gates a delta net's output; published files have the first one, vLLM's name of the second is the third."""
_ROTATED = 0.25
"""Share of a head that is rotated where the config does not say."""
_EXACT_TOKENS = 1 << 24
"""Of which float32 has every whole number."""


def qwen4(raw: Mapping[str, Any]) -> Published:
    """Raises ModelError, and msgspec.ValidationError."""
    given = {key: value for key, value in raw.items() if value is not None}
    own = msgspec.convert(given, _RawQwen4)
    _refuse(own)
    kinds = _kinds(own)
    base = {key: getattr(own, key) for key in _SAME} | {key: given[key] for key in _PASSED_ON if key in given}
    base["layer_types"] = kinds
    index = _index(own, _rotated(own, given)) if "full_attention" in kinds else None
    sees = own.image_token_id is not None
    return Published(
        {"text_config": base} if sees else base,
        {},
        like=_LIKE_SEEING if sees else _LIKE,
        revised=partial(_revised, own, index, _layers_with_grams(own, kinds)),
    )


def _refuse(own: _RawQwen4) -> None:
    require_positive(**{key: getattr(own, key) for key in _POSITIVE})
    if _gate(own) not in _GATES:
        raise ModelError(f"output_gate_type {_gate(own)!r} is not supported; supported: {', '.join(_GATES)}")
    if own.hc_count < 2:
        raise ModelError(f"hc_count {own.hc_count} is not above 1")
    if not own.norm_topk_prob:
        raise ModelError("norm_topk_prob False is not supported; True is")


def _gate(own: _RawQwen4) -> str:
    return own.output_gate_type or own.hidden_act


def _kinds(own: _RawQwen4) -> list[str]:
    """As Qwen3.5 calls them."""
    if own.layer_types is None:
        period = max(own.full_attention_interval, 1)
        return [
            "full_attention" if number % period == period - 1 else "linear_attention"
            for number in range(own.num_hidden_layers)
        ]
    return layer_kinds("layer_types", own.layer_types, _KINDS, own.num_hidden_layers)


def _rotated(own: _RawQwen4, given: Mapping[str, Any]) -> int:
    """Elements of a head that are rotated, as Qwen3.5 has them."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", given.get("partial_rotary_factor", _ROTATED))
    return int(own.head_dim * share) if isinstance(share, int | float) else 0  # which is refused where it is read


def _index(own: _RawQwen4, rotated: int) -> BlockIndexConfig:
    for key in _INDEXER:
        value = getattr(own, key)
        if value is None or value < 1:
            raise ModelError(f"{key} {value} is not positive")
    heads, dim = own.indexer_n_heads or 1, own.indexer_head_dim or 1
    budget, ratio = own.indexer_budget or 1, own.indexer_compress_ratio or 1
    if own.indexer_kv_heads != 1:
        raise ModelError(f"indexer_kv_heads {own.indexer_kv_heads} is not supported; 1 is")
    if budget % ratio:
        raise ModelError(f"indexer_budget {budget} is no multiple of indexer_compress_ratio {ratio}")
    if dim < rotated:
        raise ModelError(f"indexer_head_dim {dim}: {rotated} elements of a head are rotated")
    return BlockIndexConfig(heads=heads, dim=dim, block=ratio, chosen=budget // ratio, local=0, pooled=True)


def _layers_with_grams(own: _RawQwen4, kinds: list[str]) -> list[int]:
    """Their numbers from 0, in order. Raises ModelError."""
    numbers = sorted({each - 1 for each in own.ple_layer_ids or []})
    for number in numbers:
        if not 0 <= number < len(kinds) or kinds[number] != "linear_attention":
            raise ModelError(f"ple_layer_ids {number + 1} is no layer of linear_attention")
    if not numbers:
        return []
    if own.ngram_size < 2:
        raise ModelError(f"ngram_size {own.ngram_size} is not above 1")
    dim, hashes = own.ple_embed_dim or own.hidden_size, (own.ngram_size - 1) * own.heads_per_ngram
    if dim % hashes:
        raise ModelError(f"ple_embed_dim {dim} is no multiple of {hashes} embeddings of n-grams")
    if own.eos_token_id is None or own.eos_token_id == []:
        raise ModelError("eos_token_id is missing, which n-grams of ple_layer_ids do not reach beyond")
    if own.vocab_size > _EXACT_TOKENS // 2:
        raise ModelError(f"vocab_size {own.vocab_size} is more than ple_layer_ids are computed for")
    return numbers


def _revised(own: _RawQwen4, index: BlockIndexConfig | None, with_grams: list[int], config: ModelConfig) -> ModelConfig:
    end = own.eos_token_id[0] if isinstance(own.eos_token_id, list) else own.eos_token_id
    grams = GramConfig(
        size=own.ngram_size,
        heads=own.heads_per_ngram,
        dim=own.ple_embed_dim or own.hidden_size,
        kernel=own.ple_conv_kernel_size,
        base=own.ngram_vocab_size_base,
        divisor=own.make_ngram_vocab_size_divisible_by,
        seed=own.seed,
        shards=own.split_ngram_parts,
        end=end or 0,
        image=own.image_token_id,
    )
    layers = tuple(
        replace(layer, grams=with_grams.index(number) if number in with_grams else None, chooses=not layer.has_state)
        for number, layer in enumerate(config.layers)
    )
    states = config.states
    if isinstance(states, DeltaConfig):
        states = replace(states, sigmoid_gated=_gate(own) == "sigmoid")
    return replace(
        config,
        layers=layers,
        states=states,
        connections=HyperConnections(own.hc_count, 0, 0.0, mixes=False, rank=own.hc_lowrank),
        grams=grams if with_grams else None,
        block_index=index,
    )
