"""Reads what the server's processes have used, where they run on this machine."""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

import psutil

from services.bench.client.processor_time import CpuReading

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SUPERVISOR = "deploy.cli"
STACK_WORDS = ("baton", "deploy")
"""In the command line of the process that started the others, where there is one."""


def find_stack(base_url: str) -> dict[str, int]:
    """The processes behind a URL on this machine, by name: the listener, its parent in a stack, and all children.

    Empty where the server is elsewhere, or not ours to see.
    """
    url = urlsplit(base_url)
    if url.hostname not in LOOPBACK:
        return {}
    with contextlib.suppress(psutil.Error):
        listener = _listener(url.port or 80)
        if listener is not None:
            root = _root(listener)
            return _named([root, *root.children(recursive=True)])
    return {}


def used(pids: dict[str, int]) -> dict[str, CpuReading]:
    """What each process has used that is still there."""
    readings = {}
    for name, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            seconds, sleeps = times.user + times.system, process.num_ctx_switches().voluntary
            readings[name] = CpuReading(_actor(process), seconds, sleeps)
    return readings


def _listener(port: int) -> psutil.Process | None:
    for connection in psutil.net_connections("tcp"):
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port and connection.pid:
            return psutil.Process(connection.pid)
    return None


def _root(process: psutil.Process) -> psutil.Process:
    """The process that started the listener as part of a stack, be it through a template that it was forked from; the
    listener itself if there is none."""
    for parent in process.parents():
        if not any(word in part for part in parent.cmdline()[:4] for word in STACK_WORDS):
            break
        process = parent
    return process


def _named(processes: list[psutil.Process]) -> dict[str, int]:
    named: dict[str, int] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            name = _name(process)
            named[f"{name} ({process.pid})" if name in named else name] = process.pid
    return named


def _name(process: psutil.Process) -> str:
    """The instance where it is given one, else what it is."""
    for argument in process.cmdline():
        if argument.startswith("--instance="):
            return argument.removeprefix("--instance=")
    return _actor(process)


def _actor(process: psutil.Process) -> str:
    """The module that runs, by its last name; else the program."""
    command = process.cmdline()
    if "-m" not in command[:-1]:
        return process.name()
    module = command[command.index("-m") + 1]
    return "supervisor" if module == SUPERVISOR else module.rpartition(".")[2]
