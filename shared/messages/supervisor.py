"""Messages to supervisors: how many processes a pool shall have, which ranks run on which host, and which hosts there
are. And what the planner decides of pools, with every number that it follows from."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.ids import EngineId, Incarnation, InstanceId, ModelName, NodeId
from shared.messages.lifecycle import Role


class Scale(Struct, frozen=True, array_like=True, tag=True):
    """Answered by `ScaleResult` once the processes are started or draining."""

    service: str
    """gateway, tokenizer, detokenizer, coordinator, or a pool: engines, prefill, decode."""
    count: int
    model: ModelName | None = None
    """Whose pool it is, in a stack that serves several models; None: there is one, or what all of them share."""
    data_parallel_size: int | None = None
    """Engines of each data-parallel group from now on; None: as many as before."""
    one_group: bool = False
    """Where engines share experts: all of them are to be one group."""


class ScaleResult(Struct, frozen=True, array_like=True, tag=True):
    """What `Scale` led to: instances that were started, those that drain and stop, and those that do so once all that
    were started are ready."""

    started: tuple[str, ...]
    stopping: tuple[str, ...]
    superseded: tuple[str, ...] = ()


class ScaleRefusal(Struct, frozen=True, array_like=True, tag=True):
    """Why the pool was left as it is, for the operator to read."""

    message: str


ScaleReply = ScaleResult | ScaleRefusal


class StrikeProcess(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → the supervisor of a host, for an operator who wants to see what happens then: kill one of your
    processes, or let it stand still. Answered by a `StrikeReply`."""

    instance: InstanceId
    fault: Literal["kill", "pause"]
    seconds: float = 5.0
    """How long it stands still."""


class ProcessStruck(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `StrikeProcess`: it is done."""

    pid: int


class StrikeRefusal(Struct, frozen=True, array_like=True, tag=True):
    """Why nothing was done, for the operator to read."""

    message: str


StrikeReply = ProcessStruck | StrikeRefusal
SupervisorOrder = Scale | StrikeProcess
"""What coordinators ask of a supervisor."""


class EngineRanks(Struct, frozen=True, array_like=True):
    """One start of the ranks of an engine that spans several hosts."""

    engine: EngineId
    rendezvous: str
    """Host and port where the ranks connect to each other; every start has a new one."""


class RankAssignment(Struct, frozen=True, array_like=True):
    """The starts that the first host runs. The other hosts run their ranks of the same starts and stop ranks of earlier
    ones."""

    engines: tuple[EngineRanks, ...]
    ending: bool = False
    """The first host is stopping, and the others must stop, too."""


class RankStatus(Struct, frozen=True, array_like=True):
    """The ranks that one of the other hosts runs."""

    host: int
    """The number of the host; the first host is 0."""
    running: tuple[EngineRanks, ...]
    lost: tuple[EngineRanks, ...]
    """Starts of which a rank has ended on this host. They cannot continue."""


class HostReport(Struct, frozen=True, array_like=True, kw_only=True):
    """One host of a stack that has several, and the processes that its supervisor looks after."""

    node: NodeId
    address: str
    """Where the other hosts reach it."""
    incarnation: Incarnation
    """Of its supervisor."""
    instances: tuple[InstanceId, ...] = ()
    ending: bool = False
    """Its supervisor ends, and all of its processes have ended."""
    model_port: int = 0
    """Where at its address other hosts get the model; 0: nowhere."""


ScalingReason = Literal["as wanted", "nothing to change", "stabilizing", "cool-down"]

ProfileSource = Literal["measured", "live", "none"]
"""measured: tables of a measurement; live: what workers report of their steps; none: neither says anything of the
load."""


class PoolDecision(Struct, frozen=True, array_like=True, kw_only=True):
    """What is to become of one pool."""

    role: Role
    present: int
    """Engines that take requests or start."""
    wanted: int
    """By the forecast, within the bounds and the budget."""
    target: int
    """What is to be done now."""
    reason: ScalingReason


class PlannerDecision(Struct, frozen=True, array_like=True, kw_only=True):
    """A decision. Rates per second, times in seconds, lengths in tokens."""

    at: float
    """On the planner's clock."""
    observed_rate: float | None
    """None, here and below: there was nothing to observe."""
    predicted_rate: float | None
    """The highest until an engine that starts now could help, with what is needed to work off the backlog."""
    backlog: int
    prompt_tokens: float | None
    """Computed, on average per request."""
    cached_tokens: float | None
    output_tokens: float | None
    observed_ttft: float | None
    observed_itl: float | None
    ttft_correction: float
    itl_correction: float
    forecast_ttft: float | None
    """Of the fleet that is wanted, at the percentile of the target; None: it is overloaded."""
    forecast_itl: float | None
    suffices: bool
    """Whether the wanted fleet meets the targets; False: the bounds or the budget are too tight."""
    pools: tuple[PoolDecision, ...]
    acts: bool = False
    """Whether the planner does what it decides; False: it only says it."""
    profile: ProfileSource = "live"
    """What it was computed with."""
    profile_note: str = ""
    """Why that is not the measured one, where there is one; for people."""

    @property
    def changes(self) -> tuple[PoolDecision, ...]:
        """The pools in which engines are started or drained."""
        return tuple(pool for pool in self.pools if pool.target != pool.present)
