"""Runs `services.worker.roofline` in a process of its own, as torch belongs to workers, and reads what it finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import msgspec

from deploy.cli.errors import CommandError
from services.worker.roofline.findings import Asked, Finding, Refused
from shared.config import process_environment

MODULE = "services.worker.roofline"
_STOP_SECONDS = 10.0


def findings(asked: Asked) -> Iterator[Finding]:
    """As they come. Raises CommandError where it cannot be measured."""
    question = msgspec.json.encode(asked).decode()
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, question], stdout=subprocess.PIPE, env=process_environment()
    )
    assert process.stdout is not None, "it is a pipe"
    try:
        for line in process.stdout:
            finding = msgspec.json.decode(line, type=Finding)
            if isinstance(finding, Refused):
                raise CommandError(finding.reason)
            yield finding
        if process.wait() != 0:
            raise CommandError(f"the measuring process ended with status {process.returncode}")
    finally:
        _end(process)


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
