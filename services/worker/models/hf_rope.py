"""Reads RoPE's parameters from a Hugging Face config, in the old spelling and the new one."""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.worker.models.config import ModelError
from services.worker.models.rope import (
    FactoredRope,
    LinearRope,
    Llama3Rope,
    PlainRope,
    ProportionalRope,
    Rope,
    YarnRope,
    yarn_magnitude,
    yarn_mscale,
)
from shared.messages.generation import POSITION_AXES

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
"""Of any model; `longrope` and `proportional` are of those whose reader knows of them."""


class RawRope(Struct, kw_only=True, omit_defaults=True):
    """`rope_scaling`, or one entry of `rope_parameters`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: list[float] | None = None
    partial_rotary_factor: float | None = None
    mrope_section: list[int] | None = None
    mrope_interleaved: bool = False


class _ByLayerType(Struct, kw_only=True):
    full_attention: RawRope | None = None
    sliding_attention: RawRope | None = None


class Ropes(Struct, frozen=True):
    """The rotation of layers that see everything and of those that see a window (mostly the same)."""

    full: Rope
    sliding: Rope
    max_positions: int
    """The context that `full` was made for."""
    latent_scale: float = 1.0
    """What scores of latent attention are multiplied by besides: `mscale_all_dim` of YaRN, squared."""
    axes: tuple[int, ...] = ()
    """See `ModelConfig.rope_axes`; of what is rotated."""
    share: float = 1.0
    """How much of a head is rotated."""

    def rotated_of(self, head_dim: int) -> int | None:
        """See `ModelConfig.rotary_dim`. Raises ModelError where these are no pairs, or LongRoPE has factors of another
        number."""
        rotated, full = int(head_dim * self.share), self.full
        if isinstance(full, FactoredRope) and 2 * len(full.factors) != rotated:
            raise ModelError(f"short_factor has {len(full.factors)} numbers, {rotated} rotated elements half as many")
        if self.share == 1.0:
            return None
        if rotated % 2 or head_dim % 2 or not 0 < rotated < head_dim:
            raise ModelError(f"partial_rotary_factor {self.share}: {rotated} of {head_dim} elements are no pairs")
        return rotated

    def axes_of(self, head_dim: int) -> tuple[int, ...]:
        """See `ModelConfig.rope_axes`. Elements that are not rotated stay as they are by any axis. Raises ModelError
        where there are others than there are frequencies."""
        rotated = self.rotated_of(head_dim) or head_dim
        if self.axes and 2 * len(self.axes) != rotated:
            raise ModelError(
                f"mrope_section has {len(self.axes)} frequencies, {rotated} rotated elements of a head half as many"
            )
        return self.axes and self.axes + (0,) * ((head_dim - rotated) // 2)


def read_ropes(
    *,
    parameters: msgspec.Raw,
    scaling: RawRope | None,
    theta: float,
    local_theta: float | None,
    positions: int,
    partly: bool = False,
    longrope: bool = False,
    proportional: bool = False,
) -> Ropes:
    """Both rotations. `partly`: heads may be rotated in part. `longrope`: whoever asks serves no more than
    `Ropes.max_positions`, and asks for `Ropes.rotated_of`. `proportional`: some frequencies of a head may rotate
    nothing. `theta` and `local_theta` hold where the parameters name no base; without `local_theta`, sliding layers
    rotate as the others do. Raises ModelError for a kind of scaling that is not supported."""
    flat, nested = _decode(parameters)
    full_raw = scaling or flat or (nested.full_attention if nested else None) or RawRope()
    share = full_raw.partial_rotary_factor if partly else None
    full = _rope(replace(full_raw, partial_rotary_factor=None) if partly else full_raw, theta, positions)
    if local_theta is not None:
        sliding = _rope((nested.sliding_attention if nested else None) or RawRope(), local_theta, positions)
    else:
        sliding = _rope(nested.sliding_attention, theta, positions) if nested and nested.sliding_attention else full
    factored = any(isinstance(each, FactoredRope) for each in (full, sliding))
    if factored and not (longrope and sliding is full):
        raise ModelError(f"rope_type 'longrope' is not supported for this architecture; supported: {', '.join(_KINDS)}")
    if not proportional and any(isinstance(each, ProportionalRope) for each in (full, sliding)):
        raise ModelError(
            f"rope_type 'proportional' is not supported for this architecture; supported: {', '.join(_KINDS)}"
        )
    return Ropes(
        *(
            full,
            sliding,
            _max_positions(full, positions, full_raw.original_max_position_embeddings),
            _latent_scale(full_raw),
            _axes(full_raw),
        ),
        share=1.0 if share is None else share,
    )


def _axes(raw: RawRope) -> tuple[int, ...]:
    """Sections follow one another; or they are interleaved, where what the first two axes leave is the last one's, as
    `transformers` has it for Qwen3-VL."""
    sections = raw.mrope_section
    if not sections:
        return ()
    if len(sections) != POSITION_AXES or min(sections) < 0:
        raise ModelError(f"mrope_section {sections} is not supported; {POSITION_AXES} numbers of frequencies are")
    if not raw.mrope_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * sum(sections)
    for axis in range(1, POSITION_AXES):
        for place in range(axis, min(len(axes), POSITION_AXES * sections[axis]), POSITION_AXES):
            axes[place] = axis
    return tuple(axes)


def _decode(parameters: msgspec.Raw) -> tuple[RawRope | None, _ByLayerType | None]:
    """`rope_parameters` as either one set of parameters or one set for each type of layer."""
    keys = msgspec.json.decode(parameters)
    if keys is None:
        return None, None
    try:
        if isinstance(keys, dict) and keys.keys() & {"full_attention", "sliding_attention"}:
            return None, msgspec.convert(keys, _ByLayerType)
        return msgspec.convert(keys, RawRope), None
    except msgspec.ValidationError as error:
        raise ModelError(f"rope_parameters: {error}") from None


def _rope(raw: RawRope, default_theta: float, positions: int) -> Rope:
    theta = default_theta if raw.rope_theta is None else raw.rope_theta
    if (raw.rope_type or raw.type) == "proportional":
        return _proportional(raw, theta)
    if raw.partial_rotary_factor not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor {raw.partial_rotary_factor} is not supported")
    match raw.rope_type or raw.type or "default":
        case "default":
            return PlainRope(theta)
        case "dynamic":
            # Up to the trained length, dynamic NTK scaling is no scaling; beyond it, keys already cached would have
            # been rotated by another base. So it is served up to that length, exactly.
            return PlainRope(theta)
        case "linear":
            return LinearRope(theta, _need(raw, "factor"))
        case "llama3":
            return Llama3Rope(
                theta=theta,
                factor=_need(raw, "factor"),
                low_freq_factor=_need(raw, "low_freq_factor"),
                high_freq_factor=_need(raw, "high_freq_factor"),
                original_positions=raw.original_max_position_embeddings or positions,
            )
        case "yarn":
            return _yarn(raw, theta, positions)
        case "longrope":
            return _longrope(raw, theta, positions)
        case other:
            raise ModelError(f"rope_type {other!r} is not supported; supported: {', '.join(_KINDS)}, longrope")


def _proportional(raw: RawRope, theta: float) -> ProportionalRope:
    share = 1.0 if raw.partial_rotary_factor is None else raw.partial_rotary_factor
    if not 0 <= share <= 1:
        raise ModelError(f"partial_rotary_factor {share} is not between 0 and 1")
    return ProportionalRope(theta, share, 1.0 if raw.factor is None else _need(raw, "factor"))


def _yarn(raw: RawRope, theta: float, positions: int) -> YarnRope:
    original = raw.original_max_position_embeddings or positions
    factor = positions / original if raw.factor is None else raw.factor
    magnitude = raw.attention_factor
    if magnitude is None:
        magnitude = yarn_magnitude(factor, raw.mscale, raw.mscale_all_dim)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_positions=original,
        beta_fast=raw.beta_fast or 32.0,
        beta_slow=raw.beta_slow or 1.0,
        magnitude=magnitude,
        truncate=raw.truncate,
    )


def _longrope(raw: RawRope, theta: float, positions: int) -> FactoredRope:
    """Behind the length that was trained first, keys that are cached would have been rotated by other factors. Some
    configs say that length elsewhere: they are refused, for they would be read as models of one length."""
    if not raw.short_factor or min(raw.short_factor) <= 0:
        raise ModelError("rope_type longrope needs short_factor: a positive number for each frequency")
    original = raw.original_max_position_embeddings
    if original is None or original < 2:
        raise ModelError(f"rope_type longrope: original_max_position_embeddings {original} is no number above 1")
    factor = positions / original if raw.factor is None else raw.factor
    magnitude = raw.attention_factor
    if magnitude is None:
        magnitude = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return FactoredRope(theta, tuple(raw.short_factor), magnitude)


def _latent_scale(raw: RawRope) -> float:
    if (raw.rope_type or raw.type or "default") == "default" or not raw.mscale_all_dim or raw.factor is None:
        return 1.0
    return yarn_mscale(raw.factor, raw.mscale_all_dim) ** 2


def _need(raw: RawRope, key: str) -> float:
    value: float | None = getattr(raw, key)
    if value is None:
        raise ModelError(f"rope_type {raw.rope_type or raw.type!r} needs {key}")
    if value <= 0:
        raise ModelError(f"{key} {value} is not positive")
    return value


def _max_positions(rope: Rope, positions: int, original: int | None) -> int:
    if isinstance(rope, FactoredRope):
        return min(positions, original or positions)
    if isinstance(rope, LinearRope):
        return int(positions * rope.factor)
    if isinstance(rope, YarnRope):
        return max(positions, int(rope.original_positions * rope.factor))
    return positions
