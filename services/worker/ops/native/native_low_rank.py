"""Low-rank products of adapters by the C++ library; see :class:`services.worker.ops.low_rank.LowRankProducts`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.low_rank import AdapterRows, LowRankPart, LowRankShape
from services.worker.ops.native import library

if TYPE_CHECKING:
    from services.worker.ops.native.native_ops import NativeOps

_LANES = 16
"""`kLanes` of lanes.h: ranks of a group."""
_GROUP_OUTPUTS = 64
"""`kGroupOutputs` of linear.h."""


class NativeLowRank:
    """On the threads of `ops`, in the weights' type. A slot takes the memory that its adapter needs."""

    def __init__(self, ops: NativeOps, shape: LowRankShape) -> None:
        self._ops, self._parts = ops, len(shape.outputs)
        self._products = (library.LowRank * (shape.slots * self._parts))()
        starts = (ctypes.c_int * (self._parts + 1))(*accumulate(shape.outputs, initial=0))
        self.table = library.LowRankTable(ops.number, shape.inputs, self._parts, starts, self._products)
        """What the library reads, as long as this object lives."""
        self._held: dict[int, list[Tensor]] = {}
        """What the table points to, by slot."""

    def put(self, slot: int, parts: Sequence[LowRankPart | None]) -> None:
        """In the library's layout."""
        self.clear(slot)
        for number, part in enumerate(parts):
            if part is None:
                continue
            a, b = self._interleaved(part.a, _LANES), self._interleaved(part.b, _GROUP_OUTPUTS)
            self._held.setdefault(slot, []).extend((a, b))
            self._products[slot * self._parts + number] = library.LowRank(len(part.a), a.data_ptr(), b.data_ptr())

    def clear(self, slot: int) -> None:
        """Its memory is free."""
        for number in range(self._parts):
            self._products[slot * self._parts + number] = library.LowRank()
        self._held.pop(slot, None)

    def add(self, product: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """One call for all adapters; a row's result does not depend on the others."""
        x, number = self._ops.known(x)
        self._ops.kernels.library.baton_add_low_rank(
            self._ops.kernels.pool,
            ctypes.byref(self.table),
            *(x.data_ptr(), number, len(x), x.shape[1]),
            *(rows.slots.data_ptr(), product.data_ptr(), product.shape[1]),
        )

    def _interleaved(self, weight: Tensor, group: int) -> Tensor:
        """[out, in] → [groups of outputs, steps of inputs, outputs of a group, inputs of a step]; the rest zeros."""
        step = 2 if self._ops.number == library.HALF else 1
        out, inputs = weight.shape
        padded = F.pad(weight.to(self._ops.dtype), (0, -inputs % step, 0, -out % group))
        return padded.view(-1, group, padded.shape[1] // step, step).transpose(1, 2).contiguous()
