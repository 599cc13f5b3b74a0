"""Batches as a scheduler would give them out, for measuring: nothing is shared, and blocks lie anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops import BatchMeta
from services.worker.roofline.findings import StepCase
from shared.blocks import BLOCK_SIZE, blocks_for


def blocks_needed(case: StepCase) -> int:
    return case.batch * blocks_for(case.context)


def rows_of(case: StepCase) -> int:
    """Tokens that the step computes."""
    return case.batch if case.kind == "decode" else case.batch * case.context


def batch_of(case: StepCase, num_blocks: int, vocab_size: int, device: torch.device) -> tuple[Tensor, BatchMeta]:
    """The token ids and the rest of a step; its blocks are spread over all of `num_blocks`."""
    random = torch.Generator().manual_seed(1)
    width = blocks_for(case.context)
    tables = torch.randperm(num_blocks, generator=random)[: case.batch * width].to(torch.int32).view(case.batch, width)
    ids = torch.randint(vocab_size, (rows_of(case),), generator=random, dtype=torch.int32)
    meta = _decodes(case, tables) if case.kind == "decode" else _prefills(case, tables)
    return ids.to(device), _on(meta, device)


def _decodes(case: StepCase, tables: Tensor) -> BatchMeta:
    last = case.context - 1
    return BatchMeta(
        query_starts=_counting(case.batch + 1),
        context_lens=torch.full((case.batch,), case.context, dtype=torch.int32),
        block_tables=tables,
        slots=tables[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
        positions=torch.full((case.batch,), last, dtype=torch.int32),
        logits_rows=_counting(case.batch),
        num_decodes=case.batch,
        prefills=(),
        max_query=1,
        max_context=case.context,
        every_row=True,
    )


def _prefills(case: StepCase, tables: Tensor) -> BatchMeta:
    positions = _counting(case.context)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = _counting(case.batch + 1) * case.context
    return BatchMeta(
        query_starts=starts,
        context_lens=torch.full((case.batch,), case.context, dtype=torch.int32),
        block_tables=tables,
        slots=slots.reshape(-1),
        positions=positions.repeat(case.batch),
        logits_rows=starts[1:] - 1,
        num_decodes=0,
        prefills=((case.context, case.context),) * case.batch,
        max_query=case.context,
        max_context=case.context,
    )


def _counting(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


def _on(meta: BatchMeta, device: torch.device) -> BatchMeta:
    moved = {
        name: getattr(meta, name).contiguous().to(device)
        for name in ("query_starts", "context_lens", "block_tables", "slots", "positions", "logits_rows")
    }
    counts = {
        name: getattr(meta, name) for name in ("num_decodes", "prefills", "max_query", "max_context", "every_row")
    }
    return BatchMeta(**moved, **counts)
