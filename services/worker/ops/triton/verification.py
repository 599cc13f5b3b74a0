"""Which drafts are accepted, for a whole batch in one launch: those that were drawn, see `speculation.verification`.

Bytes moved for Q sequences with R rows: 16·R + 12·Q (8 for each row's token, 4 for its draft, 4 to write it), and 4·R
more where a step has rows that nothing is drawn behind. So few that only the launch counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.drafts import DraftAttempt

BLOCK = 128
"""Sequences of a program, a lane each: whether a draft is accepted depends on those before it."""


def verify(attempt: DraftAttempt) -> Tensor:
    """See :meth:`services.worker.ops.interface.Ops.verify`."""
    sequences, rows = len(attempt.counts), len(attempt.drawn)
    outcome = torch.empty(sequences + rows, dtype=torch.int32, device=attempt.drawn.device)
    verify_kernel[(triton.cdiv(sequences, BLOCK),)](
        *(attempt.drawn, attempt.ids, attempt.ids if attempt.rows is None else attempt.rows),
        *(attempt.first, attempt.counts, outcome, sequences, attempt.max_drafts + 1, attempt.rows is not None),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return outcome


@triton.jit(
    do_not_specialize=["sequences", "places", "named"],
    do_not_specialize_on_alignment=["drawn", "ids", "rows", "first", "counts"],
)
def verify_kernel(drawn, ids, rows, first, counts, outcome, sequences, places, named, BLOCK: tl.constexpr):
    """BLOCK sequences a program, a lane each, with `places` rows at the most; `rows` are read where `named`."""
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = sequence < sequences
    own = tl.load(first + sequence, mask=there, other=0)
    last = tl.load(counts + sequence, mask=there, other=-1)
    gained = tl.zeros((BLOCK,), tl.int32)
    stands = there
    before = tl.zeros((BLOCK,), tl.int32)
    for place in tl.range(0, places):
        inside = place <= last
        row = own + place
        at = tl.where(named, tl.load(rows + row, mask=inside & named, other=0), row)
        draft = tl.load(ids + at, mask=inside, other=0)
        stands = stands & inside & ((draft == before) | (place == 0))
        before = tl.load(drawn + row, mask=inside, other=0).to(tl.int32)
        tl.store(outcome + sequences + row, before, mask=inside)
        gained += stands.to(tl.int32)
    tl.store(outcome + sequence, gained, mask=there)
