"""Reads a tensor that `torch.save` wrote, without PyTorch, and without unpickling anything.

The file is a ZIP archive whose `data.pkl` says what the tensor is: a pickle, of which only those operations are
followed that a tensor's has. They make numbers, strings, tuples and the two calls below, which are noted and never
made. Sizes are checked before anything is read that could be large.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from typing import Any, NamedTuple

MAX_PICKLE_BYTES = 16 * 2**10
"""A tensor's has some 200 bytes."""
MAX_ENTRIES = 64
"""Of the archive; a tensor's has 7."""
MAX_DIRECTORY_BYTES = 64 * 2**10
MAX_DIMENSIONS = 8
MAX_DEPTH = 32
"""Values on the pickle's stack."""

_END = struct.Struct("<4sHHHHIIH")
"""The record at a ZIP archive's end, when it has no comment."""
_END64 = struct.Struct("<4sQHHIIQQQQ")
"""The one for long archives, before a locator of 20 bytes, which torch.save writes always."""
_REBUILD, _REBUILD_PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
_HOOKS = "collections OrderedDict"
ITEM_BYTES = {
    "torch DoubleStorage": 8,
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch BFloat16Storage": 2,
    "torch LongStorage": 8,
    "torch IntStorage": 4,
    "torch ShortStorage": 2,
    "torch CharStorage": 1,
    "torch ByteStorage": 1,
    "torch BoolStorage": 1,
}
DTYPES = {
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}


class NoSavedTensor(Exception):
    """It is not what `torch.save` makes of one tensor; the text says why."""


class SavedTensor(NamedTuple):
    """A dense tensor."""

    dtype: str
    """PyTorch's name of it."""
    shape: tuple[int, ...]
    data: bytes
    """Little-endian, row by row."""


class _Name(str):
    """A class or function that the pickle names: module and name."""

    __slots__ = ()


class _Storage(NamedTuple):
    kind: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def read_saved_tensor(file: bytes) -> SavedTensor:
    """Raises NoSavedTensor."""
    _check_directory(file)
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            return _read(archive, len(file))
    except (
        zipfile.BadZipFile,
        EOFError,
        OSError,
        RuntimeError,
        struct.error,
        ValueError,
        NotImplementedError,
    ) as error:
        raise NoSavedTensor(f"the archive cannot be read: {str(error)[:120]}") from None


def _check_directory(file: bytes) -> None:
    """So that nothing long is looked through: the archive's end says how much its directory holds."""
    if not file.startswith(b"PK\x03\x04") or len(file) < _END.size + 20 + _END64.size:
        raise NoSavedTensor("not a ZIP archive, as torch.save writes it")
    signature, _, _, _, entries, size, _, _ = _END.unpack(file[-_END.size :])
    if signature != b"PK\x05\x06":
        raise NoSavedTensor("the ZIP archive has no end, as torch.save writes it")
    if file[-_END.size - 20 : -_END.size - 16] == b"PK\x06\x07":  # zipfile believes that record
        (signature, *_, entries, size, _) = _END64.unpack(file[-_END.size - 20 - _END64.size : -_END.size - 20])
        if signature != b"PK\x06\x06":
            raise NoSavedTensor("the ZIP archive has no end, as torch.save writes it")
    if entries > MAX_ENTRIES or size > MAX_DIRECTORY_BYTES:
        raise NoSavedTensor(f"an archive of {entries} entries; one tensor has 7")


def _read(archive: zipfile.ZipFile, most: int) -> SavedTensor:
    """`most`: bytes that the archive's file has, and so its entries, which are not compressed."""
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

    def content(name: str, limit: int) -> bytes:
        entry = entries.get(name)
        if entry is None:
            raise NoSavedTensor(f"the archive has no {name}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > limit:
            raise NoSavedTensor(f"{name} is compressed, or longer than {limit} bytes")
        return archive.read(entry)

    if "byteorder" in entries and content("byteorder", 16) != b"little":
        raise NoSavedTensor("only little-endian numbers are read")
    tensor = _PickledTensor().read(content("data.pkl", MAX_PICKLE_BYTES))
    dtype, item = DTYPES[tensor.storage.kind], ITEM_BYTES[tensor.storage.kind]
    if tensor.stride != _contiguous(tensor.shape):
        raise NoSavedTensor("its rows do not follow each other in memory; save tensor.contiguous()")
    stored = content(f"data/{tensor.storage.key}", most)
    first, length = tensor.offset * item, math.prod(tensor.shape) * item
    if first + length > len(stored):
        raise NoSavedTensor(f"a tensor of shape {tensor.shape} has more than the {len(stored)} bytes that are there")
    return SavedTensor(dtype, tensor.shape, stored[first : first + length])


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


class _PickledTensor:
    """Follows one pickle's operations. Owns its stack and what the pickle remembers."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, pickle: bytes) -> _Tensor:
        """The tensor that the pickle ends with. Raises NoSavedTensor, and ValueError for what is no pickle."""
        for operation, argument, _ in pickletools.genops(pickle):
            try:
                self._follow(operation.name, argument)
            except (IndexError, KeyError, TypeError):
                raise NoSavedTensor(f"its pickle is broken at {operation.name}") from None
            if len(self._stack) > MAX_DEPTH:
                raise NoSavedTensor("its pickle holds more than a tensor")
        result = self._stack.pop() if self._stack else None
        if not isinstance(result, _Tensor):
            raise NoSavedTensor("something other than one tensor was saved")
        return result

    def _follow(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "GLOBAL":
                stack.append(_Name(argument))
            case "STACK_GLOBAL":
                named, module = stack.pop(), stack.pop()
                if not (isinstance(named, str) and isinstance(module, str)):
                    raise TypeError
                stack.append(_Name(f"{module} {named}"))
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                self._join(len(stack) - self._marks.pop())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._join(int(name[-1]))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_called(function, arguments))
            case _:
                raise NoSavedTensor(f"its pickle has {name}, which no tensor's has")

    def _join(self, count: int) -> None:
        if not 0 <= count <= len(self._stack):
            raise IndexError
        first = len(self._stack) - count
        self._stack[first:] = [tuple(self._stack[first:])]


def _storage(named: Any) -> _Storage:
    match named:
        case ("storage", _Name() as kind, str(key), str(), int()):
            if kind not in DTYPES:
                raise NoSavedTensor(f"numbers of {kind[:80].replace(' ', '.')} are not read")
            return _Storage(kind, key)
    raise NoSavedTensor("its pickle names no storage")


def _called(function: Any, arguments: Any) -> Any:
    """What a call of the pickle would make. Nothing is called."""
    match function, arguments:
        case (str(name), ()) if isinstance(function, _Name) and name == _HOOKS:
            return {}
        case (str(name), (_Tensor() as tensor, bool(), dict())) if (
            isinstance(function, _Name) and name == _REBUILD_PARAMETER
        ):
            return tensor
        case (str(name), (_Storage() as storage, int(offset), tuple(shape), tuple(stride), bool(), dict())) if (
            isinstance(function, _Name) and name == _REBUILD
        ):
            numbers = (offset, *shape, *stride)
            whole = all(type(number) is int and 0 <= number < 2**48 for number in numbers)
            if not whole or len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
                raise NoSavedTensor("its shape is none")
            return _Tensor(storage, offset, shape, stride)
    named = function.replace(" ", ".") if isinstance(function, _Name) else "something"
    raise NoSavedTensor(f"its pickle calls {named[:80]}; only one dense tensor is read")
