"""Finds a spoilt GGUF file by its header alone, before anybody imports what reads the rest.

The format is that of ggml (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 20
"""Of values, of tensors, of a tensor's dimensions or name: a file that says more is spoilt."""
_MAX_DEPTH = 4
"""Of arrays in arrays."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


class GgufError(Exception):
    """The file is no GGUF file, or not a whole one."""


def check_gguf(path: Path) -> None:
    """Raises GgufError for a file that another kind of file's bytes are in, or that ends before its last tensor begins.
    What it does not find is for who reads it all."""
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            begins = _Header(file, size).last_tensor()
        except (EOFError, ValueError) as error:
            raise GgufError(f"{path}: no GGUF file that can be read: {error}") from None
    if begins > size:
        raise GgufError(f"{path}: cut short: its last tensor begins at byte {begins}, the file ends at {size}")


class _Header:
    """Owns the place in an open file that has been read up to."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def last_tensor(self) -> int:
        """The byte at which the last tensor begins. Raises ValueError, EOFError."""
        magic = self._file.read(len(_MAGIC))
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic!r}, not with {_MAGIC!r}")
        if (version := self._number("I")) not in _VERSIONS:
            raise ValueError(f"version {version}; 2 and 3 can be read")
        tensors, values = self._count(), self._count()
        alignment = _ALIGNMENT
        for _ in range(values):
            name = self._take(self._number("Q"))
            kind = self._number("I")
            if name == b"general.alignment" and kind == 4:
                alignment = self._number("I") or _ALIGNMENT
            else:
                self._skip(kind, _MAX_DEPTH)
        last = 0
        for _ in range(tensors):
            self._take(self._number("Q"))
            self._take(8 * self._number("I") + 4)  # its shape and type
            last = max(last, self._number("Q"))
        return -(-self._file.tell() // alignment) * alignment + last

    def _skip(self, kind: int, depth: int) -> None:
        """Passes a value of this type by."""
        if kind == _STRING:
            self._pass(self._number("Q"))
        elif kind == _ARRAY and depth:
            inner, count = self._number("I"), self._number("Q")
            if inner in _SIZES:
                self._pass(count * _SIZES[inner])
                return
            if count > self._size:
                raise ValueError(f"an array of {count} values")
            for _ in range(count):
                self._skip(inner, depth - 1)
        elif kind in _SIZES:
            self._pass(_SIZES[kind])
        else:
            raise ValueError(f"a value of type {kind}")

    def _count(self) -> int:
        count = self._number("Q")
        if count > _MAX_ENTRIES:
            raise ValueError(f"{count} entries are in no model")
        return count

    def _number(self, kind: str) -> int:
        number: int = struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]
        return number

    def _take(self, count: int) -> bytes:
        if count > _MAX_ENTRIES or len(taken := self._file.read(count)) < count:
            raise EOFError(f"its header ends at byte {min(self._size, self._file.tell())}, before it is whole")
        return taken

    def _pass(self, count: int) -> None:
        if self._file.tell() + count > self._size:
            raise EOFError(f"its header goes on behind byte {self._size}, where the file ends")
        self._file.seek(count, 1)
