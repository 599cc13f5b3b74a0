"""A container's health: 0 while its service says that it is ready, or drains. Standard library only, one file.

Reads the service's own metrics: the phase in there is what the actor itself holds, so an engine without its workers
is not healthy although its process lives. A container runtime restarts what ends, not what hangs: a service that was
ready, and stands still at LOOKS_BEFORE_KILL looks in a row, is killed.

    python healthcheck.py PORT           # ready, or draining
    python healthcheck.py PORT --live    # its event loop turns, in whatever phase; kills nothing
    python healthcheck.py PORT --until-leader-ends=ADDRESS    # of a LeaderWorkerSet's worker, before it stops: returns
                                                              # once nobody listens there
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HEALTHY = ('phase="ready"', 'phase="draining"')
MAX_HEARTBEAT_AGE = 6.0
"""Seconds; an event loop that has not turned for longer stands still. The supervisor's `silence_limit` is the same."""
LOOKS_BEFORE_KILL = 3
ANSWER_SECONDS = 3.0
UNTIL_LEADER_ENDS = "--until-leader-ends="
LEADER_SECONDS = 160.0
"""For which a leader that drains is waited for; longer than its pod's grace period, so that it is gone by then."""
LEADER_PAUSE = 0.5
INIT = 1
"""The container's first process; with `init: true` the service is its child."""


def is_healthy(metrics: str) -> bool:
    """Whether metrics in Prometheus's text format say that the service is ready or draining."""
    lines = (line for line in metrics.splitlines() if line.startswith("baton_phase{"))
    return any(line.endswith(" 1.0") and any(phase in line for phase in HEALTHY) for line in lines)


def is_stalled(metrics: str | None) -> bool:
    """Whether no answer came although somebody listens (None), or the service's event loop does not turn."""
    if metrics is None:
        return True
    ages = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith("baton_heartbeat_age_seconds ")]
    return any(float(age) > MAX_HEARTBEAT_AGE for age in ages)


def look(port: str, notes: Path, init: int | None, wait: float = ANSWER_SECONDS) -> int:
    """The exit status: 0 while healthy, 1 otherwise, also if there is no answer within `wait` seconds. `notes` is where
    it remembers its former looks at the child of `init` that it may kill; None: there is none."""
    try:
        metrics = _metrics(port, wait)
    except OSError as error:  # nobody listens: it starts, or has ended
        print(error, file=sys.stderr)
        return 1
    healthy, still = metrics is not None and is_healthy(metrics), is_stalled(metrics)
    service = _service(init) if init is not None else None
    if service is not None:
        _judge(*service, notes, healthy=healthy, still=still)
    return 0 if healthy and not still else 1


def is_live(port: str, wait: float = ANSWER_SECONDS) -> int:
    """The exit status for what restarts containers itself, such as a kubelet: 0 while the event loop turns, so also
    while a model is loaded; 1 where it stands still, or nobody listens."""
    try:
        metrics = _metrics(port, wait)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return int(is_stalled(metrics))


def wait_for_leaders_end(address: str, port: str, limit: float = LEADER_SECONDS) -> int:
    """The exit status: 0 once nobody listens at `address`, 1 where somebody does for `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            socket.create_connection((address, int(port)), ANSWER_SECONDS).close()
        except OSError:  # refused, unknown by name, or a host that is gone
            return 0
        time.sleep(LEADER_PAUSE)
    return 1


def _metrics(port: str, wait: float) -> str | None:
    """None: a connection, and no answer on it. Raises OSError where nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=wait) as response:
            return str(response.read().decode())
    except TimeoutError:
        return None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return None
        raise


def _service(init: int) -> tuple[int, str] | None:
    """Pid and start time of the oldest child of `init` that is not this process; None where there is none."""
    found: list[tuple[int, int]] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == init and entry.name != str(os.getpid()):
                found.append((int(fields[19]), int(entry.name)))
    if not found:
        return None
    started, pid = min(found)
    return pid, str(started)


def _judge(pid: int, started: str, notes: Path, *, healthy: bool, still: bool) -> None:
    """Counts looks at which a process stood still that was ready once, and kills it at the last."""
    process, was_ready, times = f"{pid} {started}", False, 0
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        noted = json.loads(notes.read_text())
        if noted["process"] == process:
            was_ready, times = bool(noted["was_ready"]), int(noted["still"])
    was_ready = was_ready or healthy
    times = times + 1 if still and was_ready else 0
    with contextlib.suppress(OSError):
        notes.write_text(json.dumps({"process": process, "was_ready": was_ready, "still": times}))
    if times >= LOOKS_BEFORE_KILL:
        print(f"process {pid} stands still and is killed", file=sys.stderr)
        os.kill(pid, signal.SIGKILL)


def main(port: str, *options: str) -> int:
    """The exit status. Where the service is the first process itself, it is only looked at."""
    if "--live" in options:
        return is_live(port)
    for option in options:
        if option.startswith(UNTIL_LEADER_ENDS):
            return wait_for_leaders_end(option.removeprefix(UNTIL_LEADER_ENDS), port)
    notes = Path(tempfile.gettempdir()) / "baton-health.json"
    is_init = not Path(f"/proc/{INIT}/comm").read_text().startswith("python")
    return look(port, notes, INIT if is_init else None)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
