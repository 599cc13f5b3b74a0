"""Which tokens may be drawn at all, a bit for each: `allowed_token_ids` and grammars. No torch.

The layout is xgrammar's: int32 [rows, ceil(vocab / 32)], token t is bit t % 32 of word t // 32, 1 where it is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WORD = 32
"""Bits of a word."""


def mask_words(vocab_size: int) -> int:
    """int32 words of one row's bits."""
    return -(-vocab_size // WORD)


def mask_bits(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """[words] a row that allows `tokens`; those outside the vocabulary are left out."""
    allowed = np.zeros(mask_words(vocab_size) * WORD, dtype=np.uint8)
    inside = np.array([token for token in tokens if 0 <= token < vocab_size], dtype=np.int64)
    allowed[inside] = 1
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
