"""Runs `services.worker.roofline` in a process of its own, as torch belongs to workers, and reads what it finds."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from deploy.cli.errors import CommandError
from deploy.supervisor.foreign_server import HOST, free_port
from services.worker.roofline.findings import Asked, Finding, Refused, StepsAsked
from shared.config import process_environment

MODULE = "services.worker.roofline"
_STOP_SECONDS = 10.0


def findings(asked: Asked) -> Iterator[Finding]:
    """As they come. Raises CommandError where it cannot be measured."""
    with contextlib.ExitStack() as processes:
        ranks = [_started(processes, each) for each in of_each_rank(asked)]
        first = ranks[0]
        assert first.stdout is not None, "it is a pipe"
        for line in first.stdout:
            finding = msgspec.json.decode(line, type=Finding)
            if isinstance(finding, Refused):
                raise CommandError(finding.reason)
            yield finding
        if first.wait() != 0:
            raise CommandError(f"the measuring process ended with status {first.returncode}")


def of_each_rank(asked: Asked) -> list[Asked]:
    """What each process is asked; the first one's answers count."""
    if not isinstance(asked, StepsAsked) or asked.tp == 1:
        return [asked]
    meeting = f"tcp://{HOST}:{free_port()}"
    return [replace(asked, rank=rank, rendezvous=meeting) for rank in range(asked.tp)]


def _started(processes: contextlib.ExitStack, asked: Asked) -> subprocess.Popen[bytes]:
    question = msgspec.json.encode(asked).decode()
    told = subprocess.PIPE if not isinstance(asked, StepsAsked) or asked.rank == 0 else subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-m", MODULE, question], stdout=told, env=process_environment())
    processes.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
