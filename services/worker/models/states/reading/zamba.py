"""Reads the `config.json` of Zamba2: Mamba-2 layers, and before some of them a block that several of these share."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from services.worker.models.config import (
    LayerConfig,
    MambaConfig,
    ModelConfig,
    ModelError,
    SharedBlocks,
    layer_kinds,
    require_positive,
)
from services.worker.models.hf_layers.shared import FED_MIXER, SHARED_BLOCK, ZAMBA2
from services.worker.models.hf_rope import RawRope, read_ropes
from services.worker.models.rope import Rope
from services.worker.models.states.reading.model import NO_ROPE, model_with_states, require_kernel

_MIXER_EPS = 1e-5
"""Of the norm behind a mixer, whatever the config says of others; so `transformers` has it."""
_DEFAULT_LAYERS = 54
_PATTERN = (6, 12, 18, 24, 30, 36, 42, 47, 51)
"""The layers with a block, of so many, where the config does not say."""
_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
_MLP_SHARE = 4
"""Columns of the MLP for each element of a row where the config does not say."""


class _RawZamba2(Struct, kw_only=True):
    """Defaults are those of `transformers`."""

    vocab_size: int = 32000
    max_position_embeddings: int = 4096
    hidden_size: int = 2560
    num_hidden_layers: int = 54
    layers_block_type: list[str] | None = None
    layer_types: list[str] | None = None
    mamba_d_state: int = 64
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_ngroups: int = 1
    n_mamba_heads: int = 8
    add_bias_linear: bool = False
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    attention_head_dim: int | None = None
    head_dim: int | None = None
    attention_hidden_size: int | None = None
    mamba_headdim: int | None = None
    num_mem_blocks: int = 1
    use_shared_attention_adapter: bool = False
    adapter_rank: int = 128
    use_mem_rope: bool = False
    rope_theta: float | None = None
    rope_scaling: RawRope | None = None
    rope_parameters: dict[str, object] | None = None
    rms_norm_eps: float = 1e-5
    use_long_context: bool = False
    tie_word_embeddings: bool = True
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = 2


def zamba_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. `stop_tokens`: what ends its texts, given those that the config names. Raises
    ModelError, and msgspec's errors."""
    assert architecture == ZAMBA2
    raw = msgspec.json.decode(text, type=_RawZamba2, strict=True)
    heads = raw.num_attention_heads
    kv_heads = heads if raw.num_key_value_heads is None else raw.num_key_value_heads
    intermediate_size = _MLP_SHARE * raw.hidden_size if raw.intermediate_size is None else raw.intermediate_size
    head_dim = _head_dim(raw)
    _refuse_unsupported(raw, kv_heads, intermediate_size, head_dim)
    rope, positions = _rotation(raw)
    config = model_with_states(
        *(raw, architecture),
        layers=_layers(raw, rope),
        states=_mamba(raw),
        max_positions=positions,
        norm_eps=raw.rms_norm_eps,
        eos=stop_tokens(raw.eos_token_id),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        rotary_dim=None if raw.use_mem_rope else 0,
    )
    shared = SharedBlocks(
        blocks=raw.num_mem_blocks,
        adapter_rank=raw.adapter_rank,
        adapts_attention=raw.use_shared_attention_adapter,
    )
    # Of heads of twice the width half the elements would be a row's own.
    return msgspec.structs.replace(config, shared=shared, attention_scale=(head_dim / 2) ** -0.5)


def _head_dim(raw: _RawZamba2) -> int:
    """Elements of a head that attends."""
    require_positive(hidden_size=raw.hidden_size, num_attention_heads=raw.num_attention_heads)
    known = raw.head_dim if raw.attention_head_dim is None else raw.attention_head_dim
    return 2 * raw.hidden_size // raw.num_attention_heads if known is None else known


def _layers(raw: _RawZamba2, rope: Rope) -> tuple[LayerConfig, ...]:
    layers: list[LayerConfig] = []
    depth = 0
    for number, has_block in enumerate(_with_blocks(raw)):
        if has_block:
            layers.append(LayerConfig(None, rope, blocks=(number, number), part=SHARED_BLOCK, depth=depth))
            depth += 1
        layers.append(
            LayerConfig(
                *(None, NO_ROPE),
                has_state=True,
                has_mlp=False,
                blocks=(number, number),
                part=FED_MIXER if has_block else None,
            )
        )
    return tuple(layers)


