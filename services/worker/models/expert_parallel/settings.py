"""How a mixture's experts are spread over ranks, and what `--eplb-config` says. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from services.worker.distributed.all2all import All2AllBackend

_MAX_STEPS = 10_000_000


class EplbConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--eplb-config`: a JSON object with vLLM's keys."""

    window_size: Annotated[int, Meta(ge=1, le=_MAX_STEPS)] = 1000
    """Picks of so many steps decide where experts go."""
    step_interval: Annotated[int, Meta(ge=0, le=_MAX_STEPS)] = 3000
    """Steps from one such decision to the next; 0: experts stay where they are placed at the start."""
    num_redundant_experts: Annotated[int, Meta(ge=0)] = 0
    """See `ExpertSettings.redundant`."""
    log_balancedness: bool = False
    """Whether the log says how evenly picks fall on ranks."""


class ExpertSettings(Struct, frozen=True):
    """How a mixture's experts are spread over ranks, and whether it is counted how often each is chosen."""

    parallel: bool = False
    """Ranks have whole experts; else a share of every expert."""
    balanced: bool = False
    """They are placed by how often each was chosen: as files in `load_dir` say at the start, and as steps do later."""
    redundant: int = 0
    """Replicas beyond one of each expert, over all ranks of a stage."""
    load_dir: Path | None = None
    """Where it is written how often each was chosen; None: nowhere."""
    engine: str = "engine"
    """Whose file this rank writes."""
    window: int = 1000
    """Picks of so many steps decide where experts go while an engine serves."""
    interval: int = 0
    """Steps from one such decision to the next; 0: they stay where they are."""
    logs_balance: bool = False
    """Whether the log says how evenly picks fall on ranks."""
    all2all: All2AllBackend = "auto"
    """How rows go to experts and back in a data-parallel group."""

    @property
    def counts(self) -> bool:
        """Whether picks are counted."""
        return self.parallel or self.load_dir is not None

    @property
    def moves(self) -> bool:
        """Whether experts are moved while an engine serves."""
        return self.balanced and self.interval > 0


NO_EXPERT_PARALLEL = ExpertSettings()


def read_eplb_config(text: str | None) -> EplbConfig:
    """What `--eplb-config` says; the defaults where it is not given. Raises ValueError, naming key and bounds."""
    try:
        return EplbConfig() if text is None else msgspec.json.decode(text, type=EplbConfig)
    except msgspec.MsgspecError as error:
        known = ", ".join(EplbConfig.__struct_fields__)
        raise ValueError(f"eplb_config = {text}: {error}; known are {known}") from None
