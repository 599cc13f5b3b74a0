"""Which tokens may be drawn, a bit for each, put upon logits.

Bytes moved for P rows of V logits of b bytes: P · V / 8 of bits, and b for each forbidden logit, which is written but
never read; at the most P · V · b.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 64
"""Of bits, for one program."""


def apply_bitmask(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """logits [R, vocab], contiguous: row rows[i] becomes -inf wherever bits[i] has a 0.

    bits: int32 [P, ceil(vocab / 32)] in xgrammar's layout, token t is bit t % 32 of word t // 32; rows: int64 [P], each
    once.
    """
    words = bits.shape[1]
    grid = (len(rows), triton.cdiv(words, WORDS))
    bitmask_kernel[grid](logits, bits, rows, VOCAB=logits.shape[1], BITS=words, WORDS=WORDS, num_warps=4)


@triton.jit
def bitmask_kernel(logits, bits, rows, VOCAB: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Some words of one row a program."""
    mask = tl.program_id(0).to(tl.int64)
    # One token a thread, its neighbours' beside it: each is stored or not, so that no thread can store several at once.
    token = tl.max_contiguous(tl.program_id(1) * (WORDS * 32) + tl.arange(0, WORDS * 32), 1)
    allowed = tl.load(bits + mask * BITS + token // 32, mask=token < BITS * 32, other=0)
    forbidden = ((allowed >> (token % 32)) & 1) == 0
    row = logits + tl.load(rows + mask) * VOCAB
    nothing = tl.full((WORDS * 32,), float("-inf"), logits.dtype.element_ty)
    tl.store(row + token, nothing, mask=forbidden & (token < VOCAB))
