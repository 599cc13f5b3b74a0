"""`python -m services.offline.colocated scheduler FLAGS… worker FLAGS… …`: several services' actors in one process.

The same actors, with the same settings and a connection to the bus each: others find, drain and count them as ever.
Only what they send each other at every step and request passes no server (`shared/bus/local_delivery.py`). They end
together: what receives work first, the rank last. One that ends by itself, or by a bug, ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.connectors.installed import ConnectorRefused
from services.coordinator.__main__ import build as build_coordinator
from services.coordinator.config import CoordinatorConfig
from services.detokenizer.__main__ import build as build_detokenizer
from services.detokenizer.__main__ import load as load_vocabulary
from services.detokenizer.config import DetokenizerConfig
from services.scheduler.__main__ import build as build_scheduler
from services.scheduler.config import SchedulerConfig
from services.worker.__main__ import CANNOT_SERVE, release_start_memory, run_rank
from services.worker.__main__ import build as build_worker
from services.worker.config import WorkerConfig
from services.worker.rank_sleep import RankSleep
from shared import topics
from shared.actor import Actor, ActorRuntime, NameTaken, keep_from_collecting, run_loop
from shared.actor.service_process import NAME_TAKEN_STATUS, end_as_orphan, set_up_process
from shared.bus import Bus, BusError
from shared.bus.local_delivery import LocalDeliveryBus, LocalReceivers
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import connect
from shared.config import ConfigError, load_config, process_environment
from shared.error_groups import innermost
from shared.ids import DetokenizerId, EngineId
from shared.models.model_files import ModelNotFound, resolve_model
from shared.models.tokenizer_files import TokenizerUnusable
from shared.telemetry.metrics import ProcessMetrics, metrics_server
from shared.telemetry.startup import STARTUP
from shared.telemetry.tracing import TRACING
from shared.topics import Topic

log = logging.getLogger(__name__)

SERVICES = ("scheduler", "worker", "coordinator", "detokenizer")
"""What runs in one process. Neither what clients are connected to, which outlives an engine, nor what reads what they
send: tokenizers and compilers of grammars."""
_STOP_ORDER = (("coordinator", "scheduler"), ("detokenizer",), ("worker",))


class ColocatedConfigs(NamedTuple):
    """The settings of each service of the process."""

    scheduler: SchedulerConfig
    worker: WorkerConfig
    coordinator: CoordinatorConfig
    detokenizer: DetokenizerConfig

    def local_topics(self) -> tuple[Topic[Any], ...]:
        """What is sent to actors of this process by others of it, and nobody else hears."""
        engine, detokenizer = EngineId(self.scheduler.instance), DetokenizerId(self.detokenizer.instance)
        return (
            topics.engine_requests(engine),
            topics.engine_steps(engine),
            topics.engine_results(engine),
            topics.detokenizer_tokens(detokenizer),
        )


def read_configs(argv: Sequence[str], environment: Mapping[str, str]) -> ColocatedConfigs:
    """The settings that each service's name is followed by. Raises ConfigError."""
    flags: dict[str, list[str]] = {}
    for word in argv:
        if word in SERVICES and word not in flags:
            flags[word] = []
        elif flags:
            flags[next(reversed(flags))].append(word)
        else:
            raise ConfigError(f"{word}: a service is expected first, one of {', '.join(SERVICES)}")
    if missing := [service for service in SERVICES if service not in flags]:
        raise ConfigError(f"{', '.join(missing)}: each of {', '.join(SERVICES)} is to run in this process")
    configs = ColocatedConfigs(
        load_config("scheduler", SchedulerConfig, flags["scheduler"], environment),
        load_config("worker", WorkerConfig, flags["worker"], environment),
        load_config("coordinator", CoordinatorConfig, flags["coordinator"], environment),
        load_config("detokenizer", DetokenizerConfig, flags["detokenizer"], environment),
    )
    if (ranks := configs.worker.world_size) > 1:
        raise ConfigError(f"world_size = {ranks}: 1 is allowed, as the engine's rank is in this process")
    if configs.worker.engine != configs.scheduler.instance:
        raise ConfigError(f"engine = {configs.worker.engine!r}: {configs.scheduler.instance!r} is in this process")
    return configs


