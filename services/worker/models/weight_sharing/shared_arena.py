"""Memory for weights that other processes may map: a file without a name, on huge pages, which nobody can change once
it is sealed.

Shared memory has huge pages only where the machine's settings say so; but MADV_COLLAPSE (madvise(2), Linux 6.1) makes
them whatever these say. From pages of 4 kB products would be slower, so without it nothing is shared.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from services.worker.ops.native.kernels import WeightArena
from services.worker.platforms.main_memory import total_bytes

_HUGE_PAGE = 2 << 20
_POPULATED_BYTES = 32 << 20
"""At a time; what is left over is given back in the end."""
_MADV_POPULATE_READ, _MADV_COLLAPSE = 22, 25
_MAP_NORESERVE = 0x4000
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALED = 0x1 | 0x2 | 0x4 | 0x8
"""No more seals, and the file neither shrinks nor grows nor is written to (F_SEAL_…, fcntl(2)). The machine's settings
may have one more, that it is not executed (`vm.memfd_noexec`)."""
_LENGTH_BYTES = 8


class NotShared(Exception):
    """Weights cannot be shared here, or cannot be had from there; the text says why."""


class SharedArena(WeightArena):
    """A `WeightArena` whose pieces lie behind one another in one file. Where the kernel gives no huge pages, they are
    private memory from there on, and the file cannot be sealed."""

    def __init__(self) -> None:
        """Raises NotShared where there is no such memory: where nothing is shared, nobody shall wait."""
        super().__init__()
        self._limit = -(-total_bytes() // _POPULATED_BYTES) * _POPULATED_BYTES
        try:
            self.file = os.memfd_create("baton-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.memory, whole = _reserved(self._limit)
            weakref.finalize(whole, os.close, self.file)
            _map(self.memory, self._limit, self.file, mmap.MAP_SHARED)
        except (OSError, AttributeError) as error:  # none but Linux has such files
            raise NotShared(str(error)) from None
        self._used = self._populated = 0
        self._refusal: str | None = None
        self._populate(1)
        self.check()

    def take(self, num_bytes: int) -> Tensor:
        """See `WeightArena.take`."""
        start = -(-self._used // 64) * 64
        if self._refusal is None:
            self._populate(start + num_bytes)
        if self._refusal is not None:
            return super().take(num_bytes)
        self._used = start + num_bytes
        return self.memory[start : self._used]

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where in the file a tensor lies; None for one that lies elsewhere."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset if 0 <= offset < self._used else None

    def check(self) -> None:
        """Raises NotShared where not every piece lies in the file."""
        if self._refusal is not None:
            raise NotShared(self._refusal)

    def seal(self, content: bytes) -> None:
        """Writes `content` behind all pieces; from here on the file never changes. Pieces may still be written to: this
        process then has copies of these pages. Raises NotShared."""
        self.check()
        ending = content + len(content).to_bytes(_LENGTH_BYTES, "little")
        try:
            self._populated = -(-self._used // _HUGE_PAGE) * _HUGE_PAGE
            os.ftruncate(self.file, self._populated)
            os.pwrite(self.file, ending, self._populated)
            _map(self.memory, self._limit, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, over=self._populated)
            _map(self.memory, self._populated, self.file, mmap.MAP_PRIVATE)
            _advise(self.memory, 0, self._populated, _MADV_POPULATE_READ)
            fcntl.fcntl(self.file, _F_ADD_SEALS, _SEALED)
        except OSError as error:
            raise NotShared(str(error)) from None

    def _populate(self, end: int) -> None:
        """Has huge pages up to there, and some behind it."""
        start = self._populated
        if end <= start:
            return
        end = -(-end // _POPULATED_BYTES) * _POPULATED_BYTES
        if end > self._limit:
            self._refusal = "the weights are larger than the main memory"
            return
        try:
            os.ftruncate(self.file, end)
            for page in range(start, end, _HUGE_PAGE):
                os.pwrite(self.file, b"\0", page)  # a range of which nothing is there cannot be made a huge page
            _advise(self.memory, start, end, _MADV_COLLAPSE)
            self._populated = end
        except OSError as error:
            self._refusal = f"no huge pages of shared memory: {error.strerror}"


def open_sealed(path: str) -> tuple[int, Tensor, bytes]:
    """Maps another process's sealed file: its descriptor, which is closed with the memory; its memory, all of which is
    there from the start, for a step that touches it first would seem to take it; its content. What this process writes
    to are copies. Raises NotShared where it is no such file, but by now another process's pipe, terminal or memory."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise NotShared(str(error)) from None
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or fcntl.fcntl(file, _F_GET_SEALS) & _SEALED != _SEALED:
            raise NotShared("it is not sealed, or somebody else's")
        length = int.from_bytes(os.pread(file, _LENGTH_BYTES, found.st_size - _LENGTH_BYTES), "little")
        if length > found.st_size - _LENGTH_BYTES:
            raise NotShared("it is not of weights")
        content = os.pread(file, length, found.st_size - _LENGTH_BYTES - length)
        memory, whole = _reserved(found.st_size)
        _map(memory, found.st_size, file, mmap.MAP_PRIVATE)
        _advise(memory, 0, found.st_size, _MADV_POPULATE_READ)
    except (OSError, NotShared) as error:
        os.close(file)
        raise NotShared(str(error)) from None
    weakref.finalize(whole, os.close, file)
    return file, memory, content


def progress_of(path: str) -> int:
    """What has been written of another process's file, sealed or not; 0 where there is none."""
    with suppress(OSError):
        return os.stat(path).st_blocks
    return 0


def _reserved(num_bytes: int) -> tuple[Tensor, mmap.mmap]:
    """Addresses from a huge page's bound on, with nothing behind them yet; and what frees them once it is gone, which
    the tensor keeps. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    whole = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=flags)
    tensor = torch.frombuffer(whole, dtype=torch.uint8)
    start = -tensor.data_ptr() % _HUGE_PAGE
    return tensor[start : start + num_bytes], whole


def _map(memory: Tensor, end: int, file: int, flags: int, over: int = 0) -> None:
    """Puts `file` behind the addresses `over` to `end` of `memory`, in place of what was there. Raises OSError."""
    libc = _libc()
    libc.mmap.restype = ctypes.c_void_p
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags |= 0x10 | _MAP_NORESERVE  # MAP_FIXED
    at = _address(memory, over)
    if end > over and libc.mmap(at, ctypes.c_size_t(end - over), protection, flags, file, ctypes.c_long(0)) != at.value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _advise(memory: Tensor, start: int, end: int, advice: int) -> None:
    """Of the bytes `start` to `end`. Raises OSError."""
    if _libc().madvise(_address(memory, start), ctypes.c_size_t(end - start), advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _address(memory: Tensor, offset: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(memory.data_ptr() + offset)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
