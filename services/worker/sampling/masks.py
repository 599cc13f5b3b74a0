"""Which tokens may be drawn at all, a bit for each: `allowed_token_ids` and grammars.

The layout is xgrammar's: int32 [rows, ceil(vocab / 32)], token t is bit t % 32 of word t // 32, 1 where it is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.transfer import to_device

_WORD = 32


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


def mask_words(vocab_size: int) -> int:
    """int32 words of one row's bits."""
    return -(-vocab_size // _WORD)


def mask_bits(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """[words] a row that allows `tokens`; those outside the vocabulary are left out."""
    allowed = np.zeros(mask_words(vocab_size) * _WORD, dtype=np.uint8)
    inside = np.array([token for token in tokens if 0 <= token < vocab_size], dtype=np.int64)
    allowed[inside] = 1
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


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
    places = torch.arange(_WORD, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(2) >> places) & 1).view(len(bits), -1)
