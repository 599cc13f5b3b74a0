"""A model's sizes, read from its config alone: what a step of it costs. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType, field, structs

from services.worker.backend import BackendError
from services.worker.models.hf_layers.compressed import DEEPSEEK_V4, HY4
from services.worker.models.hf_layers.convolution import CONVOLUTION_ARCHITECTURES, LFM3
from services.worker.models.hf_layers.delta import DELTA_ARCHITECTURES, QWEN4
from services.worker.models.hf_layers.latent import RawLatent, read_latent
from services.worker.models.hf_layers.mamba import MAMBA_ARCHITECTURES
from services.worker.models.hf_layers.mixture import read_mixture
from services.worker.models.hf_layers.selective import RECURRENT_GEMMA, SELECTIVE_ARCHITECTURES
from services.worker.models.hf_layers.tensor_names import OURO
from services.worker.sim.accelerator import StepCost
from services.worker.sim.expert_spread import ExpertSpread, exchange
from shared.models.image_models import GLM_5_NEXT, MISTRAL_LARGE_4, QWEN4_VL

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"int8": 1.0, "fp8": 1.0, "w8a8_int8": 1.0, "w8a8_fp8": 1.0, "int4": 0.5}
"""Of a weight that is rounded as it is loaded, without its scales; embeddings stay as they are."""


class _Raw(RawLatent, kw_only=True):
    """The keys of `config.json` that sizes follow from."""

    architectures: list[str] = field(default_factory=list)
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    num_shared_experts: int | UnsetType | None = UNSET
    moe_shared_expert_intermediate_size: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


class _RawGeneration(Struct):
    eos_token_id: int | list[int] | None = None


class Experts(Struct, frozen=True):
    """The experts of a mixture, alike in all layers that have one."""

    count: int
    chosen: int
    bytes_each: int
    """Bytes of one expert over all layers."""
    layers: int = 0
    """Those that have experts."""
    hidden: int = 0
    """Elements of a row that goes to an expert."""
    chosen_groups: int = 0
    """Groups that the experts of a token are of; where routing knows none, as many as are chosen."""
    flops_each: int = 0
    """Operations of one expert for a token, over all layers."""

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return self.count * self.bytes_each

    def idle_share(self, tokens: float) -> float:
        """How many of them none of `tokens` tokens goes through, if all are chosen equally often."""
        return float((1 - self.chosen / self.count) ** tokens)

    def idle_bytes(self, tokens: int) -> int:
        """Weights of those that none of `tokens` tokens goes through."""
        return round(self.bytes * self.idle_share(tokens))

    def each_rank(self, spread: ExpertSpread) -> int:
        """Bytes of the experts of a rank, over all layers."""
        return -(-self.count // spread.ranks) * self.bytes_each


class ModelShape(Struct, frozen=True, kw_only=True):
    """A model's sizes in bytes and floating-point operations."""

    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    kv_heads: int
    flops_per_token: int
    """Operations of the matrix products with weights."""
    flops_per_pair: int
    """Operations of attention for each pair of a query and a key, over all layers."""
    flops_per_sample: int
    """Operations of the output layer for each drawn token."""
    reduced_per_token: int = 0
    """Bytes that the ranks of an engine sum up: the output of attention and that of the MLP, of every layer."""
    reductions: int = 0
    """In how many sums."""
    experts: Experts | None = None

    def load(self, *, tokens: int, pairs: int, read: int, samples: int) -> StepCost:
        """A step of `tokens` rows that attend to `pairs` of positions and read the KV cache of `read` tokens."""
        idle = 0 if self.experts is None else self.experts.idle_bytes(tokens)
        moved = self.weight_bytes - idle + self.kv_bytes_per_token * (read + tokens)
        flops = self.flops_per_token * tokens + self.flops_per_pair * pairs + self.flops_per_sample * samples
        return StepCost(moved, flops, self.reduced_per_token * tokens, self.reductions)

    def spread_load(
        self, spread: ExpertSpread, ranks: int, *, tokens: float, pairs: float, read: float, samples: float
    ) -> StepCost:
        """See `load`: of one of an engine's `ranks`, where experts are spread over those of many engines, all as busy.
        Every expert then gets rows of all engines, and what they give needs no sum."""
        experts = self.experts
        assert experts is not None
        touched = 1 - experts.idle_share(tokens * spread.ranks / ranks)
        dense = self.weight_bytes - experts.bytes
        moved = (dense + self.kv_bytes_per_token * (read + tokens)) / ranks + experts.each_rank(spread) * touched
        flops = self.flops_per_token * tokens + self.flops_per_pair * pairs + self.flops_per_sample * samples
        flops += experts.chosen * experts.flops_each * tokens * (1 / spread.balance - 1)
        sent = exchange(
            spread,
            rows=tokens / ranks,
            hidden=experts.hidden,
            chosen=experts.chosen,
            chosen_groups=experts.chosen_groups,
            layers=experts.layers,
        )
        left = 1 - experts.layers / self.reductions if ranks > 1 else 0.0
        reduced = self.reduced_per_token * tokens * left * 2 * (ranks - 1) / ranks
        return StepCost(moved, flops / ranks, reduced, round(self.reductions * left), *sent)

    def resident_bytes(self, ranks: int, spread: ExpertSpread | None) -> float:
        """Bytes of the weights of one of an engine's `ranks`."""
        if spread is None or self.experts is None:
            return self.weight_bytes / ranks
        return (self.weight_bytes - self.experts.bytes) / ranks + self.experts.each_rank(spread)


