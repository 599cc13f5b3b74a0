"""The settings of a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from kvstore.connectors.installed import (
    ConnectorExtraConfig,
    ConnectorName,
    ConnectorRole,
    keeps_blocks,
    open_connector,
)
from services.scheduler.core.limits import ConnectorUse, EngineLimits, SpeculationPolicy
from shared.config import ServiceConfig
from shared.ids import EngineId, NodeId, checked_instance
from shared.messages.lifecycle import Role
from shared.settings import ByteSize, UpOption

if TYPE_CHECKING:  # `baton up` reads the settings and plans nothing: what they are for is imported where it is made
    from services.scheduler.connector_host import SchedulerConnector
    from services.scheduler.journal import JournalSettings


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    """Every setting of a scheduler, with its unit and bounds."""

    engine: Annotated[
        str | None, Meta(description="Id of the engine; it is the scheduler's instance name, and defaults to it.")
    ] = None
    world_size: Annotated[
        int | None, Meta(ge=1, description="Ranks of the engine; default: the number that the workers report.")
    ] = None
    max_batch_tokens: Annotated[int, Meta(ge=1, description="Maximum tokens in one step."), UpOption("Capacity")] = 2048
    max_running: Annotated[
        int, Meta(ge=1, description="Maximum sequences in one step."), UpOption("Capacity", "max_num_seqs")
    ] = 256
    max_waiting: Annotated[
        int, Meta(ge=1, description="Requests that may wait while the running batch is full; the next one is refused.")
    ] = 1024
    itl_target_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Milliseconds between two tokens of a sequence that steps are to keep: prompts are computed in "
            "chunks of what is left of a step; none: max_batch_tokens alone bounds them."
        ),
        UpOption("Capacity"),
    ] = None
    prefill_target_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="Milliseconds that a step with prompts is to take at most: they are computed in chunks, as far "
            "as that costs the device no speed; 0: max_batch_tokens alone bounds them.",
        ),
        UpOption("Capacity"),
    ] = 250.0
    long_prefill_token_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description="A prompt with more tokens to compute lets shorter ones go first, but for this many a step; "
            "0: all in their order.",
        ),
        UpOption("Capacity"),
    ] = 0
    standby: Annotated[
        bool, Meta(description="Begin as a standby: load, and take no requests before an `undrain`.")
    ] = False
    policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="Order of waiting requests: by arrival, or by priority (lower first)."),
    ] = "fcfs"
    run_ahead: Annotated[
        int, Meta(ge=0, le=2, description="Maximum plans that are sent ahead of the one being computed.")
    ] = 2
    plan_late: Annotated[
        bool, Meta(description="Delay plans until the workers need them, so that they include the newest requests.")
    ] = True
    speculation: Annotated[
        SpeculationPolicy,
        Meta(description="Number of drafts. dynamic: as many as pay; fixed: as many as possible; off: none."),
    ] = "dynamic"
    compile_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that a grammar may wait to be compiled; then its request is refused.")
    ] = 60.0
    max_grammars: Annotated[
        int,
        Meta(ge=1, description="Compiled grammars that are kept, a process each; where all are in use, others wait."),
    ] = 64
    step_timeout_s: Annotated[
        float, Meta(gt=0, description="Maximum seconds of a step before this process ends; slow devices get more.")
    ] = 60.0
    canary_interval_s: Annotated[
        float,
        Meta(
            ge=0, description="Seconds between two canaries, completions that an idle engine checks itself by; 0: none."
        ),
    ] = 5.0
    """More where they would take more than 1% of the engine's time. A busy engine has one beside its requests, after
    four more intervals."""
    ejection_s: Annotated[
        float,
        Meta(gt=0, description="Seconds for which a failing engine gets no requests, at least; doubled each time."),
    ] = 10.0

    role: Annotated[
        Role,
        Meta(description="mixed: prefill and decode; prefill: prompts, then hand over; decode: what is handed over."),
    ] = "mixed"
    prefill_queue: Annotated[
        bool,
        Meta(description="As a prefill engine, pull prompts from the coordinators' queue; they have the same setting."),
        UpOption("Routing"),
    ] = False
    node: Annotated[
        str | None,
        Meta(
            description="Node whose KV store is used; the name that the store and the workers have in their settings."
        ),
    ] = None
    store_deadline: Annotated[float, Meta(gt=0, description="Seconds that a lookup in the KV store may take.")] = 0.015
    remote_deadline: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a lookup may take if blocks must be copied from another node's store; less where "
            "computing them is known to take less.",
        ),
    ] = 0.5

    rows_memory: Annotated[
        ByteSize,
        Meta(
            description="Bytes of images' rows that requests of the engine may have; others wait for room, for two "
            "minutes. Those of encoders of this host are in the encoders' memory."
        ),
    ] = 2**30
    rows_dir: Annotated[
        Path | None,
        Meta(
            description="Folder in shared memory where the host's encoders and engines have images' rows, the same for "
            "all of them; none: rows come by the bus."
        ),
    ] = None

    kv_connector: ConnectorName = None
    kv_connector_extra_config: ConnectorExtraConfig = "{}"
    kv_role: ConnectorRole = "kv_both"

    journal: Annotated[
        Path | None, Meta(description="File, or folder of files, that records every decision for `baton replay`.")
    ] = None
    journal_contents: Annotated[bool, Meta(description="Record whole outputs in the journal instead of digests.")] = (
        False
    )
    journal_limit: Annotated[ByteSize, Meta(description="Size at which the journal ends.")] = 2**30

    def __post_init__(self) -> None:
        if self.engine not in (None, "", self.instance):
            raise ValueError(f"engine = {self.engine!r}: must be the instance name, which is {self.instance!r}")
        self.limits()
        if self.node_id() is not None and self.kv_connector is not None:
            raise ValueError(f"kv_connector = {self.kv_connector}: takes the place of the KV store, which node names")
        if self.kv_connector is not None and self.role != "mixed":
            raise ValueError(
                f"kv_connector = {self.kv_connector}: role = {self.role} hands requests over by the KV store"
            )

    def node_id(self) -> NodeId | None:
        """Raises ValueError for what could not be part of a subject."""
        return NodeId(checked_instance(self.node)) if self.node else None

    def connector(self) -> SchedulerConnector | None:
        """The scheduler's half of the KV connector; None where there is none. Raises ConnectorRefused."""
        if self.kv_connector is None:
            return None
        from services.scheduler.connector_host import SchedulerConnector

        connector = open_connector(
            self.kv_connector,
            self.kv_connector_extra_config,
            self.kv_role,
            engine=self.instance_id(),
            rank=None,
            block_size=self.block_size,
        )
        loads, saves = self.kv_role != "kv_producer", self.kv_role != "kv_consumer"
        return SchedulerConnector(connector, ConnectorUse(loads, saves, keeps=saves and keeps_blocks(connector)))

    def journal_settings(self) -> JournalSettings | None:
        """Where and how decisions are recorded; None where they are not."""
        if self.journal is None:
            return None
        from services.scheduler.journal import JournalSettings

        return JournalSettings(self.journal, self.journal_contents, self.journal_limit)

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
            itl_target=None if self.itl_target_ms is None else self.itl_target_ms / 1000,
            prefill_target=self.prefill_target_ms / 1000 or None,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            run_ahead=self.run_ahead,
            plan_late=self.plan_late,
            speculation=self.speculation,
            compile_timeout=self.compile_timeout_s,
            max_grammars=self.max_grammars,
            step_timeout=self.step_timeout_s,
            canary_interval=self.canary_interval_s,
            ejection_time=self.ejection_s,
            store_deadline=self.store_deadline,
            remote_deadline=self.remote_deadline,
        )
