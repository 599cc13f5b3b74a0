"""A step's drafts where its logits are: what was tried, and what stands of it, for who goes on there."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.batch import Batch
from services.worker.crossing import sent, sent_together
from services.worker.ops import BatchMeta, Ops, Tried
from services.worker.shortfall import Shortfall


class Trial(NamedTuple):
    """On the device."""

    tried: Tried
    outcome: Tensor
    """See `Ops.verify`."""

    def shortfall(self) -> Shortfall:
        """[Q + 1] drafts of each sequence that do not stand; the last one is nobody's, and 0."""
        missing = self.tried.counts + 1 - self.outcome[: len(self.tried.counts)]
        return Shortfall(F.pad(missing, (0, 1)), self.tried.most)

    def last_rows(self) -> Tensor:
        """[Q] the step's row that each sequence's last token was drawn behind."""
        last = self.tried.first + self.outcome[: len(self.tried.first)] - 1
        return last if self.tried.rows is None else self.tried.rows.index_select(0, last)


def trial(ops: Ops, batch: Batch, ids: Tensor, rows: Tensor | None, drawn: Tensor) -> Trial:
    """Of a batch in which somebody has drafts: `ids` [n] are its rows' tokens, `drawn` [R] what was drawn behind `rows`
    (see `drawn_behind`)."""
    first, counts = sent_together((batch.first_drawn, batch.drafted), drawn.device)
    tried = Tried(drawn, ids, rows, first, counts, int(batch.drafted.max()))
    return Trial(tried, ops.verify(tried))


def try_once(ops: Ops, device: torch.device) -> None:
    """Pays what verifying costs the first time: a grammar may ask for it in the middle of serving."""
    numbers = torch.zeros(2, dtype=torch.int32, device=device)
    ops.verify(Tried(numbers.long(), numbers, None, numbers[:1], torch.ones_like(numbers[:1]), 1))


def drawn_behind(batch: Batch, meta: BatchMeta) -> Tensor | None:
    """[R] the rows that tokens are drawn behind, on the device; None: all."""
    if batch.merged is not None:
        return sent(batch.drawn_rows, meta.logits_rows.device)
    return None if meta.every_row else meta.logits_rows
