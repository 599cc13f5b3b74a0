"""How a mixture's experts are spread over ranks. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct


class ExpertSettings(Struct, frozen=True):
    """How a mixture's experts are spread over ranks, and whether it is counted how often each is chosen."""

    parallel: bool = False
    """Ranks have whole experts; else a share of every expert."""
    balanced: bool = False
    """They are placed by how often each was chosen, as files in `load_dir` say."""
    redundant: int = 0
    """Replicas beyond one of each expert, over all ranks of a stage."""
    load_dir: Path | None = None
    """Where it is written how often each was chosen; None: nowhere."""
    engine: str = "engine"
    """Whose file this rank writes."""

    @property
    def counts(self) -> bool:
        """Whether picks are counted."""
        return self.parallel or self.load_dir is not None


NO_EXPERT_PARALLEL = ExpertSettings()
