"""Whole experts of the library's mixtures on each rank, in place of some columns of every one.

A layer's experts are a module of their own there, whose tensors have all of them. It is given rows, and for each row
the experts that were picked and their chances; Llama 4's is given every row for every expert, times its chance. Either
way a rank keeps some neighbours, computes the picks that are its own, and the sum over ranks puts rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from services.worker.distributed.communicator import Communicator
from services.worker.distributed.lockstep import StepRows
from services.worker.distributed.row_exchange import RoutedRows, RowExchange
from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.placement import ExpertPlacement, spread_evenly
from services.worker.models.fallback.tensor_parallel import mixtures_of


class PickedRows(NamedTuple):
    """Rows on their way to experts."""

    rows: Tensor
    """[n, hidden]"""
    experts: Tensor
    """int64 [n, picks of a row]"""
    chances: Tensor
    """[n, picks of a row]"""


class ExpertMeeting(Protocol):
    """Where the ranks that share experts meet in each layer that mixes."""

    def gather(self, own: PickedRows, holders: Tensor) -> PickedRows:
        """Rows of all who meet here, those among them that pick this rank's experts, given this engine's. holders int64
        [experts]: the rank of each expert."""

    def combine(self, computed: Tensor) -> Tensor:
        """What all ranks made of such rows, of this engine's."""


class StageMeeting:
    """The ranks of a stage, which all have the same rows."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def gather(self, own: PickedRows, holders: Tensor) -> PickedRows:
        """They are there."""
        return own

    def combine(self, computed: Tensor) -> Tensor:
        """See `ExpertMeeting.combine`."""
        return self._communicator.sum(computed.contiguous())


class GroupMeeting:
    """The ranks of all engines of a data-parallel group. Until `begin` is called for the first time nobody is met: what
    is tried while a model is loaded does not depend on what experts make of it."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._step: StepRows | None = None

    def begin(self, step: StepRows) -> None:
        """The group's next step has so many rows."""
        self._step = step

    def gather(self, own: PickedRows, holders: Tensor) -> PickedRows:
        """See `ExpertMeeting.gather`."""
        if self._step is None:
            return own
        self._exchange.start(RoutedRows(*own), holders[own.experts], self._step.rows)
        rows, picks, chances = self._exchange.arrived()
        return PickedRows(rows, picks.long(), chances.to(own.chances.dtype))

    def combine(self, computed: Tensor) -> Tensor:
        """See `ExpertMeeting.combine`."""
        return computed if self._step is None else self._exchange.combine(computed)


class WholeExperts(nn.Module):
    """In the place of a layer's experts."""

    baton_whole = True

    def __init__(self, experts: Any, placement: ExpertPlacement, rank: int, meeting: ExpertMeeting) -> None:
        """`experts`: the library's module of all of them, of which those of `rank` are kept, which are neighbours."""
        super().__init__()
        first, count = placement.ranks[rank][0], len(placement.ranks[rank])
        self._first, self._count, self._meeting = first, count, meeting
        self._holders = torch.tensor([rank for rank, held in enumerate(placement.ranks) for _ in held])
        self._experts = _kept_experts(experts, first, count)
        self._nobody: PickedRows | None = None

    def forward(self, rows: Tensor, experts: Tensor, chances: Tensor) -> Tensor:
        """rows [n, hidden], their picks and chances [n, picks] → [n, hidden]"""
        own = PickedRows(rows, experts, chances)
        if self._nobody is None:
            self._nobody = PickedRows(*(each[:0].clone() for each in own))
        met = self._meeting.gather(own, self._holders)
        here = (met.experts >= self._first) & (met.experts < self._first + self._count)
        row, pick = here.nonzero(as_tuple=True)
        mixed = torch.zeros(met.rows.shape, dtype=torch.float32, device=rows.device)
        if len(row):
            picked = (met.experts[row, pick] - self._first).unsqueeze(1)
            computed = self._experts(met.rows.index_select(0, row), picked, met.chances[row, pick].unsqueeze(1))
            mixed.index_add_(0, row, computed.float())
        return self._meeting.combine(mixed).to(rows.dtype)

    def compute_for_others(self) -> None:
        """A step without rows of this rank's engine. A pass has been computed before."""
        assert self._nobody is not None
        self(*self._nobody)


class EveryRowsExperts(nn.Module):
    """In the place of experts that are given every row: Llama 4's."""

    baton_whole = True

    def __init__(self, experts: Any, placement: ExpertPlacement, rank: int, meeting: ExpertMeeting) -> None:
        """See `WholeExperts`."""
        super().__init__()
        first, count = placement.ranks[rank][0], len(placement.ranks[rank])
        self._all, self._first, self._meeting = int(experts.num_experts), first, meeting
        self._experts = _kept_experts(experts, first, count)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [experts * n, hidden] → as many, whose sum over experts is the first expert's: whoever asks adds up."""
        each = rows.view(self._all, -1, rows.shape[-1])
        own = each[self._first : self._first + self._experts.num_experts]
        computed = self._experts(own.reshape(-1, rows.shape[-1])).view(own.shape).sum(dim=0)
        sums = torch.zeros_like(each)
        sums[0] = self._meeting.combine(computed)
        return sums.view(rows.shape)


def _kept_experts(experts: Any, first: int, count: int) -> Any:
    """The library's module with `count` of its experts, from `first` on."""
    for name, weight in list(experts.named_parameters(recurse=False)):
        own = weight.detach().narrow(0, first, count).clone()
        setattr(experts, name, nn.Parameter(own, requires_grad=False))
    experts.num_experts = count
    return experts


def keep_whole_experts(
    model: nn.Module, rank: int, ranks: int, meeting: ExpertMeeting, *, grouped: bool
) -> list[WholeExperts]:
    """Leaves in each of the model's mixtures the experts of `rank`, and returns these. `grouped`: rows of other engines
    come to them. Raises ModelError where there are none, or they cannot be spread so."""
    name, found = type(model).__name__, list(_mixtures(model))
    if not found:
        raise ModelError(f"enable_expert_parallel: transformers has no plan for {name} (tp_plan) with experts")
    made = []
    for parent, last, experts in found:
        placement = spread_evenly(int(experts.num_experts), ranks)
        kind: Callable[..., nn.Module] = WholeExperts if _takes_picks(experts) else EveryRowsExperts
        if grouped and kind is EveryRowsExperts:
            raise ModelError(f"data_parallel_size: every expert of {name} computes every row; use --tp alone")
        setattr(parent, last, whole := kind(experts, placement, rank, meeting))
        if isinstance(whole, WholeExperts):
            made.append(whole)
    return made


def _mixtures(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for path in mixtures_of(model):
        parent, _, last = path.rpartition(".")
        yield model.get_submodule(parent), last, model.get_submodule(path)


def _takes_picks(experts: Any) -> bool:
    code = type(experts).forward
    code = getattr(code, "__wrapped__", code)
    return bool(code.__code__.co_argcount > 2)
