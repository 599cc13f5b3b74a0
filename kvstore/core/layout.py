"""Where everything lies in an arena: the one description that the store, its ranks and its other nodes share.

An arena is a file in shared memory, one for each `KvLayout`:

    file header   4,096 bytes: `FILE_HEADER`, then the layout as MessagePack
    slot headers  one after the other, `header_stride` bytes each
    payloads      one after the other from a page's start, `payload_stride` bytes each

A slot's payload is one block of tokens, C order, little endian:

    [kv_heads][layers][keys: [block_size][head_dim], values: [block_size][value_dim]]

Keys and values have as many elements each, but in latent attention: there the keys are a token's latent, the values the
rotated key that belongs to it.

Heads come first so that the heads of one rank are one run of bytes, whatever the tensor-parallel size: a rank of any
size writes and reads just its own, and nothing need be rearranged between engines of different sizes. A stage of a
pipeline writes and reads its layers of each head.

What one head has of one layer is a *cell*, number head * layers + layer of the block. A slot's header is `SLOT_HEADER`,
then one checksum for each cell: xxh3-64 over its bytes, 1 where that would be 0. The store is the only writer of
headers, but for the checksums: the rank that writes a cell's bytes writes its checksum afterwards. Reserving sets them
to 0, so that a commit sees whether every cell was written.

The state is written last and read first: one aligned 8-byte word, which x86-64 and arm64 store whole.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec
from msgspec import Struct

from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.messages.kvstore import KvLayout

PAGE = 4096
LINE = 64
"""Bytes of a cache line: two slots' headers share none."""

ARENA_MAGIC = b"BATONKV2"
FILE_HEADER = struct.Struct("<8sQQQQ")
"""MAGIC, arena id, slots, length of the layout that follows, and 0."""

SLOT_HEADER = struct.Struct("<QQ16s16sIIQ")
"""state, generation, hash, hash of the block before (zeros: none), tokens, 0, order of use (larger: more recent)."""
CHECKSUM = struct.Struct("<Q")


GENERATION_AT, HASH_AT, TOKENS_AT, USED_AT = 8, 16, 48, 56
"""Bytes into a slot's header. Its words are written whole, one at a time: the state, the generation, the order of use,
and the tokens together with the 0 behind them."""
WORD = 8

FREE, RESERVED, COMMITTED = 0, 1, 2

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


class UnknownDtype(ValueError):
    """A dtype that arenas cannot hold; the text names the supported ones."""


def fingerprint(layout: KvLayout) -> str:
    """The layout's name: equal for equal layouts, safe in file names and Redis keys."""
    values = msgspec.structs.astuple(layout)
    # Without what is as it always was: so that what was stored before there was a choice is still found.
    if layout.value_dim is None:
        values = values[:-1]
        if layout.block_size == DEFAULT_BLOCK_SIZE:
            values = values[:-1]
    return blake2b(msgspec.msgpack.encode(values), digest_size=12).hexdigest()


SUFFIX = ".arena"


def file_name(layout: KvLayout) -> str:
    """Name of the layout's arena in the store's directory."""
    return f"{fingerprint(layout)}{SUFFIX}"


class Geometry(Struct, frozen=True, kw_only=True):
    """Sizes and offsets within an arena file; offsets are bytes from the file's start."""

    cells: int
    """Number of cells of a block: KV heads × layers."""
    cell_bytes: int
    """Bytes of one KV head of one layer in one block."""
    key_bytes: int
    """Bytes of its keys, which come first."""
    slots: int
    """Number of blocks that the file holds."""
    header_stride: int
    """Bytes from one slot's header to the next."""
    payload_stride: int
    """Bytes from one slot's payload to the next: whole pages."""
    payloads_at: int
    """Offset of the first payload."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block, without the padding to a whole page."""
        return self.cells * self.cell_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.payloads_at + self.slots * self.payload_stride

    def header_at(self, slot: int) -> int:
        """Offset of a slot's header."""
        return PAGE + slot * self.header_stride

    def checksum_at(self, slot: int, cell: int) -> int:
        """Offset of the 8-byte checksum of one cell of a slot."""
        return self.header_at(slot) + LINE + cell * CHECKSUM.size

    def payload_at(self, slot: int, cell: int = 0) -> int:
        """Offset of one cell of a slot's payload."""
        return self.payloads_at + slot * self.payload_stride + cell * self.cell_bytes


def cell_bytes(layout: KvLayout) -> int:
    """Bytes of one KV head of one layer in one block. Raises UnknownDtype."""
    value_dim = layout.head_dim if layout.value_dim is None else layout.value_dim
    return _tokens_bytes(layout, layout.head_dim + value_dim)


def _tokens_bytes(layout: KvLayout, elements: int) -> int:
    """Of a block's tokens, with so many elements each."""
    if layout.dtype not in ITEM_BYTES:
        raise UnknownDtype(f"dtype {layout.dtype!r}: {', '.join(ITEM_BYTES)} are known")
    return layout.block_size * elements * ITEM_BYTES[layout.dtype]


def geometry(layout: KvLayout, slots: int) -> Geometry:
    """Sizes and offsets of an arena of `slots` blocks of `layout`. Raises UnknownDtype."""
    cells = layout.kv_heads * layout.layers
    per_cell = cell_bytes(layout)
    header_stride = LINE + _rounded(cells * CHECKSUM.size, LINE)
    return Geometry(
        cells=cells,
        cell_bytes=per_cell,
        key_bytes=_tokens_bytes(layout, layout.head_dim),
        slots=slots,
        header_stride=header_stride,
        payload_stride=_rounded(cells * per_cell, PAGE),
        payloads_at=_rounded(PAGE + slots * header_stride, PAGE),
    )


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
