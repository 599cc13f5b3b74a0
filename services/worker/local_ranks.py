"""The ranks that one container has: a process for each. They end together, as ranks compute nothing without each other,
and the container's runtime starts them all again. Where there is a supervisor (`baton up`), it starts ranks itself."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from services.worker.config import WorkerConfig

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 10.0
"""For which the others may take to end, once one has ended."""


def rank_flags(config: WorkerConfig, folder: Path) -> Iterator[list[str]]:
    """For each of the ranks what differs of its settings. Where all ranks of the engine are here they meet in `folder`,
    unless they are told where; the first one's metrics are at the container's port, those of others at any."""
    alone = config.rendezvous is None and config.local_ranks == config.world_size
    name = config.instance_id().removesuffix(f"-rank{config.rank}")
    for offset in range(config.local_ranks):
        rank, device = config.rank + offset, (config.local_rank or 0) + offset
        flags = ["--local-ranks=1", f"--rank={rank}", f"--local-rank={device}", f"--instance={name}-rank{rank}"]
        if alone:
            flags.append(f"--rendezvous=file://{folder / 'meeting'}")
        if offset and config.metrics_port is not None:
            flags.append("--metrics-port=0")
        yield flags


def run_local_ranks(config: WorkerConfig, argv: Sequence[str]) -> int:
    """Runs `config.local_ranks` ranks, whose further settings are `argv` and this process's environment, until the
    first one ends or this process is told to. Returns the first one's exit status, 128 and the signal's number where a
    signal ended it."""
    with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
        command = [sys.executable, "-m", "services.worker", *argv]
        ranks = [subprocess.Popen([*command, *flags]) for flags in rank_flags(config, Path(folder))]

        def stop(*_: object) -> None:
            for rank in ranks:
                rank.terminate()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        first, status = _first_end({rank.pid for rank in ranks})
        log.info("a rank ended", extra={"process": first, "status": status})
        others = [rank for rank in ranks if rank.pid != first]
        for rank in others:
            rank.terminate()
        for rank in others:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(config.drain_timeout + GOODBYE_SECONDS)
            rank.kill()
            rank.wait()
    return status if status >= 0 else 128 - status


def _first_end(ranks: set[int]) -> tuple[int, int]:
    """The first of these processes that ends, and how. As a container's first process this one also has the children of
    those that have ended."""
    while True:
        process, status = os.wait()
        if process in ranks:
            return process, os.waitstatus_to_exitcode(status)
