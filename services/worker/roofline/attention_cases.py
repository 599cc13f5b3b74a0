"""Attention over the paged cache beside torch's scaled_dot_product_attention over keys and values in one piece."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.kernels.traffic import decode_bytes, decode_flops, prefill_bytes, prefill_flops
from services.worker.ops import BatchMeta
from services.worker.roofline.batches import batch_of, blocks_needed
from services.worker.roofline.findings import StepCase, Work
from services.worker.roofline.kernel_case import Call, Cases, KernelCase, Situation
from services.worker.roofline.measured_rank import fill_with_noise
from shared.blocks import BLOCK_SIZE

_SDPA = "torch SDPA, not paged"


def decode_attention(situation: Situation) -> Cases:
    """Of one token for each sequence."""
    for context in situation.contexts:
        for rows in situation.rows:
            shape = _shape(situation)
            work = Work(
                decode_bytes([context] * rows, **shape),
                decode_flops([context] * rows, heads=situation.config.num_heads, head_dim=situation.config.head_dim),
            )
            yield _case(situation, StepCase("decode", rows, context), work)


def prefill_attention(situation: Situation) -> Cases:
    """Of whole prompts, one at a time."""
    for length in situation.contexts:
        shape, rows = _shape(situation), [(length, length)]
        work = Work(
            prefill_bytes(rows, **shape),
            prefill_flops(rows, heads=situation.config.num_heads, head_dim=situation.config.head_dim),
        )
        yield _case(situation, StepCase("prefill", 1, length), work)


def _shape(situation: Situation) -> dict[str, int]:
    config = situation.config
    block = situation.ours.kv_block_bytes(config.num_kv_heads, config.head_dim)
    return {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "itemsize": situation.dtype.itemsize,
        "cache_itemsize": block // (2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim),
    }


def _case(situation: Situation, case: StepCase, work: Work) -> KernelCase:
    """Empty where it does not fit."""
    name = f"{case.batch} × {case.context:,}"
    if 2 * work.bytes > situation.room:
        return KernelCase(name, work, [], [])
    copies = situation.copies(work.bytes)
    ours = [_paged(situation, case) for _ in range(copies)]
    return KernelCase(name, work, ours, [_in_one_piece(situation, case) for _ in range(copies)], _SDPA)


def _paged(situation: Situation, case: StepCase) -> Call:
    config, ops = situation.config, situation.ours
    blocks = blocks_needed(case)
    caches = ops.allocate_kv(blocks, config.num_kv_heads, config.head_dim)
    for cache in caches:
        fill_with_noise(cache)
    _, meta = batch_of(case, blocks, 1, situation.device)
    return _attention(situation, situation.noise(len(meta.positions), config.num_heads, config.head_dim), caches, meta)


def _attention(situation: Situation, q: Tensor, caches: tuple[Tensor, Tensor], meta: BatchMeta) -> Call:
    scale = situation.config.attention_scale
    return lambda: situation.ours.paged_attention(q, *caches, meta, scale=scale, window=None, softcap=None)


def _in_one_piece(situation: Situation, case: StepCase) -> Call:
    config, dim = situation.config, situation.config.head_dim
    rows = 1 if case.kind == "decode" else case.context
    q = situation.noise(case.batch, config.num_heads, rows, dim)
    keys, values = (_held(situation, (case.batch, config.num_kv_heads, case.context, dim)) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(
        q, keys, values, is_causal=case.kind == "prefill", scale=config.attention_scale, enable_gqa=True
    )


def _held(situation: Situation, shape: tuple[int, ...]) -> Tensor:
    memory = torch.empty(shape, dtype=situation.dtype, device=situation.device)
    fill_with_noise(memory)
    return memory
