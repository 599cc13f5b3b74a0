"""Which rank of which engine a worker is. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.ids import EngineId, ModelName


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which rank of which engine this process is, and what its scheduler may ask of it."""

    engine: EngineId
    rank: int = 0
    world_size: int = 1
    stages: int = 1
    """Stages of the ranks' pipeline."""
    max_num_seqs: int | None = None
    max_batch_tokens: int | None = None
    min_step_timeout: float | None = None
    """Seconds: no deadline of a step is shorter. None: as the device needs it."""
    first_step_timeout: float = 600.0
    """Seconds that the first step of all may take."""
    kvstore_dir: Path | None = None
    """None: what it asks to be copied to or from a KV store fails."""
    data_parallel_size: int = 1
    """Engines of its data-parallel group."""
    aliases: tuple[ModelName, ...] = ()
    """Further names of its model for clients."""

    @property
    def publishes(self) -> bool:
        """One rank speaks for all: the first of the last stage, which draws the tokens."""
        return self.rank == self.world_size - self.world_size // self.stages
