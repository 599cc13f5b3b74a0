"""Where a store's memory is, on a machine with several NUMA nodes."""

from __future__ import annotations

import logging

from shared.machine.memory_policy import MemoryPolicy, set_memory_policy
from shared.machine.numa import NumaMode, allowed_cpus, compute_nodes, read_nodes

_log = logging.getLogger(__name__)


def interleave(mode: NumaMode) -> None:
    """The pages of what this process makes from now on, arenas above all, are put on the nodes with processors in turn:
    engines of all nodes read them. Nothing is changed on one node, or where the system forbids it."""
    allowed = allowed_cpus()
    nodes = [] if mode == "off" or allowed is None else compute_nodes(read_nodes(), allowed)
    numbers = [node.number for node in nodes if node.memory]
    if len(numbers) < 2:
        return
    try:
        set_memory_policy(MemoryPolicy.INTERLEAVE, numbers)
    except OSError as error:
        _log.info("memory is not interleaved: %s", error.strerror)
