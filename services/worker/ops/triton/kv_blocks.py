"""Blocks between the caches of all layers and one run of memory laid out as an arena's slots are, in one launch.

A cell is what a block's tokens of one head are in one layer: keys, then values. Staged blocks are
[n][heads][layers][cell], see kvstore/core/layout.py. Whatever the numbers are, bytes are copied.

Bytes moved for n blocks: 2 · n · heads · layers · cell, read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD = 4
"""Bytes that are copied as one number; a block of any head is a multiple."""
WARPS = 4


class BlockCaches:
    """Where all layers' key and value caches lie: each [blocks, KV, block_size, elements], contiguous, on one device.
    Keeps them."""

    def __init__(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        one = caches[0][0]
        self._caches = caches
        self._heads = one.shape[1]
        self._words = [cache[0, 0].nbytes // _WORD for cache in caches[0]]
        """Of a head's keys and of its values in one block."""
        addresses = [[cache.data_ptr() for cache in halves] for halves in caches]
        self._addresses = torch.tensor(addresses, dtype=torch.int64).to(one.device)
        """[layers, 2]"""

    def gather(self, blocks: Tensor, staged: Tensor) -> None:
        """staged [n, KV, layers, words of a cell], contiguous = the caches' `blocks` (int32 [n], on the device)."""
        self._copy(blocks, staged, gather=True)

    def scatter(self, blocks: Tensor, staged: Tensor) -> None:
        """The caches' `blocks`, each named once = staged."""
        self._copy(blocks, staged, gather=False)

    def _copy(self, blocks: Tensor, staged: Tensor, *, gather: bool) -> None:
        layers = len(self._caches)
        kv_blocks_kernel[(len(blocks) * self._heads * layers * 2,)](
            *(self._addresses, blocks, staged.view(torch.int32)),
            HEADS=self._heads,
            LAYERS=layers,
            KEY_WORDS=self._words[0],
            VALUE_WORDS=self._words[1],
            BLOCK=triton.next_power_of_2(max(self._words)),
            GATHER=gather,
            num_warps=WARPS,
        )


@triton.jit
def kv_blocks_kernel(
    addresses,
    blocks,
    staged,
    HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """The keys or the values of one cell a program."""
    number = tl.program_id(0)
    half, layer = number % 2, number // 2 % LAYERS
    head, place = number // (2 * LAYERS) % HEADS, number // (2 * LAYERS * HEADS)
    block = tl.load(blocks + place).to(tl.int64)
    cache = tl.load(addresses + layer * 2 + half).to(tl.pointer_type(tl.int32))
    words = KEY_WORDS if KEY_WORDS == VALUE_WORDS else tl.where(half == 0, KEY_WORDS, VALUE_WORDS)
    cell = tl.multiple_of(cache, 16) + (block * HEADS + head) * words
    copy = staged + (number // 2).to(tl.int64) * (KEY_WORDS + VALUE_WORDS) + half * KEY_WORDS
    word = tl.arange(0, BLOCK)
    if GATHER:
        tl.store(copy + word, tl.load(cell + word, mask=word < words), mask=word < words)
    else:
        tl.store(cell + word, tl.load(copy + word, mask=word < words), mask=word < words)
