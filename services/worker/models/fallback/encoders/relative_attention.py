"""Attention by the distance of tokens, in the place of the library's own, which does not ask its attention interface.

MPNet adds to each product a number of its head for the distance (arXiv:2004.09297, section 2.3). DeBERTa multiplies
queries with keys of distances, and keys with queries of distances (arXiv:2006.03654, section 3.1). Distances are the
same in each prompt, so what is made of them for the longest one serves all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from services.worker.models.config import ModelError
from services.worker.models.fallback.encoders.prompt_attention import attend_prompts, prompt_lengths


def use_mpnet_attention(model: Any) -> None:
    """`model`: an `MPNetModel`."""
    encoder = model.encoder
    table = encoder.compute_position_bias
    encoder.compute_position_bias = lambda states: table(states[:, : max(prompt_lengths())])
    for layer in encoder.layer:
        layer.attention.attn = _MPNetAttention(layer.attention.attn)


def use_deberta_attention(model: Any) -> None:
    """`model`: a `DebertaModel` or a `DebertaV2Model`. Raises ModelError."""
    encoder = model.encoder
    distances = encoder.get_rel_pos
    encoder.get_rel_pos = lambda states, *_: distances(states[:, : max(prompt_lengths())])
    encoder.get_attention_mask = lambda mask: mask  # which a row for each row would be, and nobody reads
    for layer in encoder.layer:
        own = layer.attention.self
        layer.attention.self = _DebertaV2Attention(own) if hasattr(own, "query_proj") else _DebertaAttention(own)
    if getattr(encoder, "conv", None) is not None:
        encoder.conv.conv = _PromptConvolution(encoder.conv.conv)


class _MPNetAttention(nn.Module):
    def __init__(self, own: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = own.q, own.k, own.v, own.o
        self.heads = own.num_attention_heads

    def forward(self, hidden_states: Tensor, attention_mask: None, position_bias: Tensor, **_: Any) -> tuple[Tensor]:
        """`position_bias`: [1, H, longest, longest]."""
        query, key, value = (_heads(product(hidden_states), self.heads) for product in (self.q, self.k, self.v))
        mixed = attend_prompts(query, key, value, None, partial(_beginning, position_bias))
        return (self.o(mixed.flatten(2)),)


def _beginning(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    rows = query.shape[2]
    return bias[:, :, :rows, :rows]


class _Disentangled(nn.Module):
    """What the generations of DeBERTa share: what is added to the products of queries and keys."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.heads = own.num_attention_heads
        kinds = own.pos_att_type
        self.scale = (own.attention_head_size * (1 + sum(kind in kinds for kind in ("c2p", "p2c")))) ** -0.5
        self.by_keys, self.by_queries = (own.relative_attention and kind in kinds for kind in ("c2p", "p2c"))
        self.distances: tuple[Tensor | None, Tensor | None] | None = None
        """Keys and queries of distances [1, H, 2 * span, D]: products of weights, made in the first pass."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, *_: Any, relative_pos: Any, rel_embeddings: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """`relative_pos` int64 [1, longest, longest], `rel_embeddings` [2 * span or more, hidden], or both None."""
        if self.distances is None:
            keys, queries = self.of_distances(rel_embeddings)
            self.distances = self._each_head(keys), self._each_head(queries)
        query, key, value = self.of_content(hidden_states)
        return attend_prompts(query, key, value, self.scale, partial(self._bias, relative_pos)).flatten(2), None

    def of_content(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """states [1, n, hidden] → query, key and value [1, H, n, D]."""
        raise NotImplementedError

    def of_distances(self, table: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """table [distances, hidden] → keys and queries [2 * span, H * D], each if it is asked."""
        raise NotImplementedError

    def _each_head(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else _heads(rows[None], self.heads)

    def _bias(self, distances: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """[1, H, n, n], scaled; None: only the content counts."""
        assert self.distances is not None
        keys, queries = self.distances
        if distances is None or (keys is None and queries is None):
            return None
        rows, shape = query.shape[2], (*query.shape[:2], query.shape[2], query.shape[2])
        found = query.new_zeros(shape)
        near = distances[0, :rows, :rows]
        if keys is not None:
            span = keys.shape[2] // 2
            at = (near + span).clamp(0, 2 * span - 1).expand(shape)
            found = found + torch.gather(query @ keys.mT, -1, at)
        if queries is not None:
            span = queries.shape[2] // 2
            at = (span - near).clamp(0, 2 * span - 1).expand(shape)
            found = found + torch.gather(key @ queries.mT, -1, at).mT
        scaled: Tensor = found * self.scale
        return scaled


class _DebertaV2Attention(_Disentangled):
    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self.query_proj, self.key_proj, self.value_proj = own.query_proj, own.key_proj, own.value_proj
        self.shared = own.share_att_key
        self.span = own.pos_ebd_size if own.relative_attention else 0
        if self.by_keys and not self.shared:
            self.pos_key_proj = own.pos_key_proj
        if self.by_queries and not self.shared:
            self.pos_query_proj = own.pos_query_proj

    def of_content(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See the class above."""
        query, key, value = (product(states) for product in (self.query_proj, self.key_proj, self.value_proj))
        return _heads(query, self.heads), _heads(key, self.heads), _heads(value, self.heads)

    def of_distances(self, table: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """See the class above."""
        keys = queries = None
        if table is not None and self.by_keys:
            keys = (self.key_proj if self.shared else self.pos_key_proj)(table[: 2 * self.span])
        if table is not None and self.by_queries:
            queries = (self.query_proj if self.shared else self.pos_query_proj)(table[: 2 * self.span])
        return keys, queries


class _DebertaAttention(_Disentangled):
    def __init__(self, own: Any) -> None:
        super().__init__(own)
        if own.talking_head:
            raise ModelError("talking_head: true: mixing heads is not supported")
        self.in_proj, dtype = own.in_proj, own.in_proj.weight.dtype
        self.q_bias, self.v_bias = own.q_bias.to(dtype), own.v_bias.to(dtype)  # which the library leaves in float32
        if self.by_keys:
            self.pos_proj = own.pos_proj
        if self.by_queries:
            self.pos_q_proj = own.pos_q_proj

    def of_content(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See the class above."""
        query, key, value = _heads(self.in_proj(states), self.heads).chunk(3, dim=-1)
        of_query, of_value = (_heads(each[None, None], self.heads) for each in (self.q_bias, self.v_bias))
        return query + of_query, key, value + of_value

    def of_distances(self, table: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """See the class above."""
        if table is None:
            return None, None
        return self.pos_proj(table) if self.by_keys else None, self.pos_q_proj(table) if self.by_queries else None


class _PromptConvolution(nn.Module):
    """Of each prompt alone: no row sees one of its neighbour's."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, states: Tensor) -> Tensor:
        """[1, hidden, n] → the same."""
        return torch.cat([self.own(part) for part in torch.split(states, prompt_lengths(), dim=2)], dim=2)


def _heads(rows: Tensor, heads: int) -> Tensor:
    """[1, n, H * D] → [1, H, n, D]."""
    return rows.view(*rows.shape[:2], heads, -1).transpose(1, 2)
