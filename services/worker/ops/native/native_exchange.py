"""Collectives of the ranks of one host by the C++ library, through memory that they share.

A sum of gloo's goes through the sockets and threads of both processes and costs half a millisecond of processor time,
a decode step has two for each layer. Here a rank copies its part to where all can read it, and adds up what it reads.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from services.worker.distributed.host_memory import HostMemory, RankGone, RowRange, SharedExchange
from services.worker.distributed.host_notifier import NotifierState
from services.worker.distributed.traffic import HOST_TRAFFIC, ExchangeName
from services.worker.ops.native import library
from services.worker.ops.native.build import BuildError, best_level, library_path

_log = logging.getLogger(__name__)

BUFFER_BYTES = 256 << 10
"""Of a rank's two buffers each: larger tensors go through them piece by piece."""
CHECK_PERIOD = timedelta(milliseconds=200)
"""How long a rank waits for another one before it looks whether that lives."""
_KINDS: dict[ExchangeName, int] = {
    "sum": library.EXCHANGE_SUM,
    "gather": library.EXCHANGE_GATHER,
    "broadcast": library.EXCHANGE_BROADCAST,
    "all_gather": library.EXCHANGE_ALL_GATHER,
    "reduce_scatter": library.EXCHANGE_REDUCE_SCATTER,
    "dispatch": library.EXCHANGE_DISPATCH,
    "combine": library.EXCHANGE_COMBINE,
}
_NUMBERS = {torch.float32: library.SINGLE, torch.bfloat16: library.HALF}


def shared_exchange(ranks: int) -> SharedExchange | None:
    """For so many ranks; None where there is no library, or they are too many."""
    if ranks > library.MAX_EXCHANGING:
        return None
    try:
        loaded = library.load(library_path(best_level()))
    except (BuildError, OSError, AttributeError) as error:
        _log.info("ranks exchange tensors by sockets: %s", error)
        return None
    return SharedExchange(library.HEAD_PAGE + ranks * 2 * BUFFER_BYTES, partial(NativeExchange, loaded))


class NativeExchange:
    """See :class:`services.worker.distributed.host_memory.HostExchange`."""

    def __init__(self, loaded: ctypes.CDLL, memory: HostMemory) -> None:
        self._library = loaded
        self._memory = memory
        self._view = torch.frombuffer(memory.mapping, dtype=torch.uint8)
        stage_rank = memory.stage_rank
        self._own = library.Exchange(self._view.data_ptr(), stage_rank.rank, stage_rank.ranks, BUFFER_BYTES)
        self._reference = ctypes.byref(self._own)
        self.notifier = NativeNotifier(loaded, self._own)

    def takes(self, x: Tensor) -> bool:
        """Whether `x` is of floats or bf16 in main memory."""
        return x.dtype in _NUMBERS and x.device.type == "cpu"

    def sum(self, x: Tensor) -> None:
        """See `HostExchange.sum`; rounded to bf16 once."""
        self._exchange("sum", x, None)

    def gather(self, x: Tensor) -> list[Tensor]:
        """See `HostExchange.gather`."""
        stage_rank = self._memory.stage_rank
        parts = None if stage_rank.rank else torch.empty((stage_rank.ranks, *x.shape), dtype=x.dtype)
        self._exchange("gather", x, None if parts is None else parts.data_ptr())
        return [] if parts is None else list(parts)

    def broadcast(self, x: Tensor) -> None:
        """See `HostExchange.broadcast`."""
        self._exchange("broadcast", x, None)

    def all_gather(self, x: Tensor, shares: Sequence[RowRange]) -> None:
        """See `HostExchange.all_gather`."""
        self._exchange_shares("all_gather", x, shares)

    def reduce_scatter(self, x: Tensor, shares: Sequence[RowRange]) -> None:
        """See `HostExchange.reduce_scatter`; rounded to bf16 once."""
        self._exchange_shares("reduce_scatter", x, shares)

    def dispatch(self, x: Tensor, shares: Sequence[RowRange]) -> Callable[[], None]:
        """See `HostExchange.dispatch`."""
        rows = _rows_in_flight(x, shares, None)
        finish = self._start("dispatch", x, ctypes.addressof(rows))
        return partial(_keeping, finish, rows)

    def combine(self, x: Tensor, shares: Sequence[RowRange], holders: Tensor) -> None:
        """See `HostExchange.combine`; rounded to bf16 once."""
        rows = _rows_in_flight(x, shares, holders)
        self._exchange("combine", x, ctypes.addressof(rows))

    def close(self) -> None:
        """Lets go of the memory."""
        self._memory.close()

    def _exchange_shares(self, kind: ExchangeName, x: Tensor, shares: Sequence[RowRange]) -> None:
        laid_out = _byte_ranges(x, shares)
        self._exchange(kind, x, ctypes.addressof(laid_out))

    def _exchange(self, kind: ExchangeName, x: Tensor, to: int | None) -> None:
        self._start(kind, x, to)()

    def _start(self, kind: ExchangeName, x: Tensor, to: int | None) -> Callable[[], None]:
        """What others read first of this rank is there for them when this returns what goes on with it. Nothing else
        may be exchanged before that has been called."""
        if not x.is_contiguous():
            raise ValueError(f"a tensor of strides {x.stride()} is exchanged: contiguous ones are")
        number = _NUMBERS.get(x.dtype, library.SINGLE)
        own, before = self._own, (self._own.sent, self._own.received)
        call = partial(self._library.baton_exchange, self._reference, _KINDS[kind], number, x.data_ptr(), x.nbytes, to)
        call(-1)

        def finish() -> None:
            begun: float | None = None
            while late := call(int(CHECK_PERIOD.total_seconds() * 1000)):
                if late == library.OTHER_EXCHANGE:
                    raise RankGone("the ranks of this stage are in different exchanges")
                begun = begun or time.monotonic()
                self._memory.check(late - 1, begun)
            HOST_TRAFFIC.add(kind, own.sent - before[0], own.received - before[1])

        return finish


