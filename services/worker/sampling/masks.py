"""Logits of tokens that may not be drawn, by the bits of `token_bits`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.transfer import to_device
from services.worker.sampling.token_bits import WORD


class TokenMask(NamedTuple):
    """Which tokens some of a batch's rows may draw."""

    rows: NDArray[np.intp]
    """[M] in rising order, each once."""
    bits: NDArray[np.int32]
    """[M, words]"""

    def part(self, first: int, last: int) -> TokenMask:
        """The mask of the batch's rows from `first` up to `last`, which count from 0 then."""
        begin, end = np.searchsorted(self.rows, (first, last))
        return TokenMask(self.rows[begin:end] - first, self.bits[begin:end])


def apply_mask(logits: Tensor, bits: Tensor) -> Tensor:
    """logits [P, vocab], bits int32 [P, words] → -inf where a bit is 0; overwrites `logits`."""
    return logits.masked_fill_(_spread(bits)[:, : logits.shape[1]] == 0, -torch.inf)


def apply_mask_by_kernel(logits: Tensor, rows: NDArray[np.intp], bits: NDArray[np.int32]) -> None:
    """See `apply_mask`, by a Triton kernel: of `logits` [R, vocab], contiguous on a GPU, the `rows` [P], each once."""
    from services.worker.ops.triton.sampling import apply_bitmask

    apply_bitmask(logits, to_device(bits, logits.device), to_device(rows.astype(np.int64), logits.device))


def _spread(bits: Tensor) -> Tensor:
    """[P, words] → [P, words * 32], an entry for each bit."""
    if bits.device.type == "cpu":  # NumPy's is many times as fast
        return torch.from_numpy(np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little"))
    places = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(2) >> places) & 1).view(len(bits), -1)
