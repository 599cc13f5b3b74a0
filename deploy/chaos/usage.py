"""What each process of a stack has of the machine: memory and file descriptors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from deploy.supervisor.state_file import StackState

MAX_GROWTH = 64 * 2**20
"""Bytes by which a process may be larger after further passes over all cases than after the first: what it keeps for
good it has by then. Ranks use their KV memory from block to block, and are not judged."""


class ProcessUsage(NamedTuple):
    """Memory and file descriptors of one process."""

    pid: int
    memory: int
    """Bytes that it has for itself alone (USS): shared memory is the KV store's level."""
    descriptors: int


def usage(state: StackState) -> dict[str, ProcessUsage]:
    """Of each process, by name, and of the supervisor."""
    found = {}
    named = {**{name: identity.pid for name, identity in state.processes.items()}, "supervisor": state.pid}
    for name, pid in named.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found[name] = ProcessUsage(pid, int(process.memory_full_info().uss), process.num_fds())
    return found


def descriptors(state: StackState) -> dict[str, tuple[int, int]]:
    """Of each process, by name: its pid and how many it has open; without those that are gone."""
    found = {}
    for name, identity in state.processes.items():
        with contextlib.suppress(psutil.Error):
            found[name] = identity.pid, psutil.Process(identity.pid).num_fds()
    return found


def grown(first: Mapping[str, ProcessUsage], last: Mapping[str, ProcessUsage]) -> dict[str, int]:
    """By how many bytes processes that are still the same ones have grown, where that is more than MAX_GROWTH."""
    same = (name for name, then in first.items() if name in last and last[name].pid == then.pid and "rank" not in name)
    growth = {name: last[name].memory - first[name].memory for name in same}
    return {name: bytes_ for name, bytes_ in growth.items() if bytes_ > MAX_GROWTH}
