"""The settings of a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from services.scheduler.core.limits import EngineLimits, SpeculationPolicy
from services.scheduler.journal import JournalSettings
from shared.config import ServiceConfig
from shared.ids import EngineId, NodeId, checked_instance
from shared.messages.lifecycle import Role
from shared.settings import ByteSize, UpOption


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    """Every setting of a scheduler, with its unit and bounds."""

    engine: Annotated[
        str | None, Meta(description="Id of the engine; it is the scheduler's instance name, and defaults to it.")
    ] = None
    world_size: Annotated[
        int | None, Meta(ge=1, description="Ranks that must be there; by default what the workers say themselves.")
    ] = None
    max_batch_tokens: Annotated[
        int, Meta(ge=1, description="Tokens that one step computes at the most."), UpOption("Capacity")
    ] = 2048
    max_running: Annotated[
        int, Meta(ge=1, description="Sequences that one step holds at the most."), UpOption("Capacity", "max_num_seqs")
    ] = 256
    max_waiting: Annotated[int, Meta(ge=1, description="Requests that wait here; the next one is refused.")] = 1024
    policy: Annotated[
        Literal["fcfs", "priority"], Meta(description="Who goes first: by arrival, or by priority (lower first).")
    ] = "fcfs"
    run_ahead: Annotated[
        int, Meta(ge=0, le=2, description="Plans sent beyond the one that is being computed, at the most.")
    ] = 2
    plan_late: Annotated[
        bool, Meta(description="Make plans ahead no sooner than the workers need them, so that newcomers are in them.")
    ] = True
    speculation: Annotated[
        SpeculationPolicy,
        Meta(description="Drafts: as many as pay, as many as the workers can, or none."),
    ] = "dynamic"
    compile_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that a grammar may take to compile; then its request is refused.")
    ] = 30.0
    step_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that a step may take before this process ends as wedged.")
    ] = 60.0

    role: Annotated[
        Role, Meta(description="What the engine is for: everything, prompts (the rest is handed over), or that rest.")
    ] = "mixed"
    node: Annotated[
        str | None, Meta(description="Node whose KV store is used; as the store and the workers on it name it.")
    ] = None
    store_deadline: Annotated[
        float, Meta(gt=0, description="Seconds that the KV store may take to say what it has of a request.")
    ] = 0.015
    remote_deadline: Annotated[
        float, Meta(gt=0, description="The same, where another node's store has it and must be copied from.")
    ] = 0.5

    journal: Annotated[
        Path | None, Meta(description="File for all that is decided and why, for `baton replay`; or a folder for such.")
    ] = None
    journal_contents: Annotated[bool, Meta(description="Keep answers whole in it, not only their digests.")] = False
    journal_limit: Annotated[ByteSize, Meta(description="Size at which it ends.")] = 2**30

    def __post_init__(self) -> None:
        if self.engine not in (None, "", self.instance):
            raise ValueError(f"engine = {self.engine!r}: must be the instance name, which is {self.instance!r}")
        self.limits()
        self.node_id()

    def node_id(self) -> NodeId | None:
        """Raises ValueError for what could not be part of a subject."""
        return NodeId(checked_instance(self.node)) if self.node else None

    def journal_settings(self) -> JournalSettings | None:
        """Where and how decisions are recorded; None where they are not."""
        return JournalSettings(self.journal, self.journal_contents, self.journal_limit) if self.journal else None

    def engine_id(self) -> EngineId:
        """The engine's id, which is the scheduler's instance name."""
        return EngineId(self.instance_id())

    def limits(self) -> EngineLimits:
        """Raises ValueError where the settings contradict each other."""
        return EngineLimits(
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            policy=self.policy,
            run_ahead=self.run_ahead,
            plan_late=self.plan_late,
            speculation=self.speculation,
            compile_timeout=self.compile_timeout_s,
            step_timeout=self.step_timeout_s,
            store_deadline=self.store_deadline,
            remote_deadline=self.remote_deadline,
        )
