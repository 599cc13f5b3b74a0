"""Where the KV store of a stack has its files: shared memory, kept while the stack runs and removed with it.

The directory outlives every process of the stack, so that a store that was killed finds its blocks. Where the
supervisor itself was killed it stays behind, for the next one of the same run directory, or `baton down`, to remove.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from deploy.supervisor.state_file import StackRunning, held

SHARED_MEMORY = Path("/dev/shm")
DEFAULT_MEMORY = 512 * 2**20
MIN_MEMORY = 16 * 2**20
MAX_SHARE = 0.5
"""Share of the free shared memory that a store may take if no size was chosen; torch needs some, too."""
HEADER_BYTES = 1 * 2**20
"""Bytes reserved for the files' own headers."""


def shared_memory() -> Path:
    """The directory for files in shared memory; the one for temporary files on systems without it."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def directory_of(run_dir: Path) -> Path:
    """The store's directory, unique for each run directory: its name and a digest of its path."""
    where = run_dir.expanduser().absolute()
    digest = blake2b(os.fsencode(where), digest_size=6).hexdigest()
    return shared_memory() / f"baton-{where.name[:64]}-{os.getuid()}-{digest}"


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
    """Removes an arena directory that a killed supervisor left; whether there was one. The caller holds `run_dir`."""
    where = directory_of(run_dir)
    if not where.is_symlink() and where.is_dir():
        shutil.rmtree(where)
        return True
    return False


def clear_leftovers(run_dir: Path) -> bool:
    """Removes what a killed supervisor left; whether there was anything. False where one lives: it is no leftover."""
    if not directory_of(run_dir).is_dir():
        return False
    try:
        with held(run_dir):
            return remove_leftovers(run_dir)
    except StackRunning:
        return False


@contextlib.contextmanager
def arenas(run_dir: Path) -> Iterator[Path]:
    """An empty directory for its owner alone, removed at the end. Raises OSError, also if another user owns it."""
    remove_leftovers(run_dir)
    where = directory_of(run_dir)
    where.mkdir(mode=0o700)
    try:
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)
