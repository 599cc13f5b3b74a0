"""Blocks gathered from all layers' caches and scattered back by one Triton kernel, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.triton.kv_blocks import BlockCaches
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from tests.support.kernels.kernel_device import DEVICE

BLOCKS = 7


def _caches(layers: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def cache() -> Tensor:
        size = (BLOCKS, heads, BLOCK_SIZE, head_dim * dtype.itemsize)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype).to(DEVICE)

    return [(cache(), cache()) for _ in range(layers)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def _blocks(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize(("layers", "heads", "head_dim"), [(3, 2, 64), (1, 1, 80), (2, 3, 6), (1, 1, 1)])
def test_staged_blocks_are_laid_out_as_slots_are(layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    caches = _caches(layers, heads, head_dim, dtype, seed=1)
    staged = torch.zeros((2, heads, layers, 2, BLOCK_SIZE * head_dim), dtype=dtype, device=DEVICE)
    BlockCaches(caches).gather(_blocks(5, 0), staged)
    for place, block in enumerate((5, 0)):
        for layer, halves in enumerate(caches):
            for half, cache in enumerate(halves):
                assert torch.equal(_bytes(staged[place, :, layer, half]), _bytes(cache[block].flatten(1)))


def test_latents_and_their_rotated_keys_take_as_much_of_a_cell_as_they_have() -> None:
    wide, narrow = (_caches(2, 1, head_dim, torch.bfloat16, seed=head_dim) for head_dim in (48, 8))
    caches = [(keys, values) for (keys, _), (values, _) in zip(wide, narrow, strict=True)]
    staged = torch.zeros((2, 1, 2, BLOCK_SIZE * 56), dtype=torch.bfloat16, device=DEVICE)
    BlockCaches(caches).gather(_blocks(5, 0), staged)
    for place, block in enumerate((5, 0)):
        for layer, (keys, values) in enumerate(caches):
            expected = torch.cat((keys[block].flatten(), values[block].flatten()))
            assert torch.equal(_bytes(staged[place, 0, layer]), _bytes(expected))
    BlockCaches(caches).scatter(_blocks(1, 2), staged)
    assert all(torch.equal(_bytes(cache)[[1, 2]], _bytes(cache)[[5, 0]]) for halves in caches for cache in halves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("head_dim", [64, 6])
def test_what_was_gathered_is_scattered_to_other_blocks_and_nowhere_else(head_dim: int, dtype: torch.dtype) -> None:
    one, other = (_caches(2, 3, head_dim, dtype, seed=seed) for seed in (1, 2))
    before = [[_bytes(cache) for cache in halves] for halves in other]
    staged = torch.zeros((3, 3, 2, 2, BLOCK_SIZE * head_dim), dtype=dtype, device=DEVICE)
    BlockCaches(one).gather(_blocks(4, 1, 6), staged)
    BlockCaches(other).scatter(_blocks(0, 6, 2), staged)
    for mine, theirs, old in zip(one, other, before, strict=True):
        for source, target, untouched in zip(mine, theirs, old, strict=True):
            assert torch.equal(_bytes(target)[[0, 6, 2]], _bytes(source)[[4, 1, 6]])
            assert torch.equal(_bytes(target)[[1, 3, 4, 5]], untouched[[1, 3, 4, 5]])
