"""Kernels that exist on GPUs alone: sampling, masks upon logits, verification of drafts, copies of KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.worker.measure.roofline.cases import Call, Cases, KernelCase, KernelContext, NoKernel
from services.worker.measure.roofline.kernel_traffic import (
    kv_block_bytes,
    mask_bytes,
    verification_bytes,
)
from services.worker.measure.roofline.measured_rank import fill_with_noise
from services.worker.measure.roofline.wire import KernelWork
from services.worker.ops.drafts import DraftAttempt
from services.worker.sampling.masks import apply_mask
from services.worker.sampling.token_bits import mask_words

if TYPE_CHECKING:
    from services.worker.ops.triton.kv_blocks import BlockCaches

Caches = list[tuple[Tensor, Tensor]]

_DRAFTS = 3
_MOVED = (1, 16, 128)
"""Blocks that are gathered at once."""
_HELD = 256
"""Blocks of the caches that they are taken from."""


def on_gpus(cases: Callable[[KernelContext], Cases]) -> Callable[[KernelContext], Cases]:
    """The cases where there is a GPU; raises NoKernel elsewhere. (Triton is imported only where it is needed.)"""

    def guarded(context: KernelContext) -> Cases:
        if context.device.type != "cuda":
            raise NoKernel("there is a kernel of ours on GPUs alone")
        return cases(context)

    return guarded


def masks(context: KernelContext) -> Cases:
    """Nearly all tokens are forbidden. Bytes: a bit for each logit, and the logits, which are written."""
    from services.worker.ops.triton.sampling import apply_bitmask

    vocabulary = context.config.vocab_size
    for rows in context.rows:
        size = mask_bytes(rows, vocabulary, context.dtype.itemsize)
        logits = [context.noise(rows, vocabulary) for _ in range(context.copies(size))]
        bits = torch.zeros((rows, mask_words(vocabulary)), dtype=torch.int32, device=context.device)
        bits[:, 0] = 1
        numbers = torch.arange(rows, device=context.device)

        def ours(each: Tensor, bits: Tensor = bits, numbers: Tensor = numbers) -> Call:
            return lambda: apply_bitmask(each, bits, numbers)

        def by_torch(each: Tensor, bits: Tensor = bits) -> Call:
            return lambda: apply_mask(each, bits)

        name, calls = f"{rows} rows of {vocabulary}", [ours(each) for each in logits]
        yield KernelCase(name, KernelWork(size, 0.0), calls, [by_torch(each) for each in logits])


def verification(context: KernelContext) -> Cases:
    """Every draft is accepted, of as many for each sequence."""
    from services.worker.ops.triton.verification import verify

    for sequences in context.rows:
        rows = sequences * (_DRAFTS + 1)
        drawn = torch.arange(rows, device=context.device) % 7
        ids = torch.zeros(rows, dtype=torch.int32, device=context.device)
        ids[1:] = drawn[:-1]
        first = torch.arange(0, rows, _DRAFTS + 1, dtype=torch.int32, device=context.device)
        tried = DraftAttempt(drawn, ids, None, first, torch.full_like(first, _DRAFTS), _DRAFTS)
        name, work = f"{sequences} × {_DRAFTS} drafts", KernelWork(verification_bytes(rows, sequences), 0.0)
        yield KernelCase(name, work, [partial(verify, tried)], [partial(context.torch_ops.verify, tried)])


def kv_blocks(context: KernelContext) -> Cases:
    """Bytes: each block of all layers, read once and written once."""
    from services.worker.ops.triton.kv_blocks import BlockCaches

    config = context.config
    caches = [context.ours.allocate_kv(_HELD, config.num_kv_heads, config.head_dim) for _ in config.layers]
    for halves in caches:
        for cache in halves:
            fill_with_noise(cache)
    together, one = BlockCaches(caches), caches[0][0]
    for count in _MOVED:
        blocks = torch.randperm(_HELD)[:count].to(torch.int32).to(context.device)
        shape = (count, config.num_kv_heads, len(caches), 2, *one.shape[2:])
        staged = torch.zeros(shape, dtype=one.dtype, device=one.device)
        size = kv_block_bytes(
            count,
            layers=len(caches),
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            cache_itemsize=one.dtype.itemsize,
        )
        for name, (ours, by_torch) in (
            ("gather", _gathers(together, caches, blocks, staged)),
            ("scatter", _scatters(together, caches, blocks, staged)),
        ):
            yield KernelCase(
                f"{name} {count} blocks", KernelWork(size, 0.0), [ours], [by_torch], "torch, layer by layer"
            )


def _gathers(together: BlockCaches, caches: Caches, blocks: Tensor, staged: Tensor) -> tuple[Call, Call]:
    """Our way and torch's."""
    numbers = blocks.long()

    def by_torch() -> None:
        for layer, halves in enumerate(caches):
            for half, cache in enumerate(halves):
                staged[:, :, layer, half] = cache.index_select(0, numbers)

    return lambda: together.gather(blocks, staged), by_torch


def _scatters(together: BlockCaches, caches: Caches, blocks: Tensor, staged: Tensor) -> tuple[Call, Call]:
    """Our way and torch's."""
    numbers = blocks.long()

    def by_torch() -> None:
        for layer, halves in enumerate(caches):
            for half, cache in enumerate(halves):
                cache.index_copy_(0, numbers, staged[:, :, layer, half])

    return lambda: together.scatter(blocks, staged), by_torch


# Sampling, beside what one writes with torch: a sort, sums, and a draw.


_SHARPNESS = 4.0
"""Standard deviation of logits: a few tens of tokens have nine tenths of the chance."""


def sampling(context: KernelContext) -> Cases:
    """Bytes: the logits, once. Chances are cut by top-k 50 and top-p 0.9, or not at all."""
    vocabulary = context.config.vocab_size
    for rows in context.rows:
        size = rows * vocabulary * context.dtype.itemsize
        for name, top_k, top_p in (("all tokens", vocabulary, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)):
            logits = [_SHARPNESS * context.noise(rows, vocabulary) for _ in range(context.copies(size))]
            yield KernelCase(
                f"{rows} rows of {vocabulary}, {name}",
                KernelWork(size, 0.0),
                [_ours(each, top_k, top_p) for each in logits],
                [_by_torch(each, top_k, top_p) for each in logits],
                "torch sort and multinomial",
            )


def _ours(logits: Tensor, top_k: int, top_p: float) -> Call:
    from services.worker.ops.triton.sampling import DrawParameters, draw  # Triton: only where a GPU is

    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=logits.device)

    how = DrawParameters(
        filled(1.0), filled(top_k, torch.int64), filled(top_p), filled(0.0), filled(1 << 40, torch.int64)
    )
    return lambda: draw(logits, how)


def _by_torch(logits: Tensor, top_k: int, top_p: float) -> Call:
    """Nothing is cut, and so nothing sorted, where all tokens stay."""
    if top_p == 1.0:
        return lambda: torch.multinomial(torch.softmax(logits.float(), dim=-1), 1)

    def drawn() -> Tensor:
        highest, tokens = torch.sort(logits.float(), dim=-1, descending=True)
        chances = torch.softmax(highest[:, :top_k], dim=-1)
        inside = torch.cumsum(chances, dim=-1) - chances < top_p
        return tokens.gather(1, torch.multinomial(chances * inside, 1))

    return drawn
