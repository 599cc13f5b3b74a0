"""Reads safetensors files by ranges of bytes, straight to where the tensors are to lie.

A file is not mapped: out of the page cache, reads into memory that is there already are four times as fast as touching
a mapping page by page (6.0 against 1.5 GB/s, a copy in memory making 5.3), and a mapping would keep pages resident.
Several threads read at once. On the way to a GPU each has a page-locked buffer and a stream of its own, so that the
disk, the host's memory and the bus work beside each other.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

_CHUNK = 16 << 20
"""Most bytes read at once: far more than what a call costs."""
_MIN_CHUNK = 1 << 20
"""Smaller pieces are not shared out among threads, and larger ones are not read without a rest."""
_THREADS = 8
_GAP = 64 << 10
"""Bytes that are rather read and forgotten than left out."""
_PIECES_AT_ONCE = 256
_LENGTH_BYTES = 8

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # exponents of two plus 127, as others write them
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFileError(Exception):
    """The file is missing, broken or of a kind that cannot be read."""


class TensorHeader(Struct, frozen=True):
    """A tensor as the header of a safetensors file describes it (https://huggingface.co/docs/safetensors)."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Bytes behind the header: the first, and the one behind the last."""


class FileHeader(NamedTuple):
    """What a safetensors file says of its tensors."""

    start: int
    """Byte of the file at which their elements begin."""
    tensors: dict[str, TensorHeader]


def read_header(path: Path) -> FileHeader:
    """Raises TensorFileError where the file is missing, no safetensors file, or not as its header says: every tensor
    lies in it, in as many bytes as its shape takes, none over another, and nothing else does."""
    try:
        with safe_open(str(path), framework="pt"):
            pass  # the library checks it
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(each, type=TensorHeader) for name, each in raw.items()}
    except (OSError, SafetensorError, msgspec.MsgspecError, RuntimeError, MemoryError) as error:
        # The last two where it cannot be mapped.
        damaged = "; is it damaged, or not fetched to its end?" if isinstance(error, SafetensorError) else ""
        raise TensorFileError(f"{path}: {error}{damaged}") from None
    return FileHeader(_LENGTH_BYTES + length, tensors)


class StoredTensor(NamedTuple):
    """Where in which file a tensor lies."""

    file: int
    """File descriptor."""
    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class StoredPart(NamedTuple):
    """A tensor, or a range of its first and of its second dimension."""

    tensor: StoredTensor
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    @property
    def shape(self) -> list[int]:
        """The shape of the part."""
        shape = list(self.tensor.shape)
        for dimension, part in enumerate((self.rows, self.columns)):
            if part is not None:
                shape[dimension] = part[1] - part[0]
        return shape


class _Runs(NamedTuple):
    """Pieces of a file, as far from each other as `stride`, that lie side by side once they are read."""

    offset: int
    target: int
    length: int
    repeats: int
    stride: int


