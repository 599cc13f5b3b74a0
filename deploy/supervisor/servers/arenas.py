"""Where the KV store of a stack has its files: shared memory, kept while the stack runs and removed with it.

The directory outlives every process of the stack, the supervisor too, so that a store that was killed finds its blocks,
and a new supervisor what the stack had.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from deploy.supervisor.adoption import left_stack
from deploy.supervisor.state_file import StackRunning, directory_of, held, shared_memory

DEFAULT_MEMORY = 512 * 2**20
MIN_MEMORY = 16 * 2**20
MAX_SHARE = 0.5
"""Share of the free shared memory that a store may take if no size was chosen; torch needs some, too."""
HEADER_BYTES = 1 * 2**20
"""Bytes reserved for the files' own headers."""


def free_memory() -> int:
    """Bytes that files in shared memory may still take."""
    return shutil.disk_usage(shared_memory()).free


def default_memory(free: int) -> int:
    """Size of a store where none was chosen, in bytes; 0, for no store, where too little is free."""
    memory = min(DEFAULT_MEMORY, int(free * MAX_SHARE))
    return memory if memory >= MIN_MEMORY else 0


def fits(memory: int, free: int) -> bool:
    """Whether a store of `memory` bytes and its headers fit into `free` bytes."""
    return memory + HEADER_BYTES <= free


def remove_leftovers(run_dir: Path) -> bool:
    """Removes the directory of a stack that has ended; whether there was one. The caller holds `run_dir`."""
    where = directory_of(run_dir)
    if not where.is_symlink() and where.is_dir():
        shutil.rmtree(where, ignore_errors=True)
        return True
    return False


def clear_leftovers(run_dir: Path) -> bool:
    """Removes what is left where the supervisor and all processes were killed; whether there was anything. False where
    one of them lives: it is no leftover."""
    if not directory_of(run_dir).is_dir():
        return False
    try:
        with held(run_dir):
            return left_stack(run_dir) is None and remove_leftovers(run_dir)
    except StackRunning:
        return False


def arena_directory(run_dir: Path, *, keep: bool) -> Path:
    """A directory for its owner alone, which outlives every process of the stack: empty, or with `keep` the one of a
    supervisor that was killed. Raises OSError, also if another user owns it."""
    where = directory_of(run_dir)
    if keep and not where.is_symlink() and where.is_dir() and where.stat().st_uid == os.getuid():
        return where
    remove_leftovers(run_dir)
    where.mkdir(mode=0o700)
    return where
