"""Reads the `config.json` of RecurrentGemma: recurrent units, and layers that attend to a window."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
from msgspec import Struct

from services.worker.models.config import LayerConfig, ModelConfig, ModelError, RecurrentConfig, require_positive
from services.worker.models.hf_layers.selective import RECURRENT_GEMMA
from services.worker.models.hf_rope import read_ropes
from services.worker.models.rope import Rope
from services.worker.models.states.reading.model import head_dim_of, model_with_states, require_kernel

_POSITIONS = 8192
"""Tokens of the longest sequence where the config says nothing of it: those that the published models learned by."""
_BLOCK_TYPES = {"recurrent": True, "attention": False}
_ACTIVATION = "gelu_pytorch_tanh"
_ROTATED = 0.5


class _RawRecurrent(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 256000
    hidden_size: int = 2560
    intermediate_size: int = 7680
    """Twice the columns of an MLP."""
    num_hidden_layers: int = 26
    num_attention_heads: int = 10
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    lru_width: int | None = None
    attention_window_size: int = 2048
    conv1d_width: int = 4
    logits_soft_cap: float = 30.0
    rms_norm_eps: float = 1e-6
    hidden_activation: str = _ACTIVATION
    embeddings_scale_by_sqrt_dim: bool = True
    """Of its first release."""
    block_types: list[str] = msgspec.field(default_factory=lambda: ["recurrent", "recurrent", "attention"])
    """Of the first layers, again and again."""
    attention_bias: bool = False
    max_position_embeddings: int = _POSITIONS
    partial_rotary_factor: float | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, object] | None = None
    tie_word_embeddings: bool = True
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = 1


def recurrent_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. `stop_tokens`: what ends its texts, given those that the config names. Raises
    ModelError, and msgspec's errors."""
    assert architecture == RECURRENT_GEMMA
    raw = msgspec.json.decode(text, type=_RawRecurrent, strict=True)
    heads = raw.num_attention_heads
    kv_heads = heads if raw.num_key_value_heads is None else raw.num_key_value_heads
    width = raw.hidden_size if raw.lru_width is None else raw.lru_width
    _refuse_unsupported(raw, width)
    head_dim = head_dim_of(raw.hidden_size, heads, kv_heads, None)
    if raw.head_dim not in (None, head_dim):
        raise ModelError(f"head_dim {raw.head_dim}: {heads} heads of so many are not hidden_size {raw.hidden_size}")
    rope, rotated = _rotation(raw, head_dim)
    config = model_with_states(
        *(raw, architecture),
        layers=_layers(raw, rope),
        states=RecurrentConfig(heads=width, kernel=raw.conv1d_width, block=width // heads),
        max_positions=raw.max_position_embeddings,
        norm_eps=raw.rms_norm_eps,
        eos=stop_tokens(raw.eos_token_id),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=raw.intermediate_size // 2,
        activation="gelu_tanh",
        attention_bias=raw.attention_bias,
        mlp_bias=True,
        norm_offset=True,
        embedding_scale=_as_bfloat16(raw.hidden_size**0.5),
        rotary_dim=rotated,
    )
    return msgspec.structs.replace(config, output_bias=True, scales_inputs=True, logits_softcap=raw.logits_soft_cap)


def _as_bfloat16(number: float) -> float:
    """The nearest number of that type, whatever the model's is; of two the even one."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)


def _layers(raw: _RawRecurrent, rope: Rope) -> tuple[LayerConfig, ...]:
    for name in raw.block_types:
        if name not in _BLOCK_TYPES:
            raise ModelError(f"block_types {name!r} is not supported; supported: {', '.join(_BLOCK_TYPES)}")
    kinds = [raw.block_types[number % len(raw.block_types)] for number in range(raw.num_hidden_layers)]
    if "recurrent" not in kinds:
        raise ModelError("block_types: no layer is recurrent")
    return tuple(LayerConfig(raw.attention_window_size, rope, has_state=_BLOCK_TYPES[kind]) for kind in kinds)


def _rotation(raw: _RawRecurrent, head_dim: int) -> tuple[Rope, int]:
    """How heads are rotated, and so many of their elements."""
    given = dict(raw.rope_parameters or {})
    share = given.pop("partial_rotary_factor", raw.partial_rotary_factor)
    share = _ROTATED if share is None else share
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ModelError(f"partial_rotary_factor {share!r} is no number from above 0 to 1")
    kind = given.get("rope_type", "default")
    if kind != "default":
        raise ModelError(f"rope_type {kind!r} is not supported; supported: default")
    rotated = int(head_dim * share)
    if rotated % 2 or head_dim % 2:
        raise ModelError(f"partial_rotary_factor {share}: {rotated} elements of {head_dim} are no pairs")
    ropes = read_ropes(
        parameters=msgspec.Raw(msgspec.json.encode(given or None)),
        scaling=None,
        theta=10_000.0 if raw.rope_theta is None else raw.rope_theta,
        local_theta=None,
        positions=raw.max_position_embeddings,
    )
    return ropes.full, rotated


def _refuse_unsupported(raw: _RawRecurrent, width: int) -> None:
    require_positive(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_hidden_layers=raw.num_hidden_layers,
        num_attention_heads=raw.num_attention_heads,
        lru_width=width,
        attention_window_size=raw.attention_window_size,
        max_position_embeddings=raw.max_position_embeddings,
        block_types=len(raw.block_types),
    )
    require_kernel("conv1d_width", raw.conv1d_width)
    if raw.intermediate_size % 2:
        raise ModelError(f"intermediate_size {raw.intermediate_size} is not even")
    if width % raw.num_attention_heads:
        raise ModelError(f"lru_width {width} does not divide by num_attention_heads {raw.num_attention_heads}")
    if raw.logits_soft_cap <= 0:
        raise ModelError(f"logits_soft_cap {raw.logits_soft_cap} is not positive")
    if raw.hidden_activation != _ACTIVATION:
        raise ModelError(f"hidden_activation {raw.hidden_activation!r} is not supported; supported: {_ACTIVATION}")
    if not raw.embeddings_scale_by_sqrt_dim:
        raise ModelError("embeddings_scale_by_sqrt_dim false is not supported; supported: true")