class _CachedBytes(NamedTuple):
    """Of keys and values."""

    element: int
    head: int = 0
    """Of a token, beside its elements."""


_CACHED_BYTES = {"fp8": _CachedBytes(1), "int8_per_token_head": _CachedBytes(1, head=4)}
"""By the worker's setting; else as the model is."""


def read_shape(folder: Path, dtype: str, quantization: str = "auto", kv_cache_dtype: str = "auto") -> ModelShape:
    """The shape of the model in `folder`; dtype `auto` is the model's own, `quantization` and `kv_cache_dtype` are the
    worker's settings. Raises BackendError."""
    _refuse_states(folder / "config.json")
    raw = _read(folder / "config.json", _Raw)
    generation = folder / "generation_config.json"
    eos = _read(generation, _RawGeneration).eos_token_id if generation.is_file() else None
    chosen = (raw.dtype or raw.torch_dtype or "bfloat16") if dtype == "auto" else dtype
    if chosen not in _BYTES:
        raise BackendError(f"{folder / 'config.json'}: dtype {chosen!r} is none of {', '.join(_BYTES)}")
    try:
        raw = _as_deepseek(raw) if _SARVAM_LATENT in raw.architectures else raw
        weight = _BYTES[chosen] if quantization == "auto" else QUANTIZED_BYTES[quantization]
        if raw.quantization_config is not None:
            weight = _stored_bits(raw.quantization_config) / 8
        cached = _CACHED_BYTES.get(kv_cache_dtype) or _CachedBytes(_BYTES[chosen])
        return _shape(raw, chosen, _ids(raw.eos_token_id if eos is None else eos), weight, cached)
    except ValueError as error:
        raise BackendError(f"{folder / 'config.json'}: {error}") from None


_CHOOSING_BLOCKS = ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration")


class _RawNames(Struct):
    architectures: list[str] = field(default_factory=list)


def _refuse_states(path: Path) -> None:
    """Sizes of attention would be read of what has none."""
    named = _read(path, _RawNames).architectures
    kinds = (
        (MAMBA_ARCHITECTURES, "state-space layers"),
        (DELTA_ARCHITECTURES, "gated delta nets"),
        ((*CONVOLUTION_ARCHITECTURES, LFM3), "short convolutions"),
        (SELECTIVE_ARCHITECTURES, "selective state-space layers"),
        ((RECURRENT_GEMMA,), "recurrent units"),
        ((DEEPSEEK_V4,), "compressed keys"),
        ((HY4,), "several streams"),
        (_CHOOSING_BLOCKS, "keys that are chosen by blocks"),
        ((OURO,), "layers that rows go through several times"),
        ((MISTRAL_LARGE_4,), "latents that layers share"),
        ((GLM_5_NEXT, QWEN4, QWEN4_VL), "gated delta nets"),
    )
    for known, kind in kinds:
        of_kind = [each for each in named if each in known]
        if of_kind:
            raise BackendError(f"{path}: the simulation knows no models with {kind} ({of_kind[0]})")


