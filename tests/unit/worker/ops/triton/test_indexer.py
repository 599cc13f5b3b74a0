"""Tokens that an indexer chooses, and attention to those, by Triton's kernels, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops import triton_ops
from services.worker.ops.interface import LatentCache
from services.worker.ops.torch_latent import IndexStep, choose_tokens
from services.worker.ops.triton.attention import indexer
from services.worker.ops.triton_ops import TritonOps
from tests.support.kernels.kernel_device import DEVICE
from tests.support.kernels.sparse_reference import Sparse, check_sparse
from tests.support.worker.native_batches import Rows, meta_of, on_device, scattered_blocks


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 32)])
def test_rows_attend_to_what_their_indexer_scores_best(dtype: torch.dtype, size: int) -> None:
    """Decodes and prompts, of fewer tokens than are chosen and of more."""
    check_sparse(Sparse(TritonOps(DEVICE, dtype, block_size=size), dtype, [9, 30, 50], DEVICE), again=5)


def test_decodes_are_scored_and_attend_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as scores take memory for, and as a launch may have."""
    monkeypatch.setattr(indexer, "MAX_SCORES", 2 * 28)
    monkeypatch.setattr(triton_ops, "_MAX_ROWS", 2)
    sparse = Sparse(TritonOps(DEVICE, torch.float32), torch.float32, [9, 26, 28], DEVICE)
    check_sparse(sparse, again=3)


def _chosen(keys: Tensor, q: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """By the kernels and by PyTorch, of one prompt's last rows: keys [tokens, dim], q [rows, heads, dim]."""
    tokens, dim = keys.shape
    (blocks,) = scattered_blocks([tokens])
    meta = meta_of([Rows(len(q), tokens, blocks)])
    cache = torch.full((len(blocks) + 1, 1, 16, dim), float("nan"))
    for at, key in enumerate(keys):
        cache[blocks[at // 16], 0, at % 16] = key
    plain = choose_tokens(IndexStep(q, weights, LatentCache(cache, cache, cache), meta), count)
    own = indexer.choose_slots(q.to(DEVICE), weights.to(DEVICE), cache.to(DEVICE), on_device(meta, DEVICE), count)
    return own.cpu(), plain


def test_of_equal_scores_the_first_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several tiles of tokens, several rows at a time, and where all scores are the same."""
    monkeypatch.setattr(indexer, "CHOSEN_AT_ONCE", 32)
    monkeypatch.setattr(indexer, "MAX_SCORES", 2 * 300)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-1, 2, (300, 4), generator=generator).float()
    q = torch.randint(-1, 2, (5, 3, 4), generator=generator).float()
    q[2] = 0.0
    for count in (7, 100):
        own, plain = _chosen(keys, q, torch.ones(5, 3), count)
        assert torch.equal(own, plain)


def test_scores_that_are_no_numbers_are_the_least() -> None:
    keys, q = torch.arange(40.0)[:, None].repeat(1, 4), torch.ones(2, 1, 4)
    keys[[5, 39]] = float("nan")
    own, plain = _chosen(keys, q, torch.ones(2, 1), 8)
    assert torch.equal(own, plain)


def test_rows_choose_the_same_however_many_are_scored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, q = torch.randn(60, 8), torch.randn(6, 2, 8)
    weights = torch.randn(6, 2)
    together, _ = _chosen(keys, q, weights, 9)
    monkeypatch.setattr(indexer, "MAX_SCORES", 1)
    alone, plain = _chosen(keys, q, weights, 9)
    assert torch.equal(together, alone)
    assert torch.equal(alone, plain)
