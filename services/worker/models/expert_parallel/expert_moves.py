"""How experts were moved between ranks. Imports no torch."""

from __future__ import annotations

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
