"""`python -m services.worker`: one rank of an engine."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

from kvstore.connectors.installed import ConnectorRefused
from services.worker.actor import WorkerActor
from services.worker.backend import Backend, BackendError
from services.worker.config import WorkerConfig
from services.worker.executor.backend_choice import make_backend
from services.worker.flops import FlopsMeter, peak_flops
from services.worker.kv.connector_thread import ConnectorThread
from services.worker.lora_watcher import LoraWatcher
from services.worker.rank_sleep import RankSleep, discard_pages, execute_asleep
from services.worker.sim.shape import read_shape
from services.worker.watchdog import StepHung
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit
from shared.error_groups import innermost
from shared.machine.file_pages import release_file_pages
from shared.machine.heap import give_back_freed_memory
from shared.machine.home import expanded
from shared.machine.numa import allowed_cpus
from shared.messages.worker import SleepLevel
from shared.models.lora_registry import LoraRegistry

log = logging.getLogger(__name__)

CANNOT_SERVE = 2
"""Exit status, as for settings that cannot be used: a start is given up at once, as the next one would fail, too."""

_LEVELS: tuple[SleepLevel | None, ...] = (None, 1, 2)
HUNG = 70
"""Exit status after a step that never ended."""


async def build(
    config: WorkerConfig, bus: Bus, sleep: RankSleep | None = None, when_made: Callable[[], None] = lambda: None
) -> WorkerActor:
    """The worker's actor, which begins as `sleep` says; its backend is made on the compute thread once the actor
    starts, and `when_made` called there behind it. Raises BackendError for a KV connector that cannot be had."""
    try:
        half = config.connector()
    except ConnectorRefused as error:
        raise BackendError(str(error)) from None
    connector = None if half is None else ConnectorThread(half)
    on_layer = connector.layer_stored if connector is not None and connector.layerwise else None
    sleep = sleep or RankSleep()

    def made() -> Backend:
        backend = make_backend(config.meeting(sleep.met_under), on_layer)
        when_made()
        return backend

    return WorkerActor(
        bus,
        config.instance_id(),
        config.place(),
        made,
        lambda backend: make_meter(config, backend),
        connector,
        None if config.lora_registry is None else LoraWatcher(LoraRegistry(config.lora_registry)),
        sleep,
    )


def make_meter(config: WorkerConfig, backend: Backend) -> FlopsMeter | None:
    """What estimates the operations of a rank's steps; None where the shape of its model is not in a folder here."""
    try:
        shape = read_shape(expanded(config.model), backend.card.dtype)
    except BackendError:
        return None
    return FlopsMeter(shape, config.world_size, peak_flops(backend.device_name, backend.card.dtype))


def run_rank(config: WorkerConfig, serve: Callable[[RankSleep], None], *program: str) -> None:
    """Serves until the process is told to end, or its rank to sleep: then it goes on as one whose rank does. `program`:
    its module and, where several services share it, the one that the rank's flags follow. Exits with CANNOT_SERVE where
    the model cannot be served with these settings, with HUNG where a step never ended."""
    processors = allowed_cpus()
    sleep = RankSleep(_LEVELS[config.asleep], partial(discard_pages, expanded(config.model)))
    try:
        _serve(config, serve, sleep)
    except BaseException:
        # What is excluded from collection once a model is loaded is never freed, and Triton's nanobind would list it as
        # leaked: 40 lines behind the reason why this process ends.
        gc.unfreeze()
        raise
    if sleep.next_level is not None:
        execute_asleep(sleep.next_level, processors, *program)


def _serve(config: WorkerConfig, serve: Callable[[RankSleep], None], sleep: RankSleep) -> None:
    try:
        serve(sleep)
    except* BackendError as errors:
        log.error("cannot serve", extra={"model": config.model, "reason": str(innermost(errors))})
        raise SystemExit(CANNOT_SERVE) from None
    except* StepHung as errors:
        log.critical("step hung", extra={"reason": str(innermost(errors))})
        logging.shutdown()
        os._exit(HUNG)  # an orderly exit would wait for the thread that hangs


def release_start_memory() -> None:
    """Has this process let go of what only its start needed: 27 MiB of PyTorch's code, and 7 that malloc kept of the
    largest step's tensors. On a thread of its own, as the kernel takes 10 to 40 ms to say what is there."""

    def release() -> None:
        give_back_freed_memory()
        release_file_pages()

    threading.Thread(target=release, name="release", daemon=True).start()


def main() -> None:
    """See `run_rank`, and `run_local_ranks` for several."""
    config = load_or_exit("worker", WorkerConfig)
    if config.local_ranks > 1:
        from services.worker.local_ranks import run_local_ranks

        sys.exit(run_local_ranks(config, sys.argv[1:]))
    run_rank(
        config,
        lambda sleep: run_service(config, lambda bus: build(config, bus, sleep, release_start_memory), "worker"),
    )


if __name__ == "__main__":
    main()
