"""What a step drew, written behind the rows that it was drawn behind, where the next step's rows are read.

Bytes moved for R tokens: 4 for each row's cell, 8 for the token, 4 to write it; and 4 where rows are named. It takes
the place of four launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def feed(table: Tensor, cells: Tensor, rows: Tensor | None, tokens: Tensor) -> None:
    """tokens [R] of any kind of integer → int32 in `table`, in the cell behind that of its row.

    cells int32 [n], one for each row of the step; rows int32 [R] names those that were drawn behind, None: the first R.
    """
    count = len(tokens)
    if count:
        named = cells if rows is None else rows
        feed_kernel[(triton.cdiv(count, BLOCK),)](
            table, cells, named, tokens, count, NAMED=rows is not None, BLOCK=BLOCK, num_warps=4
        )


@triton.jit(do_not_specialize=["count"])
def feed_kernel(table, cells, rows, tokens, count, NAMED: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = number < count
    row = tl.load(rows + number, mask=there, other=0) if NAMED else number
    cell = tl.load(cells + row, mask=there, other=0).to(tl.int64)
    tl.store(table + cell + 1, tl.load(tokens + number, mask=there, other=0).to(tl.int32), mask=there)
