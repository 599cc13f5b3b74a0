"""Reads the `config.json` of models found by a search over blocks (Nemotron-NAS: Llama-3.x-Nemotron Super and Ultra;
DeciLM): each block has its own number of key/value heads and of columns, or lacks attention or an MLP, or has a matrix
in the place of one (Bercovich et al., "Puzzle", arXiv:2411.19146).

A layer here is a block that attends, with what comes behind it up to the next one that does: so each has a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from services.worker.models.config import FollowingBlock, LayerConfig, ModelError
from services.worker.models.published.layout import Published

NEMOTRON_NAS = "DeciLMForCausalLM"
_ROUNDED_TO = 256
"""Columns by a factor of the hidden size are a multiple of this."""
_OF_TRAINING = ("sparsify",)


class _RawAttention(Struct, kw_only=True, forbid_unknown_fields=True):
    no_op: bool = False
    replace_with_linear: bool = False
    n_heads_in_group: int | None = None
    num_key_value_heads: int | None = None


class _RawFfn(Struct, kw_only=True, forbid_unknown_fields=True):
    no_op: bool = False
    replace_with_linear: bool = False
    ffn_mult: float | None = None
    intermediate_size: int | None = None
    hidden_act: Literal["silu"] = "silu"
    gated: Literal[True] = True


class _RawBlock(Struct, kw_only=True):
    attention: dict[str, Any] = field(default_factory=dict)
    ffn: dict[str, Any] = field(default_factory=dict)


class _RawNas(Struct, kw_only=True):
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int | None = None
    block_configs: list[_RawBlock] | None = None
    num_key_value_heads_per_layer: list[int] | None = None
    position_embedding_type: Literal["rope"] | None = None


class _Block(NamedTuple):
    attends: int | None
    """With so many key/value heads; None: it does not."""
    following: tuple[FollowingBlock, ...]


def nemotron_nas(raw: Mapping[str, Any]) -> Published:
    """With `block_configs`, or, as DeciLM-7B has it, `num_key_value_heads_per_layer`. Raises ModelError, and
    msgspec.ValidationError."""
    own = msgspec.convert(raw, _RawNas)
    if min(own.hidden_size, own.num_attention_heads, own.num_hidden_layers) < 1:
        raise ModelError("hidden_size, num_attention_heads and num_hidden_layers have to be positive")
    blocks = list(_blocks(own))
    if len(blocks) != own.num_hidden_layers:
        raise ModelError(f"{len(blocks)} blocks are described, num_hidden_layers is {own.num_hidden_layers}")
    if blocks[0].attends is None:
        raise ModelError("block_configs: the first block has to attend")
    kv_heads = max(block.attends or 0 for block in blocks)
    for number, block in enumerate(blocks):
        if block.attends is not None and kv_heads % block.attends:
            raise ModelError(
                f"block {number} has {block.attends} key/value heads, of which {kv_heads}, the most that one has, are "
                "no multiple"
            )
    base = {**raw, "num_key_value_heads": kv_heads, "intermediate_size": own.hidden_size}
    return Published(base, {"intermediate_size": 0}, arranged=lambda layer: _layers(layer, blocks, kv_heads))


def _layers(layer: LayerConfig, blocks: list[_Block], kv_heads: int) -> tuple[LayerConfig, ...]:
    attending = [number for number, block in enumerate(blocks) if block.attends is not None]
    return tuple(
        replace(
            layer,
            has_mlp=False,
            blocks=(first, end - 1),
            following=tuple(each for block in blocks[first:end] for each in block.following),
            kv_heads=None if blocks[first].attends == kv_heads else blocks[first].attends,
        )
        for first, end in zip(attending, [*attending[1:], len(blocks)], strict=True)
    )


def _blocks(own: _RawNas) -> Iterator[_Block]:
    if own.block_configs is None:
        if own.num_key_value_heads_per_layer is None or own.intermediate_size is None:
            raise ModelError("block_configs, or num_key_value_heads_per_layer and intermediate_size, are missing")
        for number, heads in enumerate(own.num_key_value_heads_per_layer):
            yield _Block(_kv_heads(own, number, heads), (_mlp(number, own.intermediate_size),))
        return
    for number, block in enumerate(own.block_configs):
        where = f"block_configs[{number}]"
        attention = _part(block.attention, _RawAttention, f"{where}.attention")
        ffn = _part(block.ffn, _RawFfn, f"{where}.ffn")
        found = [] if attention.no_op or not attention.replace_with_linear else [_matrix(number, attends=True)]
        if not ffn.no_op:
            found.append(_matrix(number) if ffn.replace_with_linear else _mlp(number, _columns(own, ffn, where)))
        attends = None if attention.no_op or attention.replace_with_linear else _attending(own, attention, number)
        yield _Block(attends, tuple(found))


def _part(raw: Mapping[str, Any], kind: type[Any], where: str) -> Any:
    """What is asked for: keys that are null ask for nothing, nor do unknown ones that are false."""
    given = {key: value for key, value in raw.items() if value is not None and key not in _OF_TRAINING}
    asked = {key: value for key, value in given.items() if key in kind.__struct_fields__ or value not in (False, 0)}
    try:
        return msgspec.convert(asked, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from None


def _attending(own: _RawNas, attention: Any, number: int) -> int:
    if attention.num_key_value_heads is not None:
        return _kv_heads(own, number, attention.num_key_value_heads)
    group = attention.n_heads_in_group
    if group is None or group < 1 or own.num_attention_heads % group:
        raise ModelError(
            f"block_configs[{number}].attention.n_heads_in_group {group}: {own.num_attention_heads} heads have to be a "
            "multiple of it"
        )
    return int(own.num_attention_heads // group)


def _kv_heads(own: _RawNas, number: int, heads: int) -> int:
    if heads < 1 or own.num_attention_heads % heads:
        raise ModelError(f"block {number}: {own.num_attention_heads} heads are no multiple of {heads} KV heads")
    return heads


def _columns(own: _RawNas, ffn: Any, where: str) -> int:
    columns = ffn.intermediate_size
    if ffn.ffn_mult is not None:
        columns = -(-int(2 * ffn.ffn_mult * own.hidden_size / 3) // _ROUNDED_TO) * _ROUNDED_TO
    if columns is None or columns < 1:
        raise ModelError(f"{where}.ffn: intermediate_size {columns}, ffn_mult {ffn.ffn_mult}: one has to be positive")
    return int(columns)


def _mlp(number: int, columns: int) -> FollowingBlock:
    return FollowingBlock(number, "post_attention_layernorm", "mlp", columns)


def _matrix(number: int, *, attends: bool = False) -> FollowingBlock:
    """In the place of an MLP, or of attention."""
    if attends:
        return FollowingBlock(number, "input_layernorm", "self_attn.linear_attn")
    return FollowingBlock(number, "post_attention_layernorm", "mlp.linear_mlp")