def _stored_bits(config: Mapping[str, Any]) -> float:
    """Of a weight in a quantised checkpoint, without its scales. Raises ValueError."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        groups = config.get("config_groups") or {}
        return float(max((group["weights"]["num_bits"] for group in groups.values()), default=16))
    known = {"fp8": 8, "mxfp4": 4, "awq": config.get("bits", 4), "gptq": config.get("bits", 4)}
    known["modelopt"] = 4 if "FP4" in str(config.get("quant_algo")).upper() else 8
    known |= dict.fromkeys(("auto-round", "intel/auto-round"), config.get("bits", 4))
    known |= {"fbgemm_fp8": 8, "quark": 8, "torchao": 8, "hqq": 8}
    known["bitsandbytes"] = 4 if config.get("load_in_4bit") else 8
    if method not in known:
        raise ValueError(
            f"quantization_config: quant_method {method!r} is none of compressed-tensors, {', '.join(known)}"
        )
    return float(known[method])


def _shape(raw: _Raw, dtype: str, eos: tuple[int, ...], weight: float, cached: _CachedBytes) -> ModelShape:
    """`weight`: bytes of an element of a linear layer."""
    attention = _attention(raw)
    layers = _layers(raw)
    everywhere = raw.num_hidden_layers * attention.parameters + 3 * raw.hidden_size * layers.dense_columns
    one_expert = 3 * raw.hidden_size * layers.expert_columns
    embedding = raw.vocab_size * raw.hidden_size
    size = _BYTES[dtype]
    return ModelShape(
        vocab_size=raw.vocab_size,
        max_positions=raw.max_position_embeddings,
        eos_token_ids=eos,
        dtype=dtype,
        weight_bytes=round(weight * (everywhere + layers.experts * one_expert))
        + size * embedding * (1 if raw.tie_word_embeddings else 2),
        kv_heads=attention.kv_heads,
        kv_bytes_per_token=raw.num_hidden_layers
        * (attention.cached * cached.element + 2 * attention.kv_heads * cached.head),
        flops_per_token=2 * (everywhere + layers.chosen * one_expert),
        flops_per_pair=2 * raw.num_hidden_layers * attention.multiplied,
        flops_per_sample=2 * embedding,
        reduced_per_token=2 * raw.num_hidden_layers * raw.hidden_size * size,
        reductions=2 * raw.num_hidden_layers,
        experts=_experts(raw, layers, round(weight * one_expert)) if layers.experts else None,
    )


def _experts(raw: _Raw, layers: _Layers, bytes_each: int) -> Experts:
    return Experts(
        layers.experts,
        layers.chosen,
        bytes_each,
        layers=layers.mixing,
        hidden=raw.hidden_size,
        chosen_groups=layers.chosen_groups or layers.chosen,
        flops_each=2 * 3 * raw.hidden_size * layers.expert_columns,
    )


class _Attention(NamedTuple):
    """One layer's attention."""

    parameters: int
    kv_heads: int
    cached: int
    """Elements that are cached of each token."""
    multiplied: int
    """Elements that are multiplied for each pair of a query and a key, over all heads."""


def _attention(raw: _Raw) -> _Attention:
    heads, latent = raw.num_attention_heads, read_latent(raw)
    if latent is not None:
        pair = heads * (latent.cached_dim + latent.kv_rank)
        return _Attention(latent.parameters(raw.hidden_size, heads), 1, latent.kv_rank + latent.beside_dim, pair)
    kv_heads = raw.num_key_value_heads or heads
    head_dim = raw.head_dim or raw.hidden_size // heads
    parameters = raw.hidden_size * head_dim * (2 * heads + 2 * kv_heads)
    return _Attention(parameters, kv_heads, 2 * kv_heads * head_dim, 2 * heads * head_dim)


class _Layers(NamedTuple):
    """Columns of MLPs, summed over all layers."""

    dense_columns: int
    """Columns that every token passes through."""
    experts: int
    chosen: int
    expert_columns: int
    """Columns of one expert."""
    mixing: int = 0
    """Layers that have experts."""
    chosen_groups: int = 0
    """Groups that a token's experts are of; 0: there are no groups."""


class _PublishedDefaults(NamedTuple):
    """What configurations of a published mixture may leave out."""

    dense: int = 0
    """Layers that come first and have no experts."""
    shared: int = 0
    """Experts that every token goes through."""
    together: bool = False
    """Whether the size that is said of shared experts is that of all of them."""


