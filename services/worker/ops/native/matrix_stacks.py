"""Several matrices of one shape, and rows that are multiplied with one of them each, in one job of the threads; and how
a mixture's router chooses among them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from services.worker.ops.interface import Activation, PackedExperts, Picks, Routing
from services.worker.ops.native import library
from services.worker.ops.native.kernels import NativeKernels, PackedMatrix, address_of, native_activation
from services.worker.ops.quantized import QuantizedStack, WeightStack
from services.worker.ops.torch_routing import route

if TYPE_CHECKING:
    from services.worker.ops.native.native_ops import NativeOps


class MatrixStack(NamedTuple):
    """One matrix of every expert, or of every head."""

    linears: ctypes.Array[library.Linear]
    packed: tuple[PackedMatrix, ...]

    @property
    def out(self) -> int:
        """Outputs of each matrix."""
        return self.packed[0].out

    def __reduce__(self) -> tuple[Any, ...]:
        return stack_of, (self.packed,)


def pack_stack(ops: NativeOps, stack: WeightStack, biases: Tensor | None = None) -> MatrixStack:
    """`stack` [matrices, out, in] and `biases` [matrices, out] in the library's layout."""
    each = [None] * stack.shape[0] if biases is None else biases.unbind()
    if isinstance(stack, QuantizedStack):
        return stack_of(tuple(map(ops.pack_codes, stack.matrices, each)))
    return stack_of(tuple(map(ops.pack_matrix, stack, each)))


def stack_of(packed: Sequence[PackedMatrix]) -> MatrixStack:
    """Matrices of one shape, where they are."""
    return MatrixStack((library.Linear * len(packed))(*(each.linear for each in packed)), tuple(packed))


def multiply_each(ops: NativeOps, x: Tensor, stack: MatrixStack, starts: Tensor) -> Tensor:
    """Rows starts[i] to starts[i + 1] of x times matrix i, float32."""
    x, number = ops.known(x)
    to = torch.empty(len(x), stack.out)
    ops.kernels.library.baton_multiply_each(
        ops.kernels.pool,
        *(stack.linears, starts.data_ptr(), len(stack.packed), x.data_ptr(), number, *x.shape),
        *(library.OUT_FLOAT, 0, to.data_ptr(), to.shape[1]),
    )
    return to


# Mixtures of experts as the library reads them: how their routers choose, and their matrices.


class NativeExperts(NamedTuple):
    """A mixture's experts as the library reads them."""

    gate_up: MatrixStack
    down: MatrixStack


def rule_of(routing: Routing, experts: int) -> library.RouterRule:
    """How one of so many `experts` is chosen; points to the routing's bias."""
    assert knows_router(routing), "a pass with such a router is made of single operations"
    return library.RouterRule(
        *(experts, routing.chosen, routing.scoring == "sigmoid", routing.renormalised, address_of(routing.bias)),
        *(routing.scale, routing.groups, routing.chosen_groups),
    )


def knows_router(routing: Routing) -> bool:
    """Whether the library chooses experts so: by softmax or sigmoid, and not by a table."""
    return routing.given is None and routing.scoring != "sqrtsoftplus"


def choose_experts(kernels: NativeKernels, logits: Tensor, routing: Routing) -> Picks:
    """See `Ops.choose_experts`; by PyTorch where the library knows no such router."""
    if not knows_router(routing):
        return route(logits, routing)
    logits, (rows, count) = logits.float().contiguous(), logits.shape
    picks = Picks(torch.empty(rows, routing.chosen), torch.empty(rows, routing.chosen, dtype=torch.int64))
    kernels.library.baton_route(
        *(kernels.pool, logits.data_ptr(), rows, ctypes.byref(rule_of(routing, count))),
        *(picks.chances.data_ptr(), picks.experts.data_ptr()),
    )
    return picks


def matrices_of(experts: PackedExperts, kind: Activation) -> library.NativeMixture:
    """The matrices of what `NativeOps.pack_experts` gave; points to them."""
    assert isinstance(experts, NativeExperts)
    return library.NativeMixture(
        *(experts.gate_up.linears, experts.down.linears, len(experts.down.packed), native_activation(kind))
    )
