"""Memory that the ranks of a stage share where all are processes of one host. Knows nothing of what goes through it."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from services.worker.distributed.host_notifier import HostNotifier

_FOLDER = Path("/dev/shm")
_TOKEN_BYTES = 16
_NO_TOKEN = bytes(_TOKEN_BYTES)


class RankGone(RuntimeError):
    """Another rank has ended, or does not come."""


class RowRange(NamedTuple):
    """Neighbours among the rows of a tensor."""

    first: int
    end: int


class HostExchange(Protocol):
    """Collectives over the ranks of a stage through memory of their host; every rank calls them in the same order."""

    def takes(self, x: Tensor) -> bool:
        """Whether `sum` can be asked for `x`; ranks with tensors of one kind get the same answer."""

    def sum(self, x: Tensor) -> None:
        """`x`, contiguous, becomes the sum of every rank's, added up in the order of the ranks. Raises RankGone."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's contiguous `x` by rank, on rank 0; the others get an empty list. Raises RankGone."""

    def broadcast(self, x: Tensor) -> None:
        """`x`, contiguous, becomes rank 0's. Raises RankGone."""

    def all_gather(self, x: Tensor, shares: Sequence[RowRange]) -> None:
        """The rows of `x` [n, width], contiguous, become each rank's own in its share; shares do not overlap, and are
        the same on every rank. Raises RankGone."""

    def reduce_scatter(self, x: Tensor, shares: Sequence[RowRange]) -> None:
        """The rows of `x` [n, width], contiguous, that are this rank's share become what `sum` would make of them; the
        others are undefined. Ranks with the same share follow each other. Raises RankGone."""

    def dispatch(self, x: Tensor, shares: Sequence[RowRange]) -> Callable[[], None]:
        """The rows of `x` uint8 [n, width], contiguous, are each rank's own in its share. The first eight bytes of a
        row, an int64, have a bit for each rank that it goes to; they go to all. Returns what waits until this rank has
        its rows; those that are not for it are undefined then but for these bytes. Raises RankGone, as waiting does."""

    def combine(self, x: Tensor, shares: Sequence[RowRange], holders: Tensor) -> None:
        """As `reduce_scatter`, but each row is added up over the ranks alone whose bits `holders` int64 [n] has: so it
        has the same bits as where the others have zeros. Raises RankGone."""

    @property
    def notifier(self) -> HostNotifier:
        """By which these ranks wake each other."""

    def close(self) -> None:
        """Lets go of the memory."""


class SharedExchange(NamedTuple):
    """That a rank can exchange tensors through memory, if all ranks of its stage can."""

    memory_bytes: int
    """That the ranks share for it."""
    open: Callable[[HostMemory], HostExchange]
    """Makes one rank's end."""


class GatherFromRanks(Protocol):
    """How the ranks of a stage hear of each other before they share memory."""

    def __call__(self, value: bytes) -> Sequence[bytes]:
        """The `value` of every rank of the stage, by rank; all call it."""


class StageRank(NamedTuple):
    """A rank's place in its stage."""

    rank: int
    ranks: int


class HostMemory:
    """One rank's mapping of the memory, and whether the others are still there.

    Each rank holds a lock on a byte of the file, which the system takes from a process when it ends, however it does.
    So a rank that waits in vain for another one can tell that it is dead, as the end of a connection would tell it.
    """

    def __init__(self, descriptor: int, stage_rank: StageRank, patience: timedelta) -> None:
        self.stage_rank = stage_rank
        self.patience = patience
        """How long an exchange may wait for a rank that lives."""
        self._descriptor = descriptor
        self.mapping = mmap.mmap(descriptor, 0)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, stage_rank.rank)

    def check(self, rank: int, waiting_since: float) -> None:
        """Raises RankGone if the process of another rank has ended, or has not come for `patience` since a moment of
        the monotonic clock."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            if time.monotonic() - waiting_since < self.patience.total_seconds():
                return
            raise RankGone(f"rank {rank} of this stage has not come for {self.patience.total_seconds():g} s") from None
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        raise RankGone(f"rank {rank} of this stage has ended")

    def close(self) -> None:
        """Gives up the lock. The mapping ends with the last tensor or view of it."""
        os.close(self._descriptor)


def share(stage_rank: StageRank, size: int, agree_on: GatherFromRanks, patience: timedelta) -> HostMemory | None:
    """`size` bytes that all ranks of the stage have mapped, zero but for the first 64; None where they do not share a
    host, or it has no room. `size` is 0 on a rank that has no use for them, and they are not shared then. All ranks
    call it, and get memory, or none of them. Nothing of it has a name when this returns."""
    made = _create(size) if stage_rank.rank == 0 and size else None
    try:
        token, name = agree_on(_NO_TOKEN if made is None else made.token + os.fsencode(made.path))[0], b""
        token, name = token[:_TOKEN_BYTES], token[_TOKEN_BYTES:]
        descriptor = _open(Path(os.fsdecode(name)), token) if name and size else None
        # Each rank has its lock before any of the others can ask for it.
        memory = None if descriptor is None else _mapped(descriptor, stage_rank, patience)
        everybody = agree_on(b"" if memory is None else b"here")
    finally:
        if made is not None:
            made.path.unlink(missing_ok=True)
    if all(everybody):
        return memory
    if memory is not None:
        memory.close()
    return None


class _Made(NamedTuple):
    path: Path
    token: bytes


def _create(size: int) -> _Made | None:
    """A file that nobody else can have: its first bytes are a token. The ranks' memory is behind them, on a page that
    nothing else is on."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f"baton-ranks-{os.getpid()}-", dir=_FOLDER)
    except OSError:
        return None
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, token, 0)
    except OSError:
        Path(name).unlink(missing_ok=True)
        return None
    finally:
        os.close(descriptor)
    return _Made(Path(name), token)


def _open(path: Path, token: bytes) -> int | None:
    """A descriptor of the file if it is here, and is that one: another host may have one of the same name."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.pread(descriptor, _TOKEN_BYTES, 0) == token:
        return descriptor
    os.close(descriptor)
    return None


def _mapped(descriptor: int, stage_rank: StageRank, patience: timedelta) -> HostMemory | None:
    try:
        return HostMemory(descriptor, stage_rank, patience)
    except OSError:
        os.close(descriptor)
        return None
