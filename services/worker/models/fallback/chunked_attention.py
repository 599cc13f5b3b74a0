"""Chunked local attention (Llama 4): a row sees its own chunk of positions, from the chunk's first on.

To the kernels the rows of each chunk are a sequence of their own, whose first block is the chunk's. So nothing but a
step's description differs, and chunks are whole numbers of blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from services.worker.ops.interface import BatchMeta


class _Piece(NamedTuple):
    """Rows of one sequence in one chunk."""

    sequence: int
    first_block: int
    rows: int
    context: int
    """Tokens from the chunk's first on, once these rows are stored."""


def in_chunks(meta: BatchMeta, chunk: int) -> BatchMeta:
    """The step as attention is to see it; queries stay in their order. `chunk`: a multiple of the block size."""
    if meta.max_context <= chunk:
        return meta
    counts = [1] * meta.num_decodes + [rows for rows, _ in meta.prefills]
    lengths = meta.context_lens[: len(counts)].tolist()
    pieces = [
        piece
        for sequence, (rows, length) in enumerate(zip(counts, lengths, strict=True))
        for piece in _pieces(sequence, rows, length, chunk, meta.block_size)
    ]
    device = meta.context_lens.device
    sequences, first, rows, contexts = torch.tensor(pieces, dtype=torch.int64, device=device).t()
    width = -(-max(piece.context for piece in pieces) // meta.block_size)
    ahead = torch.arange(width, device=device)
    places = (first[:, None] + ahead).clamp_(max=meta.block_tables.shape[1] - 1)
    tables = meta.block_tables[sequences].gather(1, places)
    tables.masked_fill_(ahead * meta.block_size >= contexts[:, None], 0)
    starts = torch.zeros(len(pieces) + 1, dtype=torch.int32, device=device)
    starts[1:] = rows.cumsum(0)
    return replace(
        meta,
        query_starts=starts,
        context_lens=contexts.int(),
        block_tables=tables,
        positions=meta.positions % chunk,
        prefills=tuple((piece.rows, piece.context) for piece in pieces[meta.num_decodes :]),
        max_query=max(piece.rows for piece in pieces),
        max_context=max(piece.context for piece in pieces),
        others=(),
    )


def _pieces(sequence: int, rows: int, length: int, chunk: int, block_size: int) -> list[_Piece]:
    pieces, begin = list[_Piece](), length - rows
    while begin < length:
        start = begin // chunk * chunk
        end = min(length, start + chunk)
        pieces.append(_Piece(sequence, start // block_size, end - begin, end - start))
        begin = end
    return pieces
