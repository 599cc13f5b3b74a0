"""How one of several engines is chosen. Chance is a function of the request's id: cores draw no numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeVar, assert_never

from services.coordinator.core.routing import Policy
from shared.ids import Attempt, RequestId

T = TypeVar("T")


class Lot(NamedTuple):
    """What decides where costs do not."""

    turn: int
    chance: float
    """In [0, 1)."""


def chance(request: RequestId, attempt: Attempt, draw: str) -> float:
    """A number in [0, 1), equally distributed over requests, and another one for each attempt and `draw`."""
    digest = blake2b(f"{request}\0{attempt}\0{draw}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def pick(policy: Policy, costs: Sequence[float], temperature: float, lot: Lot) -> int:
    """The index of the one chosen. `costs` are in an order that is the same at each call, and not empty."""
    match policy:
        case "kv":
            return _drawn(costs, temperature, lot.chance) if temperature > 0 else _least(costs, lot.turn)
        case "least-loaded":
            return _least(costs, lot.turn)
        case "round-robin":
            return lot.turn % len(costs)
        case "random":
            return int(lot.chance * len(costs))
        case _:
            assert_never(policy)


def in_turn(equals: Sequence[T], turn: int) -> T:
    return equals[turn % len(equals)]


def _least(costs: Sequence[float], turn: int) -> int:
    least = min(costs)
    return in_turn([index for index, cost in enumerate(costs) if cost == least], turn)


def _drawn(costs: Sequence[float], temperature: float, chance_: float) -> int:
    """Softmax over costs scaled to [0, 1]: the cheapest is exp(1 / temperature) times as likely as the dearest."""
    least, most = min(costs), max(costs)
    scale = temperature * (most - least or 1.0)
    weights = [math.exp((least - cost) / scale) for cost in costs]
    left = chance_ * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(costs) - 1
