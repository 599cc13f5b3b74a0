"""The ranks that one container has: a process for each. They end together, as ranks compute nothing without each other,
and the container's runtime starts them all again. Where there is a supervisor (`baton up`), it starts ranks itself."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from services.worker.config import WorkerConfig
from shared.telemetry.logs import set_up_logs

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 10.0
"""That all others may take to end beyond `drain_timeout`, once one has ended."""


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
    set_up_logs("worker", config.instance, config.log_level)
    with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
        command = [sys.executable, "-m", "services.worker", *argv]
        ranks: list[subprocess.Popen[bytes]] = []

        def stop(*_: object) -> None:
            for rank in ranks:
                rank.terminate()

        for number in (signal.SIGTERM, signal.SIGINT):  # before there are ranks, which nobody else would end
            signal.signal(number, stop)
        for flags in rank_flags(config, Path(folder)):
            ranks.append(subprocess.Popen([*command, *flags]))
        first, status = _first_end({rank.pid for rank in ranks})
        ended = config.rank + [rank.pid for rank in ranks].index(first)
        log.log(logging.WARNING if status else logging.INFO, "a rank ended", extra={"rank": ended, "status": status})
        end_all([rank for rank in ranks if rank.pid != first], config.drain_timeout + GOODBYE_SECONDS)
    return status if status >= 0 else 128 - status


def end_all(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Has `ranks` end, and kills those that have not after so many seconds, which all of them share: a rank without its
    peers may hang where nothing stops it but that."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.wait()


def _first_end(ranks: set[int]) -> tuple[int, int]:
    """The first of these processes that ends, and how. As a container's first process this one also has the children of
    those that have ended."""
    while True:
        process, status = os.wait()
        if process in ranks:
            return process, os.waitstatus_to_exitcode(status)
