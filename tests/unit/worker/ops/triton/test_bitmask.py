"""Bits put upon rows of logits by a Triton kernel, as PyTorch puts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.sampling.masks import apply_mask, apply_mask_by_kernel
from services.worker.sampling.token_bits import mask_words
from tests.support.kernels.kernel_device import DEVICE


@pytest.mark.parametrize("vocab", [1, 31, 64, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_a_mask_keep_what_it_allows_and_others_keep_everything(vocab: int, dtype: torch.dtype) -> None:
    chance = np.random.default_rng(vocab)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = np.array([0, 3], dtype=np.intp)
    bits = chance.integers(-(2**31), 2**31, (2, mask_words(vocab)), dtype=np.int32)
    wanted = logits.clone()
    wanted[rows] = apply_mask(logits[rows], torch.from_numpy(bits))
    masked = logits.to(DEVICE, copy=True)
    apply_mask_by_kernel(masked, rows, bits)
    assert torch.equal(masked.cpu(), wanted)
