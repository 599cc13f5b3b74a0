"""How evenly picks of experts fall on ranks, and how experts were moved between these. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ExpertMoves(NamedTuple):
    """How experts were moved since the start."""

    rearrangements: int = 0
    """Those that are completed, even where all layers stayed as they were."""
    failures: int = 0
    """Those that ended before all layers were as they were to be."""
    layers: int = 0
    """Layers that were changed."""
    experts: int = 0
    """Experts that ranks were given, over all ranks."""
    seconds: float = 0.0
    """Of the last one."""
    under_way: bool = False


def balance_of(loads: Sequence[float]) -> float:
    """Mean over maximum: 1 where all ranks have as much to do; 1, too, where none has anything."""
    most = max(loads)
    return sum(loads) / len(loads) / most if most else 1.0
