"""Reads `config.json` and `generation_config.json` of a Hugging Face model directory, strictly.

What is not supported is refused with the key and the value that ask for it; nothing is guessed. Defaults are those of
the `transformers` library, as configs omit them. Both spellings of RoPE's parameters are read: `rope_theta` with
`rope_scaling`, and transformers 5's `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from services.worker.models.compressed.reading import COMPRESSED_READERS
from services.worker.models.config import (
    LayerConfig,
    ModelConfig,
    ModelError,
    dtype_named,
    limited_activation,
    plain_json,
)
from services.worker.models.hf_layers.latent import LATENT_ARCHITECTURES, LatentConfig, RawLatent, read_latent
from services.worker.models.hf_layers.limits import refuse_impossible
from services.worker.models.hf_layers.llava import language_model
from services.worker.models.hf_layers.mixture import MixtureLayers, read_mixture
from services.worker.models.hf_layers.multi_axis import LANGUAGE_MODELS as MULTI_AXIS
from services.worker.models.hf_layers.multi_axis import multi_axis_language_model
from services.worker.models.hf_layers.tied_heads import HEADLESS
from services.worker.models.hf_rope import RawRope, Ropes, read_ropes
from services.worker.models.published.configs import PUBLISHED, published_config
from services.worker.models.states.reading.readers import STATE_READERS
from services.worker.models.weight_files import has_head_tensor
from services.worker.ops.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, ActivationName
from shared.models.image_models import NESTING_ARCHITECTURES

_T = TypeVar("_T")


class _Family(Struct, frozen=True):
    """What an architecture implies without saying so in its config."""

    qkv_bias: bool | None = None
    """None: the config says so, by `qkv_bias_key`."""
    qkv_bias_key: Literal["attention_bias", "qkv_bias"] = "attention_bias"
    output_bias: bool | None = None
    qk_norm: bool = False
    gemma: bool = False
    """(1 + w) norms, norms after attention and MLP, scaled embeddings, tanh-GELU, tied by default."""
    head_dim_default: int | None = None
    """None: hidden_size / num_attention_heads."""
    window_default: int | None = None
    theta: float = 10_000.0
    local_theta: float | None = None
    """RoPE base of sliding layers, where they have their own."""
    window_period: int | None = None
    """Each layer whose number this divides sees everything, the others a window. None: see `layer_types`."""
    eps: float = 1e-6
    attention_bias: bool = False
    """Where the config does not say so."""
    activation: ActivationName | None = None
    """Whatever `hidden_act` says."""
    sinks: bool = False
    scaled_positions: bool = False
    """`max_position_embeddings` has the scaling of its rotation in it."""
    rope: RawRope | None = None
    """That of a config without any."""
    post_norms: bool = False
    """Norms behind attention and MLP, as Gemma has them, too."""
    part_rotates: Literal["halves", "pairs"] | None = None
    """Heads may be rotated in part: each element with one half of that part further on, or with its neighbour. None:
    all of a head is, in halves."""


_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(qkv_bias=False, output_bias=False, window_default=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim_default=128),
    "MixtralForCausalLM": _Family(qkv_bias=False, output_bias=False, theta=1_000_000.0, eps=1e-5),
    "Qwen2MoeForCausalLM": _Family(qkv_bias_key="qkv_bias", output_bias=False),
    "Qwen3MoeForCausalLM": _Family(qk_norm=True),
    "Qwen3VLMoeForCausalLM": _Family(qk_norm=True),
    "Gemma2ForCausalLM": _Family(gemma=True, head_dim_default=256, window_default=4096, window_period=2),
    "Gemma3ForCausalLM": _Family(
        gemma=True,
        qk_norm=True,
        head_dim_default=256,
        window_default=4096,
        window_period=6,
        theta=1_000_000.0,
        local_theta=10_000.0,
    ),
    "GptOssForCausalLM": _Family(
        head_dim_default=64,
        window_default=128,
        window_period=2,
        theta=150_000.0,
        eps=1e-5,
        attention_bias=True,
        activation="swigluoai",
        sinks=True,
        scaled_positions=True,
        rope=RawRope(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
    ),
    "DeepseekV2ForCausalLM": _Family(),
    "DeepseekV3ForCausalLM": _Family(),
    "DeepseekV32ForCausalLM": _Family(),
    "GlmMoeDsaForCausalLM": _Family(eps=1e-5),
    "Glm4vForCausalLM": _Family(qkv_bias=True, output_bias=False, eps=1e-5, post_norms=True, part_rotates="pairs"),
    "GlmOcrForCausalLM": _Family(qkv_bias=False, output_bias=False, eps=1e-5, post_norms=True, part_rotates="pairs"),
    "Glm4vMoeForCausalLM": _Family(output_bias=False, eps=1e-5, attention_bias=True, part_rotates="halves"),
}

_NO_WINDOW = ("LlamaForCausalLM", *LATENT_ARCHITECTURES)
_NO_LAYER_TYPES = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", *LATENT_ARCHITECTURES)
"""Their layers are alike, whatever `layer_types` says."""

_READERS = {**STATE_READERS, **COMPRESSED_READERS}
_NESTING = tuple(each for each in NESTING_ARCHITECTURES if each not in _READERS)

_OTHER_TENSORS = ("exaone",)
"""Model types whose tensors have other names than those of their architecture."""

_ACTIVATIONS: dict[str, ActivationName] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class _RawConfig(RawLatent, kw_only=True):
    """The keys of `config.json` that matter here; others are no concern of inference."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float | None = None
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    attention_bias: bool | None = None
    qkv_bias: bool = True
    swiglu_alpha: float = SWIGLU_ALPHA
    swiglu_limit: float = SWIGLU_LIMIT
    mlp_bias: bool = False
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    rope_theta: float | None = None
    rope_scaling: RawRope | None = None
    rope_local_base_freq: float | None = None
    rope_parameters: msgspec.Raw = field(default_factory=lambda: msgspec.Raw(b"null"))
    sliding_window: int | UnsetType | None = UNSET
    use_sliding_window: bool | None = None
    max_window_layers: int = 28
    sliding_window_pattern: int | None = None
    layer_types: list[str] | None = None
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | UnsetType | None = UNSET
    final_logit_softcapping: float | UnsetType | None = UNSET
    use_bidirectional_attention: bool | None = None
    is_causal: bool | None = None
    input_levels: int = 0


