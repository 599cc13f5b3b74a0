"""How an engine is configured: its role, its node and its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shared.ids import NodeId
from shared.messages.kvstore import LeaseOwner
from shared.messages.lifecycle import Role

QueuePolicy = Literal["fcfs", "priority"]
SpeculationPolicy = Literal["dynamic", "fixed", "off"]
"""dynamic: as many drafts as pay (see `speculation.py`). fixed: as many as the ranks can. off: none."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine: the size of a step, running and waiting sequences, and how far plans run ahead. Raises
    ValueError if a step could not hold one token of every running sequence."""

    max_batch_tokens: int = 2048
    """Most tokens that one step computes, all sequences together."""
    max_running: int = 256
    max_waiting: int = 1024
    """Most waiting requests, beyond those for which the running batch has a place; further ones are rejected as
    overloaded. Preempted requests always find room."""
    policy: QueuePolicy = "fcfs"
    max_new_bytes: int = 4 * 2**20
    """Most bytes of token ids that new sequences add to one plan, because a plan must fit into a message. A single
    sequence is always allowed."""
    itl_target: float | None = None
    """Seconds from one token of a sequence to the next that steps are to keep: prompts get the rest of a step
    (`planning/prefill_budget.py`); None: `max_batch_tokens` alone bounds them."""
    prefill_target: float | None = None
    """Seconds that a step with prompt tokens is to take at most, as far as the device computes them as fast in smaller
    steps; None: `max_batch_tokens` alone bounds it."""
    long_prefill_token_threshold: int = 0
    """A prompt with more tokens left to compute lets shorter ones go first, and has this many tokens of a step for
    itself (at most half of them); 0: prompts are computed in their order."""
    run_ahead: int = 1
    """Plans that are sent in addition to those being computed."""
    stages: int = 1
    """Stages of the workers' pipeline; as many plans are computed at the same time."""
    max_loras: int = 0
    """How many different adapters the running sequences may have."""
    plan_late: bool = True
    """Delay a plan until the step before is half over (nearly over, if it is short), so that it includes the requests
    that arrive meanwhile."""
    step_timeout: float = 60.0
    """Seconds that the oldest step in flight may take before the engine counts as stuck. A slow device gets more
    (`StepsInFlight.overdue`)."""
    store_deadline: float = 0.015
    """Seconds that a lookup of a new sequence in the KV store may take."""
    remote_deadline: float = 0.5
    """Seconds that a lookup may take if another node probably holds the blocks, which are then copied before the
    reply. Less where computing them takes less (`transfer/recompute_costs.py`)."""

    canary_interval: float = 0.0
    """Seconds between two canaries (`health/canary.py`), at least; 0: there are none."""
    ejection_time: float = 10.0
    """Seconds for which an engine that becomes a suspect gets no requests, at least; doubled each time."""
    speculation: SpeculationPolicy = "dynamic"
    compile_timeout: float = 60.0
    """Seconds that the workers may take to compile a grammar, waiting for others included."""
    max_grammars: int = 64
    """Compiled grammars that the workers hold, each in a process of its own; where all are in use, others wait."""

    def __post_init__(self) -> None:
        if min(self.max_running, self.max_waiting) < 1 or self.run_ahead not in (0, 1, 2):
            raise ValueError("max_running and max_waiting must be at least 1, run_ahead 0, 1 or 2")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running ({self.max_running}): "
                "each running sequence computes one token a step"
            )

    @property
    def has_prefill_targets(self) -> bool:
        """Whether chunks of prompts follow from the time that steps take."""
        return self.itl_target is not None or self.prefill_target is not None

    @property
    def plans_ahead(self) -> int:
        """Plans that are sent in addition to the one whose result comes next."""
        return self.run_ahead + self.stages - 1

    def bounded(
        self, max_running: int | None, max_batch_tokens: int | None, stages: int = 1, max_loras: int = 0
    ) -> EngineLimits:
        """These limits, reduced to what the workers can hold."""
        running = min(self.max_running, max_running or self.max_running)
        tokens = min(self.max_batch_tokens, max_batch_tokens or self.max_batch_tokens)
        return replace(
            self, max_running=min(running, tokens), max_batch_tokens=tokens, stages=stages, max_loras=max_loras
        )


@dataclass(frozen=True, slots=True)
class ConnectorUse:
    """What an engine does by its KV connector."""

    loads: bool = True
    saves: bool = True
    keeps: bool = False
    """Whether the connector may keep blocks of requests that have ended."""


@dataclass(frozen=True, slots=True)
class EngineRole:
    """An engine's role and its node. Raises ValueError if a node is named without the owner of its leases, or beside a
    KV connector."""

    kind: Role = "mixed"
    node: NodeId | None = None
    """The node whose KV store is used; None: no store."""
    owner: LeaseOwner | None = None
    """The owner of the engine's leases in the node's KV store."""
    connector: ConnectorUse | None = None
    """None: there is no KV connector."""

    def __post_init__(self) -> None:
        if self.node is not None and self.owner is None:
            raise ValueError("a KV store is used in an owner's name")
        if self.connector is not None and (self.node is not None or self.kind != "mixed"):
            raise ValueError(
                "a KV connector takes the place of the KV store, and engines that use it hand nothing over"
            )
