"""A model's sizes, read from its config alone: what a step of it costs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from services.worker.backend import BackendError
from services.worker.sim.accelerator import Load

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class _Raw(Struct):
    """The keys of `config.json` that sizes follow from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None


class _RawGeneration(Struct):
    eos_token_id: int | list[int] | None = None


class ModelShape(Struct, frozen=True, kw_only=True):
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    """Of the matrix multiplications with weights."""
    flops_per_pair: int
    """Of attention, for each pair of a query and a key, over all layers."""
    flops_per_sample: int
    """Of the output layer, for each token that is drawn."""

    def load(self, *, tokens: int, pairs: int, read: int, samples: int) -> Load:
        """A step of `tokens` rows that attend to `pairs` of positions and read the KV cache of `read` tokens."""
        moved = self.weight_bytes + self.kv_bytes_per_token * (read + tokens)
        flops = self.flops_per_token * tokens + self.flops_per_pair * pairs + self.flops_per_sample * samples
        return Load(moved, flops)


def read_shape(folder: Path, dtype: str) -> ModelShape:
    """The shape of the model in `folder`; dtype `auto` is the model's own. Raises BackendError."""
    raw = _read(folder / "config.json", _Raw)
    generation = folder / "generation_config.json"
    eos = _read(generation, _RawGeneration).eos_token_id if generation.is_file() else None
    chosen = (raw.dtype or raw.torch_dtype or "bfloat16") if dtype == "auto" else dtype
    if chosen not in _BYTES:
        raise BackendError(f"{folder / 'config.json'}: dtype {chosen!r} is none of {', '.join(_BYTES)}")
    return _shape(raw, chosen, _ids(raw.eos_token_id if eos is None else eos))


def _shape(raw: _Raw, dtype: str, eos: tuple[int, ...]) -> ModelShape:
    heads, kv_heads = raw.num_attention_heads, raw.num_key_value_heads or raw.num_attention_heads
    head_dim = raw.head_dim or raw.hidden_size // heads
    attention = raw.hidden_size * head_dim * (2 * heads + 2 * kv_heads)
    layers = raw.num_hidden_layers * (attention + 3 * raw.hidden_size * raw.intermediate_size)
    embedding = raw.vocab_size * raw.hidden_size
    size = _BYTES[dtype]
    return ModelShape(
        vocab_size=raw.vocab_size,
        max_positions=raw.max_position_embeddings,
        eos_token_ids=eos,
        dtype=dtype,
        weight_bytes=size * (layers + embedding * (1 if raw.tie_word_embeddings else 2)),
        kv_bytes_per_token=2 * raw.num_hidden_layers * kv_heads * head_dim * size,
        flops_per_token=2 * layers,
        flops_per_pair=4 * raw.num_hidden_layers * heads * head_dim,
        flops_per_sample=2 * embedding,
    )


def _read(path: Path, type_: type[Any]) -> Any:
    try:
        text: Mapping[str, Any] = msgspec.json.decode(path.read_bytes())
        nested = text.get("text_config")
        return msgspec.convert({**text, **nested} if isinstance(nested, dict) else text, type_)
    except (OSError, msgspec.MsgspecError) as error:
        raise BackendError(f"{path}: {error}") from None


def _ids(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