def _byte_ranges(x: Tensor, shares: Sequence[RowRange]) -> ctypes.Array[library.ByteRange]:
    width = x.shape[1] * x.element_size()
    return (library.ByteRange * len(shares))(*(library.ByteRange(first * width, end * width) for first, end in shares))


def _rows_in_flight(x: Tensor, shares: Sequence[RowRange], holders: Tensor | None) -> library.RowsInFlight:
    width = x.shape[1] * x.element_size()
    if width > BUFFER_BYTES:
        raise ValueError(f"rows of {width} bytes: at most {BUFFER_BYTES} go from rank to rank")
    ranges = _byte_ranges(x, shares)
    return library.RowsInFlight(ranges, width, None if holders is None else holders.data_ptr())


def _keeping(finish: Callable[[], None], _: object) -> None:
    """`finish` reads what is kept with it."""
    finish()


class NativeNotifier:
    """See :class:`services.worker.distributed.host_notifier.HostNotifier`. Any thread of the rank may call it."""

    def __init__(self, loaded: ctypes.CDLL, exchange: library.Exchange) -> None:
        """In the memory of `exchange`, which keeps it."""
        self._library = loaded
        self._reference = ctypes.byref(exchange)

    def state(self) -> NotifierState:
        """See `HostNotifier.state`."""
        return NotifierState(*divmod(self._library.baton_notifier_state(self._reference), 1 << 32))

    def notify(self, call: int | None = None) -> None:
        """See `HostNotifier.notify`."""
        self._library.baton_notify(self._reference, call is not None, call or 0)

    def wait(self, seen: int, seconds: float) -> None:
        """See `HostNotifier.wait`."""
        self._library.baton_await_notify(self._reference, seen, int(seconds * 1000))

    def show(self, shown: int) -> None:
        """See `HostNotifier.show`."""
        self._library.baton_show(self._reference, shown)

    def shown_by(self, rank: int) -> int:
        """See `HostNotifier.shown_by`."""
        shown: int = self._library.baton_shown_by(self._reference, rank)
        return shown
