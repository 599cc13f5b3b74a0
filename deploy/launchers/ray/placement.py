"""What an engine asks of a Ray cluster: which bundles of CPUs and GPUs, and how close together. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from deploy.supervisor.core.plan import Pool, ProcessSpec
from deploy.supervisor.spec import RaySpec, StackSpec

SERVICE_CPUS = 0.5
"""Of each process that is no rank: an event loop that mostly waits."""
LOCAL_SERVICES = frozenset({"gateway"})
"""Services that stay beside the supervisor: clients know their address, and the supervisor holds their port."""


class Bundle(NamedTuple):
    """Resources that are reserved on one node."""

    cpus: float
    gpus: int = 0

    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def __str__(self) -> str:
        gpus = f" and {self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else ""
        return f"{self.cpus:g} CPUs{gpus}"


class EnginePlacement(NamedTuple):
    """Where the processes of one engine go: a bundle for each pipeline stage."""

    bundles: tuple[Bundle, ...]
    strategy: Literal["STRICT_PACK", "PACK"]
    """STRICT_PACK: all on one node. PACK: on as few nodes as possible."""

    @property
    def one_node(self) -> bool:
        """Whether its processes share a machine's memory for certain."""
        return self.strategy == "STRICT_PACK"


def engine_placement(spec: StackSpec, ray: RaySpec, pool: Pool, *, gpus_per_rank: int) -> EnginePlacement:
    """The ranks of a stage exchange tensors within every layer, so they are one bundle, which is never split over
    nodes. Stages exchange rows once per step: they may be on several nodes, unless all ranks map one arena."""
    stages, ranks = spec.counts.stages_of(pool), spec.counts.ranks_of(pool)
    share = ranks // stages
    beside = SERVICE_CPUS * (2 if spec.counts.engine_stores else 1)
    bundles = tuple(
        Bundle(share * ray.cpus_per_rank + (0.0 if stage else beside), share * gpus_per_rank) for stage in range(stages)
    )
    return EnginePlacement(bundles, "STRICT_PACK" if stages == 1 or spec.counts.engine_stores else "PACK")


def bundle_of(spec: StackSpec, process: ProcessSpec) -> int:
    """The index of the bundle that a process of an engine runs in: scheduler and store are beside the first stage."""
    if process.rank is None or process.pool is None:
        return 0
    return process.rank // _share(spec, process.pool)


def device_of(spec: StackSpec, process: ProcessSpec) -> int | None:
    """The index of a rank's device among those of its bundle; None for what is no rank."""
    if process.rank is None or process.pool is None:
        return None
    return process.rank % _share(spec, process.pool)


def _share(spec: StackSpec, pool: Pool) -> int:
    return spec.counts.ranks_of(pool) // spec.counts.stages_of(pool)