class _RawLayers(Struct, kw_only=True):
    num_hidden_layers: int | None = None
    n_layer: int | None = None
    n_layers: int | None = None
    num_layers: int | None = None


class _RawText(_RawLayers, kw_only=True):
    quantization_config: object = None


class _RawArchitectures(_RawText, kw_only=True):
    architectures: list[str] = field(default_factory=list)
    model_type: str | None = None
    use_bidirectional_attention: bool | str | None = None
    text_config: _RawText | None = None


class _RawGenerationConfig(Struct, kw_only=True):
    eos_token_id: int | list[int] | None = None


def read_model_config(model_dir: Path, *, quantized: bool = False, described: bytes | None = None) -> ModelConfig:
    """The configuration in `model_dir`. Raises ModelError where it is missing, broken or asks for more than we do.

    `quantized`: whether the checkpoint may be; who reads it then asks `quantization.method` how it is. `described`: is
    read in place of `config.json`."""
    path = model_dir / "config.json"
    outline = _outline(path, described)
    parts = (outline, outline.text_config)
    if not quantized and any(part is not None and part.quantization_config is not None for part in parts):
        raise ModelError(f"{path}: quantization_config is set: a checkpoint that is read here may not be quantized")
    whole = next((each for each in outline.architectures if each in _NESTING), None)
    if whole is not None:
        described = _language_model(path, whole, described)
        outline = _outline(path, described)
    other = next((each for each in outline.architectures if each in _READERS), None)
    if other is not None:
        return _read_by_its_own(path, other, described)
    published = next((each for each in outline.architectures if each in PUBLISHED), None)
    if published is not None:
        return _published_config(path, published, described)
    raw = _decode(path, _RawConfig, described)
    headless = not any(each in _FAMILIES for each in raw.architectures)
    raw.architectures = [HEADLESS.get(each, each) for each in raw.architectures]
    if headless:
        raw.tie_word_embeddings = True  # what is never asked for its logits needs no further table
    eos = stop_tokens(model_dir, raw.eos_token_id)
    try:
        return _model_config(raw, eos)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _outline(path: Path, described: bytes | None = None) -> _RawArchitectures:
    config = _decode(path, dict[str, Any], described)
    try:
        refuse_impossible(config)
        return msgspec.convert(config, _RawArchitectures)
    except (ValueError, msgspec.ValidationError) as error:
        raise ModelError(f"{path}: {error}") from None


