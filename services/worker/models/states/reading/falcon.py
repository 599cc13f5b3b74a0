"""Reads the `config.json` of Falcon-H1, whose every layer has a Mamba-2 mixer and attention side by side."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.models.config import (
    LayerConfig,
    MambaConfig,
    ModelConfig,
    ModelError,
    Multipliers,
    require_positive,
)
from services.worker.models.states.reading.mamba import RawHybrid, decode_mamba, read_attention
from services.worker.models.states.reading.model import model_with_states, require_kernel


class _RawFalconH1(RawHybrid, kw_only=True):
    """Defaults are those of `transformers`."""

    intermediate_size: int = 14336
    rms_norm_eps: float = 1e-5
    mamba_d_ssm: int | None = 1024
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    projectors_bias: bool = False
    mlp_bias: bool = False
    lm_head_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] | None = None
    key_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    ssm_multipliers: tuple[float, float, float, float, float] | None = None
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0


def falcon_model_config(
    text: bytes, architecture: str, stop_tokens: Callable[[int | list[int] | None], tuple[int, ...]]
) -> ModelConfig:
    """What `text`, a `config.json`, says. A layer of the checkpoint is two here: the mixer, and beside it attention,
    with the MLP behind both. `stop_tokens`: what ends its texts, given those that the config names. Raises ModelError,
    and msgspec's errors."""
    raw = decode_mamba(text, _RawFalconH1)
    _refuse_unsupported(raw)
    head_dim, rope, positions = read_attention(raw, rotates=True)
    blocks = [(number, number) for number in range(raw.num_hidden_layers)]
    return model_with_states(
        *(raw, architecture),
        layers=tuple(
            LayerConfig(None, rope, has_state=not attends, beside=attends, has_mlp=attends, blocks=block)
            for block in blocks
            for attends in (False, True)
        ),
        states=_mamba(raw),
        max_positions=positions,
        norm_eps=raw.rms_norm_eps,
        eos=stop_tokens(raw.eos_token_id),
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=raw.intermediate_size,
        embedding_scale=None if raw.embedding_multiplier == 1 else raw.embedding_multiplier,
        logits_divisor=None if raw.lm_head_multiplier == 1 else 1 / raw.lm_head_multiplier,
        multipliers=_multipliers(raw),
    )


def _mamba(raw: _RawFalconH1) -> MambaConfig:
    inner = raw.mamba_expand * raw.hidden_size if raw.mamba_d_ssm is None else raw.mamba_d_ssm
    dim = raw.mamba_d_head if isinstance(raw.mamba_d_head, int) else inner // raw.mamba_n_heads
    if raw.mamba_n_heads * dim != inner:
        raise ModelError(f"mamba_n_heads {raw.mamba_n_heads} of {dim} elements are not mamba_d_ssm {inner}")
    if raw.mamba_n_heads % raw.mamba_n_groups:
        raise ModelError(f"mamba_n_groups {raw.mamba_n_groups}: {raw.mamba_n_heads} heads do not divide by it")
    return MambaConfig(
        heads=raw.mamba_n_heads,
        head_dim=dim,
        groups=raw.mamba_n_groups,
        state_dim=raw.mamba_d_state,
        kernel=raw.mamba_d_conv,
        conv_bias=raw.mamba_conv_bias,
        bias=False,
        normed=raw.mamba_rms_norm,
    )


def _multipliers(raw: _RawFalconH1) -> Multipliers:
    gate, x, b, c, steps = (raw.ssm_in_multiplier * each for each in raw.ssm_multipliers or (1.0,) * 5)
    mlp_gate, down = raw.mlp_multipliers or (1.0, 1.0)
    attention = raw.attention_in_multiplier
    return Multipliers(
        mixer_inputs=(gate, x, b, c, steps),
        mixer_output=raw.ssm_out_multiplier,
        attention_inputs=(attention, attention * raw.key_multiplier, attention),
        attention_output=raw.attention_out_multiplier,
        gate=mlp_gate,
        down=down,
    )


def _refuse_unsupported(raw: _RawFalconH1) -> None:
    require_positive(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_hidden_layers=raw.num_hidden_layers,
        max_position_embeddings=raw.max_position_embeddings,
        mamba_n_heads=raw.mamba_n_heads,
        mamba_n_groups=raw.mamba_n_groups,
        mamba_d_state=raw.mamba_d_state,
    )
    for key in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        if getattr(raw, key):
            raise ModelError(f"{key} true is not supported")
    require_kernel("mamba_d_conv", raw.mamba_d_conv)
    if raw.mamba_rms_norm and raw.mamba_norm_before_gate:
        raise ModelError("mamba_norm_before_gate true is not supported with mamba_rms_norm; supported: false")
    if not raw.lm_head_multiplier:
        raise ModelError("lm_head_multiplier 0 is not supported: all logits would be alike")
