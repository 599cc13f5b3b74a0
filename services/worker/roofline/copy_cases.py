"""What a GPU does beside its steps: blocks on their way to an arena, and masks upon logits."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.kernels.traffic import kv_block_bytes, mask_bytes
from services.worker.roofline.findings import Work
from services.worker.roofline.kernel_case import Call, Cases, KernelCase, NothingHere, Situation
from services.worker.sampling.masks import only_allowed, words
from shared.blocks import BLOCK_SIZE

_BLOCKS = (1, 2, 16)
"""Gathered at once; `kv.cuda_copier` takes as many as are some MiB."""
_HELD = 64
"""Of the caches."""


def kv_blocks(situation: Situation) -> Cases:
    if situation.device.type != "cuda":
        raise NothingHere("on a CPU blocks are copied by numpy, straight to the arena")
    return kv_block_cases(situation)


def kv_block_cases(situation: Situation) -> Cases:
    """Bytes: the blocks, read and written. Of all layers, out of the caches to one run of memory."""
    from services.worker.kernels.kv_blocks import BlockCaches  # Triton: only where a GPU is

    config, item = situation.config, situation.dtype.itemsize
    layers, heads, dim = len(config.layers), config.num_kv_heads, config.head_dim
    shape = (_HELD, heads, BLOCK_SIZE, dim)
    caches = [(situation.noise(*shape), situation.noise(*shape)) for _ in range(layers)]
    ours = BlockCaches(caches)
    for count in _BLOCKS:
        size = kv_block_bytes(count, layers=layers, kv_heads=heads, head_dim=dim, cache_itemsize=item)
        firsts = range(0, _HELD - count + 1, count)
        taken = [torch.arange(first, first + count, dtype=torch.int32, device=situation.device) for first in firsts]
        staged = torch.empty(
            (count, heads, layers, 2, BLOCK_SIZE * dim), dtype=situation.dtype, device=situation.device
        )

        def gathered(blocks: Tensor, staged: Tensor = staged) -> Call:
            return lambda: ours.gather(blocks, staged)

        def by_layer(blocks: Tensor, staged: Tensor = staged) -> Call:
            return lambda: _gather_by_layer(caches, blocks, staged)

        yield KernelCase(
            f"{count} blocks of {layers} layers",
            Work(size, 0.0),
            [gathered(blocks) for blocks in taken],
            [by_layer(blocks) for blocks in taken],
            "torch, layer by layer",
        )


def _gather_by_layer(caches: list[tuple[Tensor, Tensor]], blocks: Tensor, staged: Tensor) -> None:
    for layer, halves in enumerate(caches):
        for half, cache in enumerate(halves):
            staged[:, :, layer, half].copy_(cache.flatten(2).index_select(0, blocks))


def masks(situation: Situation) -> Cases:
    if situation.device.type != "cuda":
        raise NothingHere("on a CPU masks are put upon logits by numpy and torch")
    return mask_cases(situation)


def mask_cases(situation: Situation) -> Cases:
    """Bytes: a bit for each logit, and the logits, which are written; nearly all are forbidden."""
    from services.worker.kernels.bitmask import apply_bitmask  # Triton: only where a GPU is

    vocab = situation.config.vocab_size
    for rows in situation.rows:
        size = mask_bytes(rows, vocab, torch.float32.itemsize)
        logits = [situation.noise(rows, vocab).float() for _ in range(situation.copies(size))]
        bits = torch.zeros((rows, words(vocab)), dtype=torch.int32, device=situation.device)
        bits[:, 0] = 1
        numbers = torch.arange(rows, device=situation.device)

        def ours(each: Tensor, bits: Tensor = bits, numbers: Tensor = numbers) -> Call:
            return lambda: apply_bitmask(each, bits, numbers)

        def by_torch(each: Tensor, bits: Tensor = bits) -> Call:
            return lambda: only_allowed(each, bits)

        yield KernelCase(
            f"{rows} rows of {vocab}",
            Work(size, 0.0),
            [ours(each) for each in logits],
            [by_torch(each) for each in logits],
        )
