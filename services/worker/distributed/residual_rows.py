"""Which rows of a step a rank has between products that the ranks of its stage compute together: all of them, or with
sequence parallelism its share. Knows tensors and ranks; no models.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198: where a sum over
ranks would give every rank all rows, a reduce-scatter gives each its own, whose norms and residuals it alone computes,
and an all-gather in front of the next product gives all rows to all.

Parts of a row are added up in float32 in the order of the ranks both ways, so a row has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.worker.distributed.communicator import Communicator
from services.worker.distributed.host_memory import HostExchange, RowRange


def even_shares(rows: int, ranks: int) -> list[RowRange]:
    """Of each rank, one behind the other: as even as can be, empty where there are fewer rows than ranks."""
    return [RowRange(rows * rank // ranks, rows * (rank + 1) // ranks) for rank in range(ranks)]


class ResidualRows:
    """Owns how the current step's rows lie on the ranks, which all call it alike. Used by the thread that computes."""

    def __init__(
        self, communicator: Communicator, exchange: HostExchange | None = None, min_rows: int | None = None
    ) -> None:
        """`min_rows`: a step of so many rows is shared, a smaller one is not; None: none is. Needs `exchange` then."""
        self._communicator, self._exchange, self._min_rows = communicator, exchange, min_rows
        self._shares: Sequence[RowRange] | None = None

    def __str__(self) -> str:
        """For what all ranks must have alike."""
        return "" if self._min_rows is None else f", shared from {self._min_rows}"

    def begin(self, rows: int) -> None:
        """So many are computed from here on."""
        shared = self._min_rows is not None and rows >= self._min_rows
        self._shares = even_shares(rows, self._communicator.world_size) if shared else None

    @property
    def shares(self) -> Sequence[RowRange] | None:
        """Of each rank; None: all have all rows."""
        return self._shares

    @property
    def own(self) -> RowRange | None:
        """This rank's share; None: all rows."""
        return None if self._shares is None else self._shares[self._communicator.rank]

    def count(self, rows: int) -> int:
        """How many of so many, which are all, this rank has."""
        own = self.own
        return rows if own is None else own.end - own.first

    def summed(self, partial: Tensor) -> Tensor:
        """partial [n, width], one part on each rank → this rank's rows of the sum; may overwrite `partial`. Raises
        RankGone."""
        own = self.own
        if own is None or self._shares is None or self._exchange is None:
            return self._communicator.sum(partial)
        self._exchange.reduce_scatter(partial, self._shares)
        return partial[own.first : own.end]

    def gathered(self, x: Tensor) -> Tensor:
        """x, this rank's rows → all rows [n, width]. Raises RankGone."""
        own = self.own
        if own is None or self._shares is None or self._exchange is None:
            return x
        whole = x.new_empty(self._shares[-1].end, x.shape[1])
        whole[own.first : own.end] = x
        self._exchange.all_gather(whole, self._shares)
        return whole

    def select(self, x: Tensor, rows: Tensor, *, again: bool = False) -> Tensor:
        """x, this rank's rows of all; `rows` [R] of those → this rank's rows of these, which are all from here on;
        with `again` only from the next call on, which selects of the same rows. The sum of one rank's row and zeros of
        the others is that row, to the last bit. Raises RankGone."""
        before, own = self._shares, self.own
        if own is None:
            self.begin(len(rows))
            chosen = x.index_select(0, rows)
            selected = chosen if (kept := self.own) is None else chosen[kept.first : kept.end]
        else:
            here = ((rows >= own.first) & (rows < own.end)).nonzero().view(-1)
            moved = x.new_zeros(len(rows), x.shape[1])
            moved[here] = x.index_select(0, rows.index_select(0, here) - own.first)
            self.begin(len(rows))
            selected = self.summed(moved)
        if again:
            self._shares = before
        return selected
