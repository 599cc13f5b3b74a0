"""How the rows of a data-parallel group reach the ranks of the experts that they pick, and how what these make of them
comes back. Knows tensors and ranks; no experts, no models.

| mode | dispatch | combine |
|------|----------|---------|
| allgather_reducescatter | every row goes to every rank | every rank's part of every row comes back |
| low_latency | a row says where it goes; each rank finds its own: one exchange, no sizes | only from those |
| high_throughput | sizes, then rows without gaps by torch.distributed's all-to-all | the same back |

Parts of a row are added up in the order of the ranks, in float32, whatever the mode; those that a mode leaves out are
zeros in the others. So a row's result has the same bits in all of them, and does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from services.worker.distributed.all2all import All2AllBackend
from services.worker.distributed.host_memory import HostExchange, RowRange
from services.worker.distributed.lockstep import GroupTopology
from services.worker.distributed.traffic import HOST_TRAFFIC

_SET_BYTES = 8
"""Of an int64, which has a bit for each rank."""


class RoutedRows(NamedTuple):
    """Rows on their way to experts."""

    rows: Tensor
    """[n, hidden]"""
    picks: Tensor
    """int32 [n, picks of a row]: what whoever has its experts knows them by."""
    chances: Tensor
    """float32 [n, picks of a row]"""


class RowExchange(Protocol):
    """One rank's end. In each mixture of a step that has rows all ranks call these three, in this order."""

    def start(self, own: RoutedRows, holders: Tensor, counts: Sequence[int]) -> None:
        """own: this engine's rows, the same on all of its ranks; holders int64 [n, picks of a row]: the rank of each
        pick. `counts`: how many rows each engine has. They are on their way when this returns. Raises RankGone."""

    def arrived(self) -> RoutedRows:
        """The rows that have picks here, those of an engine in their order; may have others too. Raises RankGone."""

    def combine(self, computed: Tensor) -> Tensor:
        """computed [rows that arrived, hidden]: what this rank's experts make of them, zeros of a row that none of them
        is picked by → [n, hidden], the sum over all ranks for this engine's rows. Raises RankGone."""


def shares_of(rows: Sequence[int]) -> list[RowRange]:
    """Of each engine, where all have so many rows, one behind the other."""
    ends = list(accumulate(rows))
    return [RowRange(end - count, end) for end, count in zip(ends, rows, strict=True)]


class _Layout(NamedTuple):
    """A row as bytes: the ranks it goes to where it says so, its picks, their chances, and itself, to whole words."""

    hidden: int
    dtype: torch.dtype
    picks: int
    head: int

    @classmethod
    def of(cls, routed: RoutedRows, head: int) -> _Layout:
        return cls(routed.rows.shape[1], routed.rows.dtype, routed.picks.shape[1], head)

    def pack(self, routed: RoutedRows, ranks: Tensor | None) -> Tensor:
        """uint8 [n, width]"""
        parts = [] if ranks is None else [ranks.unsqueeze(1)]
        parts += [routed.picks.to(torch.int32), routed.chances.float(), routed.rows]
        count, gap = len(routed.rows), -(self.hidden * self.dtype.itemsize) % 4
        words = [each.contiguous().view(torch.uint8).view(count, each.shape[1] * each.itemsize) for each in parts]
        return torch.cat((*words, *((words[0].new_zeros(count, gap),) if gap else ())), dim=1)

    def unpack(self, packed: Tensor) -> RoutedRows:
        ends = list(accumulate((self.head, 4 * self.picks, 4 * self.picks, self.hidden * self.dtype.itemsize)))
        picks, chances, rows = (packed[:, begin:end].contiguous() for begin, end in pairwise(ends))
        shape = (len(packed), -1) if len(packed) else None
        return RoutedRows(
            rows.view(self.dtype).view(shape or (0, self.hidden)),
            picks.view(torch.int32).view(shape or (0, self.picks)),
            chances.view(torch.float32).view(shape or (0, self.picks)),
        )


def _goes_to(holders: Tensor, ranks: int) -> Tensor:
    """bool [n, ranks]: which ranks have a pick of each row."""
    return torch.zeros(len(holders), ranks, dtype=torch.bool).scatter_(1, holders, True)


class GatheredRows:
    """The `RowExchange` by an all-gather and a reduce-scatter through memory."""

    def __init__(self, place: GroupTopology, exchange: HostExchange) -> None:
        self._place, self._exchange = place, exchange
        self._counts: Sequence[int] = ()
        self._arrived: RoutedRows | None = None

    def start(self, own: RoutedRows, holders: Tensor, counts: Sequence[int]) -> None:
        """See `RowExchange.start`; rows are there when this returns."""
        layout, self._counts = _Layout.of(own, 0), counts
        packed = layout.pack(own, None)
        together, shares = packed.new_empty(sum(counts), packed.shape[1]), shares_of(counts)
        together[slice(*shares[self._place.engine])] = packed
        self._exchange.all_gather(together, given_by_first(self._place, shares))
        self._arrived = layout.unpack(together)

    def arrived(self) -> RoutedRows:
        """The rows of all engines."""
        assert self._arrived is not None, "rows are on their way"
        return self._arrived

    def combine(self, computed: Tensor) -> Tensor:
        """See `RowExchange.combine`."""
        shares, added = shares_of(self._counts), computed.float().contiguous()
        self._exchange.reduce_scatter(added, read_by_all(self._place, shares))
        return added[slice(*shares[self._place.engine])]


