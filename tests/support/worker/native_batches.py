"""Batches for the native operations' tests, and what they should give, computed in float64."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from services.worker.ops.interface import BatchMeta
from services.worker.ops.native.build import Level, best_level
from services.worker.ops.native.native_ops import NativeOps
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE

CPU = torch.device("cpu")


@cache
def native(
    dtype: torch.dtype,
    threads: int = 2,
    level: Level | None = None,
    block_size: int = BLOCK_SIZE,
    cache_dtype: torch.dtype | None = None,
) -> NativeOps:
    level = level or best_level()
    return NativeOps(CPU, dtype, threads=threads, level=level, block_size=block_size, cache_dtype=cache_dtype)


@dataclass(frozen=True)
class Rows:
    """A sequence's part in a step: its last `count` of `context` tokens."""

    count: int
    context: int
    blocks: tuple[int, ...]


def scattered_blocks(contexts: list[int], seed: int = 0, block_size: int = BLOCK_SIZE) -> list[tuple[int, ...]]:
    """Blocks for each context, in no order, none shared; block 0 is unused."""
    needed = [-(-context // block_size) for context in contexts]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    return [tuple(order.pop() for _ in range(count)) for count in needed]


def meta_of(sequences: list[Rows], block_size: int = BLOCK_SIZE) -> BatchMeta:
    """Decodes (one row) must come first."""
    starts, positions, slots = [0], [], []
    for rows in sequences:
        starts.append(starts[-1] + rows.count)
        for position in range(rows.context - rows.count, rows.context):
            positions.append(position)
            slots.append(rows.blocks[position // block_size] * block_size + position % block_size)
    width = max(len(rows.blocks) for rows in sequences)
    prefills = tuple((rows.count, rows.context) for rows in sequences if rows.count > 1)
    return BatchMeta(
        query_starts=_ints(starts),
        context_lens=_ints([rows.context for rows in sequences]),
        block_tables=_ints([[*rows.blocks, *[0] * (width - len(rows.blocks))] for rows in sequences]),
        slots=_ints(slots),
        positions=_ints(positions),
        logits_rows=_ints([start - 1 for start in starts[1:]]),
        num_decodes=len(sequences) - len(prefills),
        prefills=prefills,
        max_query=max(rows.count for rows in sequences),
        max_context=max(rows.context for rows in sequences),
        block_size=block_size,
    )


def on_device(meta: BatchMeta, device: torch.device) -> BatchMeta:
    """The same batch, its tensors on `device`."""
    values = ((field.name, getattr(meta, field.name)) for field in fields(meta))
    return replace(meta, **{name: value.to(device) for name, value in values if isinstance(value, Tensor)})


def _ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    distance_biases: Tensor | None = None,
) -> Tensor:
    """Of one sequence: q [rows, H, D], the last rows of k and v [context, KV, D] → [rows, H * D] float64."""
    rows, heads, _ = q.shape
    context, kv_heads, _ = k.shape
    k, v = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("rhd,chd->hrc", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(context - rows, context).unsqueeze(1)
    token = torch.arange(context)
    seen = (token <= position) & (token > position - (window or context + 1))
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.double().cpu().view(-1, 1, 1) * (token - position)
    if distance_biases is not None:
        distances = (position - token).clamp(0, distance_biases.shape[1] - 1)
        scores = scores + distance_biases.double()[:, distances]
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().cpu().view(-1, 1, 1).expand(heads, rows, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :context]
    return torch.einsum("hrc,chd->rhd", weights, v).reshape(rows, -1)


def rope_reference(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [n, heads, D] and cos_sin [n, D] → rotated, float64."""
    cos, sin = cos_sin.double().unsqueeze(1).chunk(2, dim=-1)
    low, high = x.double().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
