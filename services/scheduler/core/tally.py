"""What has happened so far, in numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts since the start; whoever publishes them takes differences."""

    blocks_saved: int = 0
    """Blocks that the store has shown to others."""
    blocks_unsaved: int = 0
    """Blocks that were not offered to the store, or not taken, or lost on the way."""
    blocks_loaded: int = 0
    finds: int = 0
    """Times that the store was asked what it has."""
    misses: int = 0
    """Those of them that found nothing, or were not answered in time."""
    loads_failed: int = 0
    handed_over: int = 0
    kept: int = 0
    """Requests that were to be handed over and are decoded here, because their blocks could not be saved."""