_PUBLISHED = {
    **dict.fromkeys(("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "DeepseekForCausalLM"), _PublishedDefaults()),
    "SarvamMoEForCausalLM": _PublishedDefaults(1, 1),
    "Param2MoEForCausalLM": _PublishedDefaults(1, 1, together=True),
}
"""Mixtures whose code comes with their checkpoints; `published/mixtures.py`, which reads them for engines, imports
PyTorch."""
_SARVAM_LATENT, _MINICPM, _QWEN = "SarvamMLAForCausalLM", "MiniCPMForCausalLM", "QWenLMHeadModel"


def _published_layers(raw: _Raw, defaults: _PublishedDefaults) -> _Layers:
    """Raises ValueError."""
    experts, size, chosen = raw.n_routed_experts or raw.num_experts, raw.moe_intermediate_size, raw.num_experts_per_tok
    if experts is None or size is None or chosen is None:
        raise ValueError("n_routed_experts or num_experts, moe_intermediate_size and num_experts_per_tok are needed")
    dense = defaults.dense if raw.first_k_dense_replace is None else raw.first_k_dense_replace
    mixing = raw.num_hidden_layers - min(dense, raw.num_hidden_layers)
    count = raw.n_shared_experts or _shared_experts(raw, defaults.shared)
    columns = count * (raw.moe_shared_expert_intermediate_size or size)
    if defaults.together and raw.moe_shared_expert_intermediate_size is not None:
        columns = min(count, 1) * raw.moe_shared_expert_intermediate_size
    dense_columns = (raw.num_hidden_layers - mixing) * raw.intermediate_size
    groups = (raw.topk_group or 0) if (raw.n_group or 1) > 1 else 0
    return _Layers(dense_columns + mixing * columns, experts, chosen, mixing * size, mixing, groups)


def _shared_experts(raw: _Raw, default: int) -> int:
    return default if raw.num_shared_experts is UNSET else raw.num_shared_experts or 0


def _as_deepseek(raw: _Raw) -> _Raw:
    """Sarvam 105B, a DeepSeek-V3 whose keys have other names. Raises ValueError."""
    if raw.num_experts is None or raw.moe_intermediate_size is None:
        raise ValueError("num_experts and moe_intermediate_size are needed")
    return structs.replace(
        raw,
        architectures=["DeepseekV3ForCausalLM"],
        n_routed_experts=raw.num_experts,
        n_shared_experts=_shared_experts(raw, 1),
        first_k_dense_replace=1 if raw.first_k_dense_replace is None else raw.first_k_dense_replace,
        n_group=raw.n_group or 1,
        topk_group=raw.topk_group or 1,
        q_lora_rank=None if raw.q_lora_rank is UNSET else raw.q_lora_rank,
    )


def _layers(raw: _Raw) -> _Layers:
    if (defaults := next((_PUBLISHED[name] for name in raw.architectures if name in _PUBLISHED), None)) is not None:
        return _published_layers(raw, defaults)
    if _MINICPM in raw.architectures and raw.num_experts:
        columns = raw.num_hidden_layers * raw.intermediate_size
        return _Layers(0, raw.num_experts, raw.num_experts_per_tok or 2, columns, raw.num_hidden_layers)
    if _QWEN in raw.architectures:  # half as many columns as is said
        return _Layers(raw.num_hidden_layers * (raw.intermediate_size // 2), 0, 0, 0)
    read = read_mixture(raw)
    mixing = sum(read.mixing)
    dense = (raw.num_hidden_layers - mixing) * raw.intermediate_size
    if read.mixture is None:
        return _Layers(dense, 0, 0, 0)
    shared = mixing * (read.mixture.shared_size or 0)
    mixture = read.mixture
    groups = mixture.chosen_groups if mixture.groups > 1 else 0
    columns = mixing * mixture.intermediate_size
    return _Layers(dense + shared, mixture.experts, mixture.chosen, columns, mixing, groups)


def _read(path: Path, type_: type[Any]) -> Any:
    try:
        text: Mapping[str, Any] = json.loads(path.read_bytes())
        nested = text.get("text_config")
        return msgspec.convert({**text, **nested} if isinstance(nested, dict) else text, type_)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise BackendError(f"{path}: {error}") from None


def _ids(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
