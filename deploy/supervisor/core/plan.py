"""Which processes a stack consists of. A seat is a place in it; whoever sits there may die and be replaced."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from msgspec import Struct

from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import Service

Scalable = Literal["gateway", "tokenizer", "detokenizer", "coordinator", "engines"]
"""What a user counts: a light service, or engines (a scheduler and its ranks each)."""
SCALABLE: tuple[Scalable, ...] = get_args(Scalable)
LARGEST_COUNT = 256


class Counts(Struct, frozen=True, kw_only=True):
    """How many of each there shall be."""

    gateway: int = 1
    tokenizer: int = 1
    detokenizer: int = 1
    coordinator: int = 1
    engines: int = 1
    ranks: int = 1
    """Worker processes per engine."""

    def of(self, what: Scalable) -> int:
        return int(getattr(self, what))


class Seat(NamedTuple):
    service: Service
    instance: InstanceId
    number: int
    """Counts the seats of a kind from 1; the newest has the highest."""
    engine: EngineId | None = None
    rank: int | None = None

    @property
    def kind(self) -> Scalable:
        match self.service:
            case "gateway" | "tokenizer" | "detokenizer" | "coordinator":
                return self.service
            case "scheduler" | "worker":
                return "engines"
            case "kvstore" | "supervisor":
                raise ValueError(f"a user does not count {self.service} processes")


def seats(what: Scalable, number: int, ranks: int) -> list[Seat]:
    """The seats of the `number`-th of a kind: one for a light service, 1 + `ranks` for an engine."""
    if what != "engines":
        return [Seat(what, InstanceId(f"{what}-{number}"), number)]
    engine = EngineId(f"engine-{number}")
    workers = [Seat("worker", InstanceId(f"{engine}-rank{rank}"), number, engine, rank) for rank in range(ranks)]
    return [Seat("scheduler", InstanceId(engine), number, engine), *workers]


def all_seats(counts: Counts) -> list[Seat]:
    """Slowest starters first."""
    order: tuple[Scalable, ...] = ("engines", "gateway", "tokenizer", "coordinator", "detokenizer")
    return [
        seat for what in order for number in range(1, counts.of(what) + 1) for seat in seats(what, number, counts.ranks)
    ]


STOP_ORDER: tuple[frozenset[Service], ...] = (
    frozenset({"gateway"}),
    frozenset({"tokenizer", "coordinator", "scheduler", "detokenizer"}),
    frozenset({"worker"}),
)
"""Gateways first: they finish their requests, for which they need all the others."""


def stage(service: Service) -> int:
    """When in STOP_ORDER the service ends."""
    return next(i for i, services in enumerate(STOP_ORDER) if service in services)
