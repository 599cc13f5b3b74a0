"""The tokens that an indexer chooses for each row (DeepSeek sparse attention): scores, and the slots of the best.

A row's scores are one product of its heads with the keys of a tile of tokens. PyTorch finds the least score that is
taken, and one program for each row writes the slots of those above it, and of as many of equal ones as are left, in
the order of their positions. Nothing waits for the device.

Bytes moved for a row with T tokens before it, keys of D elements: T * D * itemsize, of which decodes of different
sequences share nothing and neighbouring rows of a prompt nearly all in the caches; 4 * T of scores, written once and
read by `topk` and twice more. FLOPs: 2 * T * heads * D.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import BatchMeta
from services.worker.ops.triton.attention.paged_context import cached_rows, cached_tile
from services.worker.ops.triton.products import dot

TOKENS_OF_TILE, TILES_OF_PROGRAM = 64, 4
SCORE_STAGES = 2
CHOSEN_AT_ONCE = 1024
MAX_SCORES = 1 << 26
"""Scores of rows that are chosen for together: 256 MiB."""


@triton.jit(
    do_not_specialize=["width", "tokens"],
    do_not_specialize_on_alignment=["weights", "tables", "positions", "scores"],
)
def index_scores_kernel(
    q,
    weights,
    keys,
    tables,
    positions,
    scores,
    width,
    tokens,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid (runs of TILES tiles of tokens, rows). scores [rows, tokens]: -inf where a row does not see, and for what is
    no number. Rows lie `width` apart in `tables`: 0 where all are of one sequence. Keys lie KEY_STRIDE
    elements apart."""
    row = tl.program_id(1).to(tl.int64)
    head, of_dim = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    real = (head < HEADS)[:, None] & (of_dim < DIM)[None, :]
    query = tl.load(q + (row * HEADS + head)[:, None] * DIM + of_dim[None, :], mask=real, other=0.0)
    factor = tl.load(weights + row * HEADS + head, mask=head < HEADS, other=0.0)
    position = tl.load(positions + row)
    table = tables + row * width
    first = tl.program_id(0) * TILE * TILES
    for start in tl.range(first, tl.minimum(first + TILE * TILES, tokens), TILE):
        token = start + tl.arange(0, TILE)
        seen = token <= position
        at = cached_rows(table, token, seen, 0, 1, BLOCK)[:, None] * KEY_STRIDE + of_dim[None, :]
        key = cached_tile(keys, at, seen, of_dim, DIM)
        products = dot(query, tl.trans(key), tl.zeros([HEADS_PAD, TILE], tl.float32))
        score = tl.sum(tl.maximum(products, 0.0) * factor[:, None], 0)
        score = tl.where(seen & (score == score), score, float("-inf"))
        tl.store(scores + row * tokens + token, score, mask=token < tokens)


@triton.jit(
    do_not_specialize=["width", "tokens", "taken", "count"],
    do_not_specialize_on_alignment=["scores", "least", "tables", "slots"],
)
def chosen_slots_kernel(
    scores, least, tables, slots, width, tokens, taken, count, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):
    """One row a program. Its first `taken` of slots [rows, count] are those of the tokens whose scores are above its
    `least`, and of the first of those that have it."""
    row = tl.program_id(0).to(tl.int64)
    table, from_scores, to = tables + row * width, scores + row * tokens, slots + row * count
    bound = tl.load(least + row)
    above = tl.zeros([AT_ONCE], tl.int32)
    for start in tl.range(0, tokens, AT_ONCE):
        token = start + tl.arange(0, AT_ONCE)
        score = tl.load(from_scores + token, mask=token < tokens, other=float("-inf"))
        above += (score > bound).to(tl.int32)
    # How many of those with just the least score are taken, and how many of either kind have been.
    room = taken - tl.sum(above, 0)
    equal_before, taken_before = room * 0, room * 0
    for start in tl.range(0, tokens, AT_ONCE):
        token = start + tl.arange(0, AT_ONCE)
        there = token < tokens
        score = tl.load(from_scores + token, mask=there, other=float("-inf"))
        equal = ((score == bound) & there).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0)
        picked = ((score > bound) | ((equal > 0) & (rank <= room))).to(tl.int32)
        place = taken_before + tl.cumsum(picked, 0) - 1
        block = tl.load(table + token // BLOCK, mask=picked > 0, other=0).to(tl.int64)
        tl.store(to + place, block * BLOCK + token % BLOCK, mask=picked > 0)
        equal_before += tl.sum(equal, 0)
        taken_before += tl.sum(picked, 0)


class _ScoredRows(NamedTuple):
    """Rows whose scores are computed together."""

    rows: slice
    tables: Tensor
    """[sequences, width] of the rows in turn, or of the one sequence that they all belong to."""
    tokens: int
    """Of the longest."""


def _pieces(meta: BatchMeta) -> Iterator[_ScoredRows]:
    """Decodes, then each prompt; as many rows at once as `MAX_SCORES` allow."""
    start = meta.num_decodes
    for first, end in _parts(start, meta.max_context):
        yield _ScoredRows(slice(first, end), meta.block_tables[first:end], meta.max_context)
    for sequence, (rows, context) in enumerate(meta.prefills, start=start):
        for first, end in _parts(rows, context):
            yield _ScoredRows(slice(start + first, start + end), meta.block_tables[sequence : sequence + 1], context)
        start += rows


def _parts(rows: int, tokens: int) -> Iterator[tuple[int, int]]:
    step = min(max(1, MAX_SCORES // tokens), 1 << 15)
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def choose_slots(q: Tensor, weights: Tensor, keys: Tensor, meta: BatchMeta, count: int) -> Tensor:
    """q [n, heads, dim], rotated, weights float32 [n, heads], keys [blocks, 1, block_size, dim], whose rows may lie
    further apart than they are wide → int64 [n, count]; see `LatentOps.choose`."""
    q, weights = q.to(keys.dtype).contiguous(), weights.contiguous()
    slots = torch.zeros(len(q), count, dtype=torch.int64, device=q.device)
    for part in _pieces(meta):
        own, rows = slots[part.rows], part.rows
        scores = torch.empty(len(own), part.tokens, dtype=torch.float32, device=q.device)
        _score(q[rows], weights[rows], keys, meta.positions[rows], part, scores)
        taken = min(count, part.tokens)
        least = scores.topk(taken, dim=1, sorted=False).values.amin(1)
        chosen_slots_kernel[(len(own),)](
            *(scores, least, part.tables, own, _table_stride(part), part.tokens, taken, count),
            BLOCK=meta.block_size,
            AT_ONCE=CHOSEN_AT_ONCE,
            num_warps=4,
        )
    return slots


def _score(q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, part: _ScoredRows, scores: Tensor) -> None:
    (rows, heads, dim), tokens = q.shape, part.tokens
    index_scores_kernel[(triton.cdiv(tokens, TOKENS_OF_TILE * TILES_OF_PROGRAM), rows)](
        *(q, weights, keys, part.tables, positions, scores),
        *(_table_stride(part), tokens),
        HEADS=heads,
        HEADS_PAD=max(16, triton.next_power_of_2(heads)),
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        KEY_STRIDE=keys.stride(2),
        BLOCK=keys.shape[2],
        TILE=TOKENS_OF_TILE,
        TILES=TILES_OF_PROGRAM,
        num_warps=4,
        num_stages=SCORE_STAGES,
    )


def _table_stride(part: _ScoredRows) -> int:
    """Between the tables of two rows."""
    return 0 if len(part.tables) == 1 else part.tables.stride(0)
