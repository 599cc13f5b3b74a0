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
from itertools import accumulate
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
    """A row as bytes: the ranks it goes to where it says so, its picks, their chances, and itself, to whole numbers of
    eight bytes."""

    hidden: int
    dtype: torch.dtype
    picks: int
    head: int

    @classmethod
    def of(cls, routed: RoutedRows, head: int) -> _Layout:
        return cls(routed.rows.shape[1], routed.rows.dtype, routed.picks.shape[1], head)

    @property
    def width(self) -> int:
        wanted = self.head + 8 * self.picks + self.hidden * self.dtype.itemsize
        return wanted + -wanted % 8

    def parts(self, packed: Tensor) -> RoutedRows:
        """packed uint8 [n, width] → its parts, where they lie in it."""
        words, first = packed.view(torch.int32), self.head // 4
        begin = (self.head + 8 * self.picks) // self.dtype.itemsize
        return RoutedRows(
            rows=packed.view(self.dtype)[:, begin : begin + self.hidden],
            picks=words[:, first : first + self.picks],
            chances=packed.view(torch.float32)[:, first + self.picks : first + 2 * self.picks],
        )


class _Packed:
    """Memory of so many rows, of which a share is this rank's, with views of all parts. It serves all mixtures of all
    steps that have as many: at few rows making views takes longer than copying does, and fresh memory costs a page
    fault for each 4 kB."""

    def __init__(self, layout: _Layout, count: int, share: RowRange) -> None:
        self.layout, self.made_for = layout, (layout, count, share)
        self.bytes = torch.zeros(count, layout.width, dtype=torch.uint8)
        own = self.bytes[slice(*share)]
        self.all, self._own = layout.parts(self.bytes), layout.parts(own)
        self._own_sets = own.view(torch.int64)[:, 0]

    def put(self, routed: RoutedRows, sets: Tensor | None = None) -> None:
        """The rows of this rank's share. `sets`: what each begins with where there is a head."""
        for part, given in zip(self._own, routed, strict=True):
            part.copy_(given)
        if sets is not None:
            self._own_sets.copy_(sets)


def _packed(
    before: _Packed | None, routed: RoutedRows, count: int, share: RowRange, sets: Tensor | None = None
) -> _Packed:
    """What `routed` is packed in: the memory of `before` where that suits."""
    wanted = (_Layout.of(routed, 0 if sets is None else _SET_BYTES), count, share)
    packed = before if before is not None and before.made_for == wanted else _Packed(*wanted)
    packed.put(routed, sets)
    return packed


def _goes_to(holders: Tensor, ranks: int) -> Tensor:
    """bool [n, ranks]: which ranks have a pick of each row."""
    return torch.zeros(len(holders), ranks, dtype=torch.bool).scatter_(1, holders, True)


class GatheredRows:
    """The `RowExchange` by an all-gather and a reduce-scatter through memory."""

    def __init__(self, place: GroupTopology, exchange: HostExchange) -> None:
        self._place, self._exchange = place, exchange
        self._shares: Sequence[RowRange] = ()
        self._packed: _Packed | None = None

    def start(self, own: RoutedRows, holders: Tensor, counts: Sequence[int]) -> None:
        """See `RowExchange.start`; rows are there when this returns."""
        self._shares = shares = shares_of(counts)
        self._packed = _packed(self._packed, own, sum(counts), shares[self._place.engine])
        self._exchange.all_gather(self._packed.bytes, given_by_first(self._place, shares))

    def arrived(self) -> RoutedRows:
        """The rows of all engines."""
        assert self._packed is not None, "rows are on their way"
        rows, picks, chances = self._packed.all
        return RoutedRows(rows.contiguous(), picks, chances.contiguous())

    def combine(self, computed: Tensor) -> Tensor:
        """See `RowExchange.combine`."""
        added = computed.float().contiguous()
        self._exchange.reduce_scatter(added, read_by_all(self._place, self._shares))
        return added[slice(*self._shares[self._place.engine])]


class LowLatencyRows:
    """The `RowExchange` in which rows lie where `GatheredRows` has them, and each rank reads what is for it alone."""

    def __init__(self, place: GroupTopology, exchange: HostExchange) -> None:
        self._place, self._exchange = place, exchange
        self._bits = torch.tensor([1 << rank for rank in range(place.group_size)])
        self._shares: Sequence[RowRange] = ()
        self._packed: _Packed | None = None
        self._holders = self._mine = torch.empty(0)
        self._finish: Callable[[], None] | None = None

    def start(self, own: RoutedRows, holders: Tensor, counts: Sequence[int]) -> None:
        """See `RowExchange.start`."""
        sets = (_goes_to(holders, self._place.group_size) * self._bits).sum(1)
        self._shares = shares = shares_of(counts)
        self._packed = _packed(self._packed, own, sum(counts), shares[self._place.engine], sets)
        self._finish = self._exchange.dispatch(self._packed.bytes, given_by_first(self._place, shares))

    def arrived(self) -> RoutedRows:
        """See `RowExchange.arrived`."""
        assert self._packed is not None, "rows are on their way"
        assert self._finish is not None, "rows are on their way"
        self._finish()
        self._holders = self._packed.bytes.view(torch.int64)[:, 0].contiguous()
        self._mine = mine = (self._holders & (1 << self._place.in_group)).nonzero().view(-1)
        return RoutedRows(*(part.index_select(0, mine) for part in self._packed.all))

    def combine(self, computed: Tensor) -> Tensor:
        """See `RowExchange.combine`."""
        added = torch.empty(self._shares[-1].end, computed.shape[1])
        added.index_copy_(0, self._mine, computed.float())
        self._exchange.combine(added, read_by_all(self._place, self._shares), self._holders)
        return added[slice(*self._shares[self._place.engine])]


class HighThroughputRows:
    """The `RowExchange` by all-to-all: rows lie without gaps, and where they end is said before. Each rank of an engine
    sends its part of the engine's rows; what comes of a row comes back to all of them."""

    def __init__(self, place: GroupTopology) -> None:
        self._place = place
        self._goes = torch.empty(0, 0, dtype=torch.bool)
        self._packed: _Packed | None = None
        self._came: list[int] = []
        self._together = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self, own: RoutedRows, holders: Tensor, counts: Sequence[int]) -> None:
        """See `RowExchange.start`."""
        place, ranks = self._place, self._place.group_size
        first, end = (len(own.rows) * at // place.tp for at in (place.rank, place.rank + 1))
        self._goes = _goes_to(holders, ranks)
        sent = self._goes[first:end].sum(0)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        self._came, rows = came.tolist(), len(own.rows)
        self._packed = _packed(self._packed, own, rows, RowRange(0, rows))
        places = self._goes[first:end].t().nonzero()[:, 1] + first  # by rank, then by row
        going = self._packed.bytes.index_select(0, places)
        self._together = going.new_empty(sum(self._came), going.shape[1])
        self._work = self._send(self._together, going, self._came, sent.tolist(), later=True)

    def arrived(self) -> RoutedRows:
        """See `RowExchange.arrived`."""
        assert self._packed is not None, "rows are on their way"
        if self._work is not None:
            self._work.wait()
        rows, picks, chances = self._packed.layout.parts(self._together)
        return RoutedRows(rows.contiguous(), picks, chances.contiguous())

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