class TensorFiles:
    """Owns open files, the threads that read them, and what those need. Used from one thread."""

    def __init__(self, device: torch.device, rest: Callable[[], None] | None = None) -> None:
        """`rest`: called behind each piece by whoever reads in main memory, on its own thread, beside other work; None:
        several threads read at a time."""
        self._device = device
        self._rest = rest
        self._files = ExitStack()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights", initializer=self._enter)
        self._lanes = threading.local()
        self.bytes_read = 0
        self.seconds_reading = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._files.close()

    def open(self, path: Path) -> dict[str, StoredTensor]:
        """The tensors of a file, by name. Raises TensorFileError."""
        header = read_header(path)
        try:
            file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise TensorFileError(f"{path}: {error}") from None
        self._files.callback(os.close, file)
        return {name: _stored(file, path, header.start, name, each) for name, each in header.tensors.items()}

    def read(
        self, tensor: StoredTensor, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> Tensor:
        """The tensor, or a range of its first or of its second dimension, on the device. Raises TensorFileError."""
        part = StoredPart(tensor, rows, columns)
        return self.read_together([part]).view(part.shape)

    def read_together(self, parts: Sequence[StoredPart]) -> Tensor:
        """The elements of tensors of one type, one behind the other, on the device: many small ones are read as fast
        as a large one. Raises TensorFileError."""
        begun = time.perf_counter()
        sizes = [math.prod(part.shape) for part in parts]
        read = torch.empty(sum(sizes), dtype=parts[0].tensor.dtype, device=self._device)
        self.bytes_read += read.nbytes
        pieces = [
            (target.view(torch.uint8), part.tensor, runs)
            for part, target in zip(parts, torch.split(read, sizes), strict=True)
            for runs in _runs(*part, _MIN_CHUNK if self._rest is not None else _CHUNK)
        ]
        if self._rest is not None:
            for piece in pieces:
                self._fill(*piece)
                self._rest()
            return read
        under_way = [self._threads.submit(self._fill, *piece) for piece in pieces[:-1]]
        for piece in pieces[-1:]:  # handing it over, too, costs more than reading it, on a busy machine
            self._fill(*piece)
        for done in under_way:
            done.result()
        self.seconds_reading += time.perf_counter() - begun
        return read

    def _enter(self) -> None:
        """On each thread: one begins with GPU 0, and goes back to it behind each use of another one's stream, which
        takes memory there for a context."""
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(self._device)

    @torch.inference_mode()
    def _fill(self, target: Tensor, tensor: StoredTensor, runs: _Runs) -> None:
        """On one of the threads."""
        part = target[runs.target : runs.target + runs.length * runs.repeats]
        if self._device.type == "cpu":
            _read(tensor, runs, memoryview(part.numpy().data))
            return
        if self._device.type != "cuda":
            buffer = torch.empty(len(part), dtype=torch.uint8)
            _read(tensor, runs, memoryview(buffer.numpy().data))
            part.copy_(buffer)
            return
        lane = self._lane()
        _read(tensor, runs, memoryview(lane.buffer.numpy().data)[: len(part)])
        # The memory may have been another tensor's until now.
        lane.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(lane.stream):
            part.copy_(lane.buffer[: len(part)], non_blocking=True)
        lane.stream.synchronize()

    def _lane(self) -> _GpuReader:
        if not hasattr(self._lanes, "own"):
            self._lanes.own = _GpuReader(self._device)
        lane: _GpuReader = self._lanes.own
        return lane


class _GpuReader:
    """One thread's way to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _stored(file: int, path: Path, start: int, name: str, entry: TensorHeader) -> StoredTensor:
    if entry.dtype not in _DTYPES:
        raise TensorFileError(f"{path}: tensor {name} has dtype {entry.dtype}; {', '.join(_DTYPES)} can be read")
    return StoredTensor(file, path, start + entry.data_offsets[0], _DTYPES[entry.dtype], entry.shape)


def _runs(
    tensor: StoredTensor, rows: tuple[int, int] | None, columns: tuple[int, int] | None, most: int = _CHUNK
) -> list[_Runs]:
    """What to read, in pieces of at most so many bytes, but whole rows of `columns`."""
    item = tensor.dtype.itemsize
    first, end = rows or (0, tensor.shape[0] if tensor.shape else 1)
    row = math.prod(tensor.shape[1:]) * item
    if columns is None:
        return _pieces(tensor.offset + first * row, 0, (end - first) * row, most)
    cell = math.prod(tensor.shape[2:]) * item
    length, begin = (columns[1] - columns[0]) * cell, tensor.offset + columns[0] * cell
    if length > most:
        starts = ((begin + at * row, (at - first) * length) for at in range(first, end))
        return [piece for offset, target in starts for piece in _pieces(offset, target, length, most)]
    step = most // max(1, length)
    return [
        _Runs(begin + at * row, (at - first) * length, length, min(step, end - at), row)
        for at in range(first, end, step)
    ]


def _pieces(offset: int, target: int, size: int, most: int) -> list[_Runs]:
    """So that all threads have a part of a matrix."""
    chunk = min(most, max(_MIN_CHUNK, -(-size // _THREADS)))
    return [_Runs(offset + at, target + at, min(chunk, size - at), 1, 0) for at in range(0, size, chunk)]


def _read(tensor: StoredTensor, runs: _Runs, buffer: memoryview) -> None:
    """Pieces that lie close to each other are read with what lies between them: a call costs more than some bytes."""
    gap = runs.stride - runs.length
    together = _PIECES_AT_ONCE if 0 < gap <= _GAP else 1
    between = memoryview(bytearray(gap if together > 1 else 0))
    for first in range(0, runs.repeats, together):
        pieces = []
        for number in range(first, min(first + together, runs.repeats)):
            pieces += [buffer[number * runs.length : (number + 1) * runs.length], between]
        _read_pieces(tensor, runs.offset + first * runs.stride, pieces[:-1])


def _read_pieces(tensor: StoredTensor, at: int, pieces: list[memoryview]) -> None:
    """One behind the other, from byte `at` on."""
    while pieces:
        got = os.preadv(tensor.file, pieces, at)
        if not got and any(map(len, pieces)):
            raise TensorFileError(f"{tensor.path} ends at byte {at}: it became shorter while it was read")
        at += got
        while pieces and got >= len(pieces[0]):
            got -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][got:]