def _language_model(path: Path, architecture: str, described: bytes | None) -> bytes:
    text = plain_json(path.read_bytes() if described is None else described)
    try:
        read = multi_axis_language_model if architecture in MULTI_AXIS else language_model
        return read(text, architecture, lambda: has_head_tensor(path.parent))
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None


def _read_by_its_own(path: Path, architecture: str, described: bytes | None) -> ModelConfig:
    text = plain_json(path.read_bytes() if described is None else described)
    try:
        return _READERS[architecture](text, architecture, lambda own: stop_tokens(path.parent, own))
    except (ModelError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: {error}") from None


def _published_config(path: Path, architecture: str, described: bytes | None) -> ModelConfig:
    try:
        read = published_config(_decode(path, dict[str, Any], described), architecture)
    except (ModelError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: {error}") from None
    config = read_model_config(path.parent, described=msgspec.json.encode(read.base))
    config = config if read.revised is None else read.revised(config)
    longest = min(config.max_positions, read.longest or config.max_positions)
    layers = config.layers if read.arranged is None else read.arranged(config.layers[0])
    changes = {"layers": layers, **read.changes}
    return msgspec.structs.replace(config, architecture=architecture, max_positions=longest, **changes)


def _decode(path: Path, kind: type[_T], text: bytes | None = None) -> _T:
    try:
        return msgspec.json.decode(plain_json(path.read_bytes() if text is None else text), type=kind, strict=True)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: a Hugging Face model directory is expected") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from None


def stop_tokens(model_dir: Path, own: int | list[int] | None) -> tuple[int, ...]:
    """Those of `generation_config.json`, then the model's `own`. Raises ModelError."""
    path = model_dir / "generation_config.json"
    more = _ids(_decode(path, _RawGenerationConfig).eos_token_id) if path.exists() else ()
    return tuple(dict.fromkeys(more + _ids(own)))


def is_native(model_dir: Path) -> bool:
    """Whether the model is of an architecture that is read here, as a decoder. Raises ModelError where there is no
    configuration, or one with numbers that no model has."""
    raw = _outline(model_dir / "config.json")
    known = (*_FAMILIES, *HEADLESS, *_READERS, *PUBLISHED, *_NESTING)
    other = raw.model_type in _OTHER_TENSORS and not any(each in PUBLISHED for each in raw.architectures)
    if raw.use_bidirectional_attention or other:
        return False
    return any(each in known for each in raw.architectures)


def architectures_of(model_dir: Path) -> list[str]:
    """Those that the configuration names. Raises ModelError."""
    return _decode(model_dir / "config.json", _RawArchitectures).architectures


def has_head(model_dir: Path) -> bool:
    """Whether a model that is read here has a language model head. Raises ModelError."""
    known = (*_FAMILIES, *_READERS, *PUBLISHED, *_NESTING)
    return any(each in known for each in architectures_of(model_dir))


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _model_config(raw: _RawConfig, eos: tuple[int, ...]) -> ModelConfig:
    architecture, family = _family(raw)
    _refuse_unsupported(raw)
    mixing, latent = _checked(read_mixture, raw), _checked(read_latent, raw)
    heads = _heads(raw, family, latent)
    ropes = _ropes(raw, family)
    layers = _layers(raw, family, mixing, ropes)
    if raw.input_levels >= len(layers):
        raise ModelError(
            f"deepstack_visual_indexes has {raw.input_levels} levels, which is not below {len(layers)} layers"
        )
    return ModelConfig(
        architecture=architecture,
        dtype=dtype_named(raw.dtype or raw.torch_dtype),
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_heads=raw.num_attention_heads,
        num_kv_heads=heads.kv_heads,
        head_dim=heads.dim,
        layers=layers,
        # Gemma 3 and gpt-oss state positions with interpolation already applied; the others state those before it.
        max_positions=raw.max_position_embeddings if family.gemma or family.scaled_positions else ropes.max_positions,
        norm_eps=family.eps if raw.rms_norm_eps is None else raw.rms_norm_eps,
        activation=_activation(raw, family),
        attention_scale=heads.scaled_by**-0.5 * (1.0 if latent is None else ropes.latent_scale),
        attention_softcap=_softcap(raw.attn_logit_softcapping, architecture, 50.0),
        logits_softcap=_softcap(raw.final_logit_softcapping, architecture, 30.0),
        qkv_bias=_qkv_bias(raw, family),
        output_bias=_attention_bias(raw, family) if family.output_bias is None else family.output_bias,
        mlp_bias=raw.mlp_bias and architecture == "LlamaForCausalLM",
        qk_norm=family.qk_norm,
        post_norms=family.gemma or family.post_norms,
        norm_offset=family.gemma,
        embedding_scale=raw.hidden_size**0.5 if family.gemma else None,
        tied_embeddings=family.gemma if raw.tie_word_embeddings is None else raw.tie_word_embeddings,
        eos_token_ids=eos,
        attention_sinks=family.sinks,
        mixture=mixing.mixture,
        latent=latent,
        rotary_dim=ropes.rotated_of(heads.dim),
        rotary_pairs=family.part_rotates == "pairs",
        rope_axes=ropes.axes_of(heads.dim),
        input_levels=raw.input_levels,
    )


class _Heads(NamedTuple):
    kv_heads: int
    """That are cached."""
    dim: int
    """Elements of each of them."""
    scaled_by: float
    """Scores are divided by its square root."""


def _heads(raw: _RawConfig, family: _Family, latent: LatentConfig | None) -> _Heads:
    if latent is not None:
        return _Heads(1, latent.cached_dim, float(latent.query_dim))
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % kv_heads:
        raise ModelError(f"num_attention_heads {raw.num_attention_heads} is no multiple of {kv_heads} KV heads")
    dim = raw.head_dim or _default_head_dim(raw, family)
    return _Heads(kv_heads, dim, float(raw.query_pre_attn_scalar if family.gemma else dim))


def _attention_bias(raw: _RawConfig, family: _Family) -> bool:
    return family.attention_bias if raw.attention_bias is None else raw.attention_bias


def _qkv_bias(raw: _RawConfig, family: _Family) -> bool:
    if family.qkv_bias is not None:
        return family.qkv_bias
    return raw.qkv_bias if family.qkv_bias_key == "qkv_bias" else _attention_bias(raw, family)


def _family(raw: _RawConfig) -> tuple[str, _Family]:
    for architecture in raw.architectures:
        if architecture in _FAMILIES:
            return architecture, _FAMILIES[architecture]
    raise ModelError(f"architectures {raw.architectures!r} is not supported; supported: {', '.join(_FAMILIES)}")


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def _refuse_unsupported(raw: _RawConfig) -> None:
    if raw.is_causal is False:
        raise ModelError("is_causal false is not supported: only causal attention is")
    if raw.use_bidirectional_attention:
        raise ModelError("use_bidirectional_attention true is not supported: only causal attention is")
    if raw.mlp_bias and raw.architectures[0] == "DeepseekV2ForCausalLM":
        raise ModelError("mlp_bias true is not supported for DeepseekV2ForCausalLM")
    if raw.swiglu_alpha != SWIGLU_ALPHA:
        raise ModelError(f"swiglu_alpha {raw.swiglu_alpha} is not supported; {SWIGLU_ALPHA} is")
    for key in _POSITIVE:
        value = getattr(raw, key)
        if value is not None and value < 1:
            raise ModelError(f"{key} {value} is not positive")


def _default_head_dim(raw: _RawConfig, family: _Family) -> int:
    if family.head_dim_default is not None:
        return family.head_dim_default
    if raw.hidden_size % raw.num_attention_heads:
        raise ModelError(f"hidden_size {raw.hidden_size} is no multiple of {raw.num_attention_heads} heads")
    return raw.hidden_size // raw.num_attention_heads


def _activation(raw: _RawConfig, family: _Family) -> Activation:
    name = (raw.hidden_activation or "gelu_pytorch_tanh") if family.gemma else raw.hidden_act
    if name not in _ACTIVATIONS:
        raise ModelError(f"hidden_act {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    if family.activation is not None:
        return limited_activation(family.activation, raw.swiglu_limit)
    if raw.swiglu_limit != SWIGLU_LIMIT:
        raise ModelError(f"swiglu_limit {raw.swiglu_limit} is not supported for {raw.architectures[0]}")
    return _ACTIVATIONS[name]


def _softcap(value: float | UnsetType | None, architecture: str, gemma2: float) -> float | None:
    if isinstance(value, UnsetType):
        return gemma2 if architecture == "Gemma2ForCausalLM" else None
    return value or None


def _checked(read: Callable[[_RawConfig], _T], raw: _RawConfig) -> _T:
    try:
        return read(raw)
    except ValueError as error:
        raise ModelError(str(error)) from None


def _ropes(raw: _RawConfig, family: _Family) -> Ropes:
    return read_ropes(
        parameters=raw.rope_parameters,
        scaling=raw.rope_scaling or (family.rope if raw.rope_parameters == b"null" else None),
        theta=raw.rope_theta if raw.rope_theta is not None else family.theta,
        local_theta=(raw.rope_local_base_freq or family.local_theta) if family.local_theta else None,
        positions=raw.max_position_embeddings,
        partly=family.part_rotates is not None,
        longrope=raw.architectures[0] == "LlamaForCausalLM",
    )


def _layers(raw: _RawConfig, family: _Family, mixing: MixtureLayers, ropes: Ropes) -> tuple[LayerConfig, ...]:
    window = _window(raw, family)
    return tuple(
        LayerConfig(window, ropes.sliding, mixes) if slides else LayerConfig(None, ropes.full, mixes)
        for slides, mixes in zip(_sliding_layers(raw, family, window is not None), mixing.mixing, strict=True)
    )


def _window(raw: _RawConfig, family: _Family) -> int | None:
    if raw.architectures[0].startswith("Qwen") and not raw.use_sliding_window:
        return None
    if raw.architectures[0] in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLMoeForCausalLM"):
        # Versions of transformers differ in which of their layers slide.
        raise ModelError(f"use_sliding_window true is not supported for {raw.architectures[0]}")
    window = family.window_default if isinstance(raw.sliding_window, UnsetType) else raw.sliding_window
    if window is not None and window < 1:
        raise ModelError(f"sliding_window {window} is not positive")
    return None if raw.architectures[0] in _NO_WINDOW else window


def _sliding_layers(raw: _RawConfig, family: _Family, has_window: bool) -> list[bool]:
    """For each layer, whether it is a sliding one (of a windowless Gemma 3, for its RoPE alone)."""
    count = raw.num_hidden_layers
    if raw.layer_types is not None and raw.architectures[0] not in _NO_LAYER_TYPES:
        return _read_layer_types(raw.layer_types, count)
    if family.window_period is not None:
        period = raw.sliding_window_pattern or family.window_period
        return [bool((i + 1) % period) for i in range(count)]
    if raw.architectures[0].startswith("Qwen"):
        return [has_window and i >= raw.max_window_layers for i in range(count)]
    return [has_window] * count


def _read_layer_types(names: list[str], count: int) -> list[bool]:
    unknown = sorted(set(names) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelError(f"layer_types {unknown[0]!r} is not supported")
    if len(names) != count:
        raise ModelError(f"layer_types names {len(names)} layers, num_hidden_layers {count}")
    return [name == "sliding_attention" for name in names]
