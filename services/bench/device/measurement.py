"""Runs `services.worker.measure.roofline` in a process of its own, as torch belongs to workers, and reads what it
finds."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from services.bench.engine.process import end_process
from services.bench.errors import BenchError
from services.worker.measure.roofline.wire import (
    Ceilings,
    Finding,
    KernelWork,
    MeasureRefused,
    MeasureRequest,
    MeasureStarted,
    StepsRequest,
)
from shared.addresses import loopback_interface, rank_interfaces, rendezvous_file
from shared.config import process_environment

MODULE = "services.worker.measure.roofline"

FindingT = TypeVar("FindingT", bound=Finding)


class Findings:
    """Owns what a process has found so far, in order."""

    def __init__(self) -> None:
        self._found: list[Finding] = []

    def record(self, finding: Finding) -> None:
        """Keeps one more."""
        self._found.append(finding)

    def all(self, kind: type[FindingT]) -> list[FindingT]:
        """Those of one kind."""
        return [each for each in self._found if isinstance(each, kind)]

    def first(self, kind: type[FindingT]) -> FindingT | None:
        """The one of a kind that comes once; None where it has not come."""
        return next(iter(self.all(kind)), None)


def findings(request: MeasureRequest) -> Iterator[Finding]:
    """Yields findings as they are measured. Raises BenchError if the device cannot be measured."""
    with contextlib.ExitStack() as processes:
        # Its folder ends with the processes: the last rank removes the file only where it ends by itself.
        folder = processes.enter_context(tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True))
        ranks = [_started(processes, each) for each in requests_of_ranks(request, Path(folder))]
        first = ranks[0]
        assert first.stdout is not None, "it is a pipe"
        for line in first.stdout:
            finding = msgspec.json.decode(line, type=Finding)
            if isinstance(finding, MeasureRefused):
                raise BenchError(finding.reason)
            yield finding
        if first.wait() != 0:
            raise BenchError(f"the measuring process ended with status {first.returncode}")


def requests_of_ranks(request: MeasureRequest, folder: Path) -> list[MeasureRequest]:
    """The request to each process; only the first one's findings are used. `folder`: where they meet."""
    if not isinstance(request, StepsRequest) or request.tp == 1:
        return [request]
    meeting = rendezvous_file(folder, "ranks")
    return [replace(request, rank=rank, rendezvous=meeting) for rank in range(request.tp)]


def _started(processes: contextlib.ExitStack, request: MeasureRequest) -> subprocess.Popen[bytes]:
    question = msgspec.json.encode(request).decode()
    output = subprocess.PIPE if not isinstance(request, StepsRequest) or request.rank == 0 else subprocess.DEVNULL
    environment = process_environment()
    environment |= rank_interfaces(loopback_interface(), environment)
    process = subprocess.Popen([sys.executable, "-m", MODULE, question], stdout=output, env=environment)
    processes.callback(end_process, process)
    return process


def device_line(started: MeasureStarted) -> str:
    """On what it is measured."""
    on = f"{started.model} in {started.dtype} on {started.device}"
    if started.threads is None:
        return on
    busy = "" if started.load_average is None else f", load average {started.load_average:.1f}"
    return f"{on}, {started.threads} threads{busy}"


def ceilings_line(ceilings: Ceilings) -> str:
    """The device's limits in one line of text."""
    memory = ", ".join(f"{name} {rate / 1e9:,.1f} GB/s" for name, rate in ceilings.memory_rates.items())
    matrix = ", ".join(f"{name} {rate / 1e12:,.2f} TFLOP/s" for name, rate in ceilings.matrix_rates.items())
    return f"limits, as measured in this run: {memory}; {matrix}"


def against_limits(work: KernelWork, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """The rates and the share of the binding limit, as a JSON object."""
    return {
        "bytes_per_second": work.bytes / seconds,
        "flops_per_second": work.flops / seconds,
        "bound": ceilings.bound(work),
        "share": ceilings.share(work, seconds),
    }
