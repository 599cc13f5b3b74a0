"""What is chosen by the machine that a stack runs on: NUMA nodes for its engines, and how its GPUs are joined."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.cli.up.options import service_settings
from deploy.errors import CommandError
from deploy.supervisor.settings import StackSettings
from shared.config import process_environment
from shared.machine.gpu_topology import GpuTopology, TopologyError, parse_matrix
from shared.machine.home import expanded
from shared.machine.numa import allowed_cpus, compute_nodes, read_nodes
from shared.machine.nvml import read_topology

Settings = Mapping[str, Mapping[str, str]]


def numa_choice(values: Mapping[str, Any], assigned: Settings) -> tuple[int, ...]:
    """The NUMA nodes that engines are spread over; none on a machine with one, and where it was said which processors
    they have."""
    worker = {**service_settings(values).get("worker", {}), **assigned.get("worker", {})}
    allowed = allowed_cpus()
    if allowed is None or worker.get("numa") == "off" or worker.get("bind", "auto") != "auto" or "threads" in worker:
        return ()
    nodes = compute_nodes(read_nodes(), allowed)
    return tuple(node.number for node in nodes) if len(nodes) > 1 else ()


def gpu_choice(stack: StackSettings, values: Mapping[str, Any], assigned: Settings) -> GpuTopology | None:
    """How the GPUs of this machine are joined; None where that is not known, or of no use. Raises CommandError."""
    if stack.gpu_topology == "off":
        return None
    if stack.gpu_topology != "auto":
        return recorded_topology(Path(stack.gpu_topology))
    worker = {**service_settings(values).get("worker", {}), **assigned.get("worker", {})}
    return gpus_here() if worker.get("device", "auto") in ("auto", "cuda") else None


def gpus_here() -> GpuTopology | None:
    """Those that CUDA sees, as the driver says; None where it says nothing."""
    environment = process_environment()
    ordered = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return read_topology(environment.get("CUDA_VISIBLE_DEVICES"), ordered_by_bus=ordered)


def recorded_topology(file: Path) -> GpuTopology:
    """What `nvidia-smi topo -m` printed once. Raises CommandError."""
    try:
        return parse_matrix(expanded(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise CommandError(f"--gpu-topology {file}: {reason}; auto, off or a file", status=2) from None
    except TopologyError as error:
        raise CommandError(f"--gpu-topology {file}: {error}", status=2) from None
