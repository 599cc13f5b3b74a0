"""JSON of answers that may be large, made in turns with all else that an event loop has to do: the log-probabilities of
128 choices took it seconds, in which no other client got a token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from shared.packing import TOKEN_BYTES, unpack

TURN_SECONDS = 0.005
"""After which others have their turn."""
SLICE = 4096
"""Items of a long array that are encoded at once: token ids or texts, 0.5 ms of them."""

_encode = msgspec.json.Encoder().encode
_decode_texts = msgspec.msgpack.Decoder(list[str]).decode


class LazyArray:
    """A JSON array whose items are made as they are encoded, one by one; each may have such arrays in it."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        """`items` are gone through once."""
        self.items = items


class JsonSlices:
    """A JSON array of the items of others, one behind the other."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: Iterable[bytes]) -> None:
        """`arrays`: the JSON of each, none of them empty; they are gone through once."""
        self.arrays = arrays


def text_slices(slices: Iterable[bytes]) -> JsonSlices:
    """Returns an array of the texts in MessagePack's arrays of them."""
    return JsonSlices(_encode(_decode_texts(each)) for each in slices)


def packed_slices(packed: bytes) -> JsonSlices:
    """Returns an array of packed token ids: as Python's numbers a million of them would take 40 MB and 0.2 s."""
    size = SLICE * TOKEN_BYTES
    return JsonSlices(_encode(unpack(packed[start : start + size])) for start in range(0, len(packed), size))


MAYBE_LAZY = (dict, list, tuple, LazyArray, JsonSlices)


class LazyEncoder:
    """Encodes one value; owns since when it has had its turn."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def encode(self, value: Any) -> bytes:
        """Returns the JSON of a value. Lazy arrays are looked for in objects and in each other, not in other arrays."""
        return _encode(await self._plain(value))

    async def _plain(self, value: Any) -> Any:
        """The value, with the JSON of their items in place of lazy and long arrays."""
        match value:
            case JsonSlices():
                return [await self._turn(each[1:-1]) for each in value.arrays]  # these have their commas
            case dict():
                return {
                    name: await self._plain(each) if isinstance(each, MAYBE_LAZY) else each
                    for name, each in value.items()
                }
            case LazyArray():
                return [await self._turn(await self.encode(item)) for item in value.items]
            case list() | tuple() if len(value) > SLICE:
                slices = (value[start : start + SLICE] for start in range(0, len(value), SLICE))
                return await self._plain(JsonSlices(map(_encode, slices)))
            case _:
                return value

    async def _turn(self, made: bytes) -> msgspec.Raw:
        """What was made, once others had their turn, if it is theirs."""
        if time.monotonic() > self._since + TURN_SECONDS:
            await asyncio.sleep(0)
            self._since = time.monotonic()
        return msgspec.Raw(made)