class LowLatencyRows:
    """The `RowExchange` in which rows lie where `GatheredRows` has them, and each rank reads what is for it alone."""

    def __init__(self, place: GroupTopology, exchange: HostExchange) -> None:
        self._place, self._exchange = place, exchange
        self._bits = torch.tensor([1 << rank for rank in range(place.group_size)])
        self._counts: Sequence[int] = ()
        self._layout: _Layout | None = None
        self._together = self._holders = self._mine = torch.empty(0)
        self._finish: Callable[[], None] | None = None

    def start(self, own: RoutedRows, holders: Tensor, counts: Sequence[int]) -> None:
        """See `RowExchange.start`."""
        sets = (_goes_to(holders, self._place.group_size) * self._bits).sum(1)
        self._layout, self._counts = _Layout.of(own, _SET_BYTES), counts
        packed, shares = self._layout.pack(own, sets), shares_of(counts)
        self._together = packed.new_empty(sum(counts), packed.shape[1])
        self._together[slice(*shares[self._place.engine])] = packed
        self._finish = self._exchange.dispatch(self._together, given_by_first(self._place, shares))

    def arrived(self) -> RoutedRows:
        """See `RowExchange.arrived`."""
        assert self._layout is not None, "rows are on their way"
        assert self._finish is not None, "rows are on their way"
        self._finish()
        self._holders = self._together[:, :_SET_BYTES].contiguous().view(torch.int64).view(-1)
        self._mine = (self._holders & (1 << self._place.in_group)).nonzero().view(-1)
        return self._layout.unpack(self._together.index_select(0, self._mine))

    def combine(self, computed: Tensor) -> Tensor:
        """See `RowExchange.combine`."""
        shares = shares_of(self._counts)
        added = torch.empty(sum(self._counts), computed.shape[1])
        added.index_copy_(0, self._mine, computed.float())
        self._exchange.combine(added, read_by_all(self._place, shares), self._holders)
        return added[slice(*shares[self._place.engine])]


class HighThroughputRows:
    """The `RowExchange` by all-to-all: rows lie without gaps, and where they end is said before. Each rank of an engine
    sends its part of the engine's rows; what comes of a row comes back to all of them."""

    def __init__(self, place: GroupTopology) -> None:
        self._place = place
        self._goes = torch.empty(0, 0, dtype=torch.bool)
        self._layout: _Layout | None = None
        self._came: list[int] = []
        self._packed = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self, own: RoutedRows, holders: Tensor, counts: Sequence[int]) -> None:
        """See `RowExchange.start`."""
        place, ranks = self._place, self._place.group_size
        first, end = (len(own.rows) * at // place.tp for at in (place.rank, place.rank + 1))
        self._goes = _goes_to(holders, ranks)
        sent = self._goes[first:end].sum(0)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        self._came, self._layout = came.tolist(), _Layout.of(own, 0)
        packed = self._layout.pack(own, None)
        places = self._goes[first:end].t().nonzero()[:, 1] + first  # by rank, then by row
        going = packed.index_select(0, places)
        self._packed = packed.new_empty(sum(self._came), packed.shape[1])
        self._work = self._send(self._packed, going, self._came, sent.tolist(), later=True)

    def arrived(self) -> RoutedRows:
        """See `RowExchange.arrived`."""
        assert self._layout is not None, "rows are on their way"
        if self._work is not None:
            self._work.wait()
        return self._layout.unpack(self._packed)

    def combine(self, computed: Tensor) -> Tensor:
        """See `RowExchange.combine`."""
        place, computed = self._place, computed.float()
        of_engines = [sum(self._came[at : at + place.tp]) for at in range(0, place.group_size, place.tp)]
        parts = [part for part in torch.split(computed, of_engines) for _ in range(place.tp)]
        back = self._goes.sum(0).tolist()
        came = computed.new_empty(sum(back), computed.shape[1])
        self._send(came, torch.cat(parts), back, [len(part) for part in parts])
        added = computed.new_zeros(len(self._goes), computed.shape[1])
        for rank, part in enumerate(torch.split(came, back)):
            added.index_add_(0, self._goes[:, rank].nonzero().view(-1), part)
        return added

    def _send(
        self, into: Tensor, x: Tensor, come: list[int], go: list[int], *, later: bool = False
    ) -> dist.Work | None:
        """The rows of `x`, so many to each rank, for those of `into`."""
        work: dist.Work | None = dist.all_to_all_single(into, x, come, go, async_op=later)
        here, size = self._place.in_group, x.shape[1] * x.itemsize
        HOST_TRAFFIC.add("all_to_all", (sum(go) - go[here]) * size, (sum(come) - come[here]) * size)
        return work


def row_exchange(backend: All2AllBackend, place: GroupTopology, exchange: HostExchange) -> RowExchange:
    """One rank's end; every rank of the group has the same `backend`."""
    match backend:
        case "auto" | "allgather_reducescatter":  # the least time in memory of one host: ADR 123
            return GatheredRows(place, exchange)
        case "high_throughput":
            return HighThroughputRows(place)
        case "low_latency":
            return LowLatencyRows(place, exchange)


def given_by_first(place: GroupTopology, shares: Sequence[RowRange]) -> list[RowRange]:
    """Of each rank, where of an engine's ranks the first gives its rows to all."""
    nothing = [RowRange(0, 0)] * (place.tp - 1)
    return [each for share in shares for each in (share, *nothing)]


def read_by_all(place: GroupTopology, shares: Sequence[RowRange]) -> list[RowRange]:
    """Of each rank, where all ranks of an engine get what comes of its rows."""
    return [share for share in shares for _ in range(place.tp)]
