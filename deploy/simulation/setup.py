"""What is simulated: the services' own settings, and the model whose steps are timed. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace as with_fields

from deploy.simulation.hops import HopDelays
from deploy.simulation.kit import EngineKit, EnginePools, SlowEngines
from services.coordinator.config import CoordinatorConfig, Policy
from services.coordinator.core.fleet_heartbeat import interval_for, kv_interval_for
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from services.worker.executor.simulated import simulated_device
from shared.config import load_config
from shared.messages.lifecycle import HEARTBEAT_SECONDS


class SimulationSetup(NamedTuple):
    """Makes the engines of a simulation, in any process."""

    worker: WorkerConfig
    scheduler: SchedulerConfig
    routing: CoordinatorConfig
    hops: HopDelays
    pools: EnginePools = EnginePools()
    slow: SlowEngines = SlowEngines()
    store_memory: int = 0

    def make_kit(self) -> EngineKit:
        """Without canaries: an idle engine's own requests, which no client waits for. Raises BackendError where the
        model cannot be simulated."""
        limits = self.scheduler.limits().bounded(self.worker.max_num_seqs, self.worker.max_batch_tokens)
        device = simulated_device(self.worker, Path(self.worker.model))
        limits = dataclasses.replace(limits, canary_interval=0.0)
        pulls = self.scheduler.prefill_queue
        return EngineKit(
            limits,
            device,
            self.hops,
            pools=self.pools,
            slow=self.slow,
            pulls=pulls,
            store_memory=self.store_memory,
            report_seconds=self._report_seconds,
            kv_event_seconds=self._kv_event_seconds,
        )

    @property
    def _report_seconds(self) -> float:
        """As a fleet of this size at its beginning is told by its coordinators."""
        return max(HEARTBEAT_SECONDS, interval_for(self.pools.total, self.routing.lifecycle_budget) / 2)

    @property
    def _kv_event_seconds(self) -> float:
        """As a fleet of this size at its beginning is told by its coordinators."""
        return kv_interval_for(self.pools.total + bool(self.store_memory), self.routing.kv_event_budget)

    @property
    def description(self) -> dict[str, object]:
        """For the report."""
        device = simulated_device(self.worker, Path(self.worker.model))
        return {
            "model_id": device.card.name,
            "device": device.device,
            "tp": self.worker.world_size,
            "blocks_per_engine": device.num_blocks,
            "pools": self.pools._asdict(),
            "kvstore_memory": self.store_memory,
            "slow_engines": self.slow._asdict(),
            "router_policy": self.routing.router_policy,
            "router_step_times": self.routing.router_step_times,
            "hops_ms": {name: getattr(self.hops, name) * 1000 for name in self.hops.__struct_fields__},
        }

    def routed(self, policy: Policy) -> SimulationSetup:
        """The same with another router policy."""
        return self._replace(routing=with_fields(self.routing, router_policy=policy))


def simulation_setup(
    folder: Path,
    tp: int,
    settings: Mapping[str, Mapping[str, str]],
    hops: HopDelays,
    config: Path | None = None,
) -> SimulationSetup:
    """`settings`: service → key → value, of worker, scheduler and coordinator; `config`: a TOML file with more. Raises
    ConfigError for one that a service does not have or take."""
    files = [] if config is None else [f"--config={config}"]

    def flags(service: str) -> list[str]:
        given = settings.get(service, {}).items()
        return [*files, *(_flag(key.replace("_", "-"), value) for key, value in given)]

    own = ["--engine=simulated", f"--model={folder}", "--device=sim", f"--world-size={tp}"]
    return SimulationSetup(
        load_config("worker", WorkerConfig, [*flags("worker"), *own], {}),
        load_config("scheduler", SchedulerConfig, flags("scheduler"), {}),
        load_config("coordinator", CoordinatorConfig, flags("coordinator"), {}),
        hops,
    )


def _flag(name: str, value: str) -> str:
    """Switches are named, or named with `no-`; everything else has its value."""
    return {"true": f"--{name}", "false": f"--no-{name}"}.get(value, f"--{name}={value}")
