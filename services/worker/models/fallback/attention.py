"""The attention of models that `transformers` computes: their modules ask for it by the library's attention interface.

A step's rows of all sequences lie behind each other, as one sequence does for the library: every operation but
attention looks at each row alone, and attention is ours, on the paged cache (as vLLM's Transformers backend does it).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from services.worker.models.config import ModelError
from services.worker.models.fallback.chunked_attention import in_chunks
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import BatchMeta, Ops

NAME = "baton"
"""Of the attention, to the library."""

CROSS = "baton_cross"
"""Set on modules whose keys and values are of rows beside the prompt (`PromptEmbeds.encoded`)."""

ADAPTED_NAME = "baton-adapted"
"""The same, for models that do not ask for it by this name; see `adapters`."""


class AttentionTemperature(NamedTuple):
    """How queries grow with their position (arXiv:2501.19399), in Llama 4's layers without rotation."""

    floor_scale: float
    """Positions of a step."""
    scale: float

    def applied(self, query: Tensor, positions: Tensor) -> Tensor:
        """query [n, H, D], positions [n] → [n, H, D]."""
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        return (query * (torch.log1p(steps) * self.scale + 1.0).view(-1, 1, 1)).to(query.dtype)


class AttentionCall(NamedTuple):
    """What a module asks of attention; the same in every pass."""

    kv_heads: int
    key_dim: int
    value_dim: int
    """At most `key_dim`."""
    scale: float
    window: int | None
    softcap: float | None
    chunk: int | None = None
    """A row sees its own chunk of so many positions; see `chunked_attention`."""
    temperature: AttentionTemperature | None = None
    heads: int = 0
    """Of queries."""
    cross: bool = False
    """Keys and values are of rows beside the prompt, and all of them are seen."""


class CachedHeads(NamedTuple):
    """How a layer's heads lie in a block. Where layers have different ones, blocks have as many elements all the same:
    a layer that would need fewer has each of its heads several times."""

    number: int
    """A multiple of the layer's own."""
    dim: int

    def of(self, cache: Tensor) -> Tensor:
        """A layer's keys or values as the memory of another's, [blocks, …], has them."""
        return cache.view(len(cache), self.number, cache.shape[2], self.dim)


_WHOLE_LANES = 16
"""Heads of a multiple of so many elements are padded by no operations."""


def heads_differ(calls: Sequence[AttentionCall]) -> bool:
    """Whether layers have keys of several numbers or lengths."""
    return len({(call.kv_heads, call.key_dim) for call in calls}) > 1