def _with_blocks(raw: _RawZamba2) -> list[bool]:
    """For each of the checkpoint's layers, whether it has a block."""
    key = "layers_block_type" if raw.layers_block_type is not None else "layer_types"
    names = raw.layer_types if raw.layers_block_type is None else raw.layers_block_type
    count = raw.num_hidden_layers
    if names is None:
        if count != _DEFAULT_LAYERS:
            raise ModelError(f"layers_block_type is missing, which says what each of {count} layers is")
        return [number in _PATTERN for number in range(count)]
    found = layer_kinds(key, names, _KINDS, count)
    if not any(found):
        raise ModelError(f"{key}: no layer is hybrid")
    return found


def _mamba(raw: _RawZamba2) -> MambaConfig:
    return MambaConfig(
        heads=raw.n_mamba_heads,
        head_dim=raw.mamba_expand * raw.hidden_size // raw.n_mamba_heads,
        groups=raw.mamba_ngroups,
        state_dim=raw.mamba_d_state,
        kernel=raw.mamba_d_conv,
        conv_bias=True,
        bias=False,
    )


def _rotation(raw: _RawZamba2) -> tuple[Rope, int]:
    """(how heads are rotated, tokens of the longest sequence)."""
    if not raw.use_mem_rope:
        return NO_ROPE, raw.max_position_embeddings
    ropes = read_ropes(
        parameters=msgspec.Raw(msgspec.json.encode(raw.rope_parameters or None)),
        scaling=raw.rope_scaling,
        theta=10_000.0 if raw.rope_theta is None else raw.rope_theta,
        local_theta=None,
        positions=raw.max_position_embeddings,
    )
    return ropes.full, ropes.max_positions


def _refuse_unsupported(raw: _RawZamba2, kv_heads: int, intermediate_size: int, head_dim: int) -> None:
    heads, inner = raw.num_attention_heads, raw.mamba_expand * raw.hidden_size
    require_positive(
        vocab_size=raw.vocab_size,
        num_hidden_layers=raw.num_hidden_layers,
        intermediate_size=intermediate_size,
        num_key_value_heads=kv_heads,
        attention_head_dim=head_dim,
        max_position_embeddings=raw.max_position_embeddings,
        num_mem_blocks=raw.num_mem_blocks,
        adapter_rank=raw.adapter_rank,
        n_mamba_heads=raw.n_mamba_heads,
        mamba_expand=raw.mamba_expand,
        mamba_ngroups=raw.mamba_ngroups,
        mamba_d_state=raw.mamba_d_state,
    )
    require_kernel("mamba_d_conv", raw.mamba_d_conv)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is no multiple of {kv_heads} KV heads")
    if raw.attention_hidden_size not in (None, 2 * raw.hidden_size):
        raise ModelError(
            f"attention_hidden_size {raw.attention_hidden_size} is not twice hidden_size {raw.hidden_size}"
        )
    if head_dim % 2:
        raise ModelError(f"attention_head_dim {head_dim} is not even")
    if inner % raw.n_mamba_heads:
        raise ModelError(f"n_mamba_heads {raw.n_mamba_heads}: {inner} elements do not divide by it")
    if raw.mamba_headdim not in (None, inner // raw.n_mamba_heads):
        raise ModelError(f"mamba_headdim {raw.mamba_headdim}: {raw.n_mamba_heads} heads of so many are not {inner}")
    if raw.n_mamba_heads % raw.mamba_ngroups:
        raise ModelError(f"mamba_ngroups {raw.mamba_ngroups}: {raw.n_mamba_heads} heads do not divide by it")
    if raw.hidden_act != "gelu":
        raise ModelError(f"hidden_act {raw.hidden_act!r} is not supported; supported: gelu")
    if raw.rms_norm_eps != _MIXER_EPS:
        raise ModelError(
            f"rms_norm_eps {raw.rms_norm_eps} is not supported; supported: {_MIXER_EPS}, which mixers have"
        )
    if not raw.tie_word_embeddings:
        # The library has blocks of each layer's own then, vLLM has shared ones.
        raise ModelError("tie_word_embeddings false is not supported; supported: true")
    if raw.add_bias_linear:
        raise ModelError("add_bias_linear true is not supported")
    if raw.use_shared_attention_adapter and not kv_heads * head_dim == heads * head_dim == 2 * raw.hidden_size:
        raise ModelError(
            f"use_shared_attention_adapter: {heads} heads, and {kv_heads} KV heads, of {head_dim} elements are not "
            f"twice hidden_size {raw.hidden_size}, as what it adds to all of them"
        )
    if raw.use_long_context:
        # Versions of transformers differ in the base of its rotation.
        raise ModelError("use_long_context true is not supported; supported: false")