class ColocatedActors:
    """Owns the runtimes of all actors of the process, until all have ended."""

    def __init__(self, runtimes: Mapping[str, ActorRuntime]) -> None:
        """`runtimes`: by service."""
        self._runtimes = runtimes
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Ends them in order. Safe to call again."""
        self._stop.set()

    async def run(self) -> None:
        """Serves until `stop`, or until one of them ends. Raises what ended one."""
        async with asyncio.TaskGroup() as tasks:
            running = {service: tasks.create_task(runtime.run()) for service, runtime in self._runtimes.items()}
            stopping = tasks.create_task(self._stop.wait())
            await asyncio.wait([*running.values(), stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            for stage in _STOP_ORDER:
                for service in stage:
                    self._runtimes[service].stop()
                await asyncio.wait([running[service] for service in stage])


async def _build(configs: ColocatedConfigs, buses: Mapping[str, Bus], sleep: RankSleep) -> dict[str, Actor]:
    """Raises ModelNotFound, TokenizerUnusable, BackendError, ConnectorRefused."""
    vocabulary = load_vocabulary(resolve_model(configs.detokenizer.model, weights=False))
    return {
        "scheduler": build_scheduler(configs.scheduler, buses["scheduler"]),
        "worker": await build_worker(configs.worker, buses["worker"], sleep, release_start_memory),
        "coordinator": build_coordinator(configs.coordinator, buses["coordinator"]),
        "detokenizer": build_detokenizer(configs.detokenizer, vocabulary, buses["detokenizer"]),
    }


async def _serve(configs: ColocatedConfigs, sleep: RankSleep) -> None:
    first = configs.scheduler
    connections: list[NatsBus] = []
    receivers, buses = LocalReceivers(configs.local_topics()), dict[str, Bus]()
    try:
        with STARTUP.stage("bus"):
            for service, config in configs._asdict().items():
                connections.append(await connect(config.nats_options()))
                buses[service] = LocalDeliveryBus(connections[-1], receivers)
    except BusError as error:
        log.error("cannot connect to the bus", extra={"error": str(error)})
        raise SystemExit(1) from None
    with metrics_server(first.metrics_host, first.metrics_port, ProcessMetrics(*SERVICES)) as port:
        built = await _build(configs, buses, sleep)
        runtimes = {
            service: ActorRuntime(
                actor,
                drain_timeout=first.drain_timeout,
                metrics_port=port if service == "scheduler" else None,  # where all figures of the process are
                when_set_up=keep_from_collecting,
                keep_alive=first.heartbeat_interval_s,
                block_size=first.block_size,
            )
            for service, actor in built.items()
        }
        actors = ColocatedActors(runtimes)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, actors.stop)
        watch = None
        if first.supervisor_lock is not None:
            watch = loop.create_task(end_as_orphan(Path(first.supervisor_lock), first, actors.stop))
        try:
            await actors.run()
        finally:
            if watch is not None:
                watch.cancel()
            for connection in connections:
                with contextlib.suppress(BusError):
                    await connection.flush()
                await connection.close()
            await asyncio.to_thread(TRACING.shut_down)


def _run(configs: ColocatedConfigs, sleep: RankSleep) -> None:
    """What starting again would not help ends the process as it ends each service's own."""
    set_up_process(configs.scheduler, "scheduler")
    try:
        run_loop(_serve(configs, sleep))
    except* (ModelNotFound, TokenizerUnusable) as errors:
        print(f"detokenizer: {innermost(errors)}", file=sys.stderr)
        raise SystemExit(CANNOT_SERVE) from None
    except* NameTaken as errors:
        log.error("name taken", extra={"error": str(innermost(errors))})
        raise SystemExit(NAME_TAKEN_STATUS) from None
    except* ConnectorRefused as errors:
        log.error("cannot serve", extra={"reason": str(innermost(errors))})
        raise SystemExit(CANNOT_SERVE) from None


def main() -> None:
    """Serves until it is told to end, or its rank to sleep: then the process goes on as one whose rank does. Exits with
    CANNOT_SERVE where the settings or the model are wrong."""
    try:
        configs = read_configs(sys.argv[1:], process_environment())
    except ConfigError as error:
        print(f"colocated: {error}", file=sys.stderr)
        raise SystemExit(CANNOT_SERVE) from None
    run_rank(configs.worker, partial(_run, configs), "services.offline.colocated", "worker")


if __name__ == "__main__":
    main()