def cached_heads(calls: Sequence[AttentionCall]) -> tuple[CachedHeads, ...]:
    """Of each layer. Raises ModelError where different ones have no common size of at most twice the largest, or keys
    of one do not divide its queries."""
    if (odd := next((call for call in calls if call.heads % call.kv_heads), None)) is not None:
        raise ModelError(f"{odd.heads} heads of queries are no multiple of {odd.kv_heads} of keys")
    sizes = {call.kv_heads * call.key_dim for call in calls}
    elements = lcm(*sizes)
    heads = tuple(CachedHeads(elements // call.key_dim, call.key_dim) for call in calls)
    fits = elements <= 2 * max(sizes) and not any(
        each.dim % _WHOLE_LANES or call.heads % each.number for call, each in zip(calls, heads, strict=True)
    )
    if heads_differ(calls) and not fits:
        shown = ", ".join(sorted({f"{call.kv_heads} of {call.key_dim}" for call in calls}))
        raise ModelError(f"layers with different heads that share no size of blocks are not supported ({shown})")
    return heads


class HeadBiases(NamedTuple):
    """What a module adds to the scores of each head, float32 [H, …]; see `Ops.paged_attention`."""

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    distance_biases: Tensor | None = None


class AttentionLayers(Protocol):
    """What answers the calls of one forward pass, in their order."""

    @property
    def encoded_rows(self) -> Tensor | None:
        """[k, hidden] the rows beside prompts whose keys and values the pass computes; None: there are none."""

    def attend(self, call: AttentionCall, biases: HeadBiases, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [n, H, D], key [n, KV, D], value [n, KV, value_dim] → [n, H, value_dim]."""


class RecordedLayers:
    """Notes what is asked, and answers with zeros: for finding out which layers a model has."""

    encoded_rows: Tensor | None = None

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall, biases: HeadBiases, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionLayers`; zeros."""
        self.calls.append(call)
        return query.new_zeros(*query.shape[:2], call.value_dim)


class MixingLayers:
    """Answers with something of all that attention is given: for finding out what a model's results depend on."""

    encoded_rows: Tensor | None = None

    def attend(self, call: AttentionCall, biases: HeadBiases, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionLayers`."""
        mean = value.mean(1, keepdim=True) * key.mean((1, 2), keepdim=True)
        return query[..., : call.value_dim] + mean


class PagedLayers:
    """Attention of one step over the paged cache, of which each call has a part of its own."""

    def __init__(
        self,
        calls: tuple[AttentionCall, ...],
        ops: Ops,
        meta: BatchMeta,
        caches: KvCaches,
        heads: tuple[CachedHeads, ...],
        unrotated: Mapping[int, Tensor],
        group_of: tuple[int, ...] = (),
        *,
        mutual_everywhere: bool = True,
    ) -> None:
        """`unrotated`, by D, [positions, D]: cosines of 1 and sines of 0, as the library rotates by itself. `group_of`:
        each layer's group; empty: all have one block table. `mutual_everywhere`: whether tokens of an image see each
        other in layers without a window, too."""
        self._mutual_everywhere = mutual_everywhere
        self._calls = calls
        self._ops = ops
        self.meta = meta
        self._caches = caches
        self._heads = heads
        self._unrotated = unrotated
        self._group_of = group_of
        self._chunked: dict[tuple[int, int], BatchMeta] = {}
        """The step in chunks, by its group and their size."""
        self._next = 0

    def attend(self, call: AttentionCall, biases: HeadBiases, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionLayers`. Raises ModelError for a call that the model did not make when it was loaded."""
        number, self._next = self._next, self._next + 1
        if number >= len(self._calls) or self._calls[number] != call:
            raise ModelError(f"attention {number} of the model differs from pass to pass: {call}")
        if call.cross:
            return self._attend_across(number, call, query, key, value)
        group = self._group_of[number] if self._group_of else 0
        meta = self.meta.of_group(group)
        rows, heads, dim = query.shape
        if call.temperature is not None:
            query = call.temperature.applied(query, meta.positions)
        if call.value_dim < dim:
            value = F.pad(value, (0, dim - call.value_dim))
        cache, cached = self._caches[number], self._heads[number]
        if cached != self._heads[0]:
            cache = cached.of(cache[0]), cached.of(cache[1])
        if (times := cached.number // call.kv_heads) > 1:
            key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        joined = torch.cat((query, key, value), dim=1).reshape(rows, -1)
        queries = self._ops.rope_and_store(
            joined, meta, self._unrotated[dim], *cache, heads=heads, q_norm=None, k_norm=None, eps=0.0
        )
        mixed = self._ops.paged_attention(
            *(queries, *cache, self._seen(meta, group, call)),
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=biases.sinks,
            alibi_slopes=biases.alibi_slopes,
            distance_biases=biases.distance_biases,
        )
        return mixed.view(rows, heads, dim)[..., : call.value_dim].to(query.dtype)

    @property
    def encoded_rows(self) -> Tensor | None:
        """See `AttentionLayers`."""
        return None if self.meta.encoded is None else self.meta.encoded.values

    def _attend_across(self, number: int, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [n, H, D], key and value [k, KV, D] of the rows that the step writes, if any → [n, H, D]; zeros where
        a row's sequence has none."""
        encoded, cache = self.meta.encoded, self._caches[number]
        if encoded is None:
            return torch.zeros_like(query)
        if encoded.values is not None:
            # Keys again where queries stand, which nobody asks for: of thousands of rows as few as there can be.
            joined = torch.cat((key, key, value), dim=1).reshape(len(key), -1)
            self._ops.rope_and_store(
                *(joined, encoded.writes, self._unrotated[call.key_dim], *cache),
                heads=key.shape[1],
                q_norm=None,
                k_norm=None,
                eps=0.0,
            )
        mixed = self._ops.paged_attention(
            *(query.contiguous(), *cache, encoded.reads),
            scale=call.scale,
            window=None,
            softcap=call.softcap,
        )
        mixed = mixed.view(query.shape).to(query.dtype)
        return mixed if encoded.heard is None else mixed.where(encoded.heard.view(-1, 1, 1), 0.0)

    def _seen(self, meta: BatchMeta, group: int, call: AttentionCall) -> BatchMeta:
        """The step as a layer's attention sees it."""
        if meta.lasts is not None and call.window is None and not self._mutual_everywhere:
            meta = replace(meta, lasts=None)
        if (chunk := call.chunk) is None:
            return meta
        if (group, chunk) not in self._chunked:
            self._chunked[group, chunk] = in_chunks(meta, chunk)
        return self._chunked[group, chunk]

    def check_complete(self) -> None:
        """Raises ModelError where the pass has left layers out."""
        if self._next != len(self._calls):
            raise ModelError(f"the model attended {self._next} times in a pass; when it was loaded {len(self._calls)}")


_current = threading.local()


@contextmanager
def answered_by(layers: AttentionLayers) -> Iterator[None]:
    """Attention of this thread's models is answered by `layers`."""
    before = getattr(_current, "layers", None)
    _current.layers = layers
    try:
        yield
    finally:
        _current.layers = before


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The library's signature: query [1, H, n, D], key and value [1, KV, n, …] → ([1, n, H, …], no weights).
    `position_bias` [H, distances]: ours (`_biases_of_distances`); the library's own has a number for each two rows."""
    cross = getattr(module, CROSS, False)
    if not cross and (is_causal is False or getattr(module, "is_causal", True) is False):
        raise ModelError(f"{type(module).__name__} is not causal: only decoders can be served")
    own_bias = None if position_bias is None or position_bias.dim() == 2 else position_bias
    _refuse(module, {**more, "position_bias": own_bias})
    if attention_mask is not None and not cross:  # none is made for our attention, see `_no_mask`
        raise ModelError(f"{type(module).__name__} attends by a mask of its own, which is not supported")
    mixed = attended(
        *(module, query, key, value),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        distance_biases=position_bias,
    )
    return mixed, None


def attended(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    distance_biases: Tensor | None = None,
) -> Tensor:
    """What `module` finds for query [1, H, n, D], key and value [1, KV, n, …] among this thread's layers: [1, n, H, …].

    `scale` is D^-0.5 where it is None; `sinks`, `alibi_slopes` [H] and `distance_biases` [H, distances] may be of any
    dtype and device. Raises ModelError for what our attention cannot do."""
    layers: AttentionLayers | None = getattr(_current, "layers", None)
    if layers is None:
        raise RuntimeError("the model was called by somebody else")
    dim = query.shape[-1]
    call = AttentionCall(
        kv_heads=key.shape[1],
        key_dim=dim,
        value_dim=value.shape[-1],
        scale=dim**-0.5 if scale is None else float(scale),
        window=window,
        softcap=softcap,
        chunk=_chunk_of(module),
        temperature=getattr(module, "baton_temperature", None),
        heads=query.shape[1],
        cross=getattr(module, CROSS, False),
    )
    if call.value_dim > dim:
        raise ModelError(f"{type(module).__name__}: values of {call.value_dim} are longer than keys of {dim}")
    biases = HeadBiases(
        *(
            None if each is None else each.to(query.device, torch.float32).contiguous()
            for each in (sinks, alibi_slopes, distance_biases)
        )
    )
    mixed = layers.attend(call, biases, *(each[0].transpose(0, 1) for each in (query, key, value)))
    return mixed.unsqueeze(0)


def _chunk_of(module: nn.Module) -> int | None:
    """Positions of a chunk, where the module's layer sees only its own."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or layer is None or kinds[layer] != "chunked_attention":
        return None
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    return chunk


_SENT_BESIDE = {
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "position_bias": "a learned bias of positions",
    "head_mask": "masked heads",
    "indexer_topk": "sparse attention",
}
"""What some modules give to attention, which ours cannot do."""


def _refuse(module: nn.Module, more: dict[str, Any]) -> None:
    for name, words in _SENT_BESIDE.items():
        if more.get(name) is not None:
            raise ModelError(f"{type(module).__name__} asks for {words} ({name}), which is not supported")


def register() -> None:
    """Makes the attention known to the library, with no mask: what a row sees is decided here."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    AttentionMaskInterface.register(ADAPTED_NAME, _empty_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _empty_mask(*_: Any, **__: Any) -> Tensor:
    """Some models convert what they are given, and then hand it to attention, where nobody looks at it."""
    return torch.empty(0)
