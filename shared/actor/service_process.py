"""The process of a service: logs, traces, the bus and signals around its actor. What every `__main__` calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from shared.actor.actor import Actor
from shared.actor.runtime import ActorRuntime, NameTaken
from shared.bus import Bus, BusError
from shared.bus.nats_connection import connect
from shared.config import ServiceConfig
from shared.machine.roomy_stack import call_with_room
from shared.supervision import orphaned
from shared.telemetry.logs import set_up_logs
from shared.telemetry.metrics import ProcessMetrics, metrics_server
from shared.telemetry.startup import STARTUP, process_age
from shared.telemetry.tracing import TRACING, TracingUnavailable

log = logging.getLogger(__name__)

NAME_TAKEN_STATUS = 2
"""As for other settings that cannot be used: starting it again at once would not help."""
MAX_ORPHAN_MARGIN = 15.0
"""Seconds beyond the orphan timeout, within which the stack's keeper begins to end everything in order."""


def run_service(config: ServiceConfig, build: Callable[[Bus], Actor | Awaitable[Actor]], service: str) -> None:
    """Runs one service process until SIGTERM or SIGINT. What every `__main__` calls last.

    It ends by itself a while after its supervisor (`orphan_timeout`). `build` makes the actor on a
    connected bus. Exits with status 1 when no bus answers.
    """
    set_up_process(config, service)
    run_loop(_serve(config, build, service))


def set_up_process(config: ServiceConfig, service: str) -> None:
    """Logs and traces of this process are that service's from now on. Exits with status 1 where it cannot trace."""
    if (age := process_age()) is not None:
        STARTUP.record("process", age)
    set_up_logs(service, config.instance, config.log_level)
    TRACING.remember(config.trace_history)
    if config.otlp_traces_endpoint is not None:
        try:
            TRACING.set_up(service, config.instance, config.otlp_traces_endpoint, config.trace_sample_rate)
        except TracingUnavailable as error:
            log.error("cannot trace", extra={"error": str(error)})
            raise SystemExit(1) from None


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, on uvloop where it is installed. What it calls finds room for its frames."""
    try:
        import uvloop
    except ImportError:  # not to be had on Windows
        call_with_room(lambda: asyncio.run(work))
    else:
        call_with_room(lambda: uvloop.run(work))


async def _serve(config: ServiceConfig, build: Callable[[Bus], Actor | Awaitable[Actor]], service: str) -> None:
    try:
        with STARTUP.stage("bus"):
            bus = await connect(config.nats_options())
    except BusError as error:
        log.error("cannot connect to the bus", extra={"error": str(error)})
        raise SystemExit(1) from None
    metrics = ProcessMetrics(service)
    with metrics_server(config.metrics_host, config.metrics_port, metrics) as metrics_port:
        built = build(bus)
        actor = built if isinstance(built, Actor) else await built
        metrics.added = actor.metrics
        runtime = ActorRuntime(
            actor,
            drain_timeout=config.drain_timeout,
            metrics_port=metrics_port,
            when_set_up=keep_from_collecting,
            keep_alive=config.heartbeat_interval_s,
            block_size=config.block_size,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, runtime.stop)
        watch = None
        if config.supervisor_lock is not None:
            watch = loop.create_task(end_as_orphan(Path(config.supervisor_lock), config, runtime.stop))
        try:
            await runtime.run()
        except NameTaken as error:
            log.error("name taken", extra={"error": str(error)})
            raise SystemExit(NAME_TAKEN_STATUS) from None
        else:
            with contextlib.suppress(BusError):
                await bus.flush()
        finally:
            if watch is not None:
                watch.cancel()
            await bus.close()
            await asyncio.to_thread(TRACING.shut_down)


def keep_from_collecting() -> None:
    """Excludes all objects that exist now from garbage collection. Otherwise every full collection looks through them:
    20 to 30 ms about once a second in a scheduler of 256 sequences, six steps of a fast device. Later objects are
    collected as usual."""
    gc.collect()
    gc.freeze()


async def end_as_orphan(lock: Path, config: ServiceConfig, stop: Callable[[], None]) -> None:
    """Ends this process some time after its supervisor, where nobody else did: whoever takes a stack over, be it to end
    it, holds the lock."""
    margin = min(config.orphan_timeout, MAX_ORPHAN_MARGIN)
    await orphaned(lock, config.orphan_timeout + margin)
    log.warning("no supervisor", extra={"seconds": config.orphan_timeout})
    stop()
    await asyncio.sleep(config.drain_timeout + margin)
    os._exit(1)
