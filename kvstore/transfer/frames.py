"""What stores say to each other over the TCP transport, beside payloads: frames of a length and a message. No sockets.

    prefix    8 bytes: `MAGIC`, length of the message
    message   MessagePack, one of `Frame`; fields that a later release appends have defaults
    payloads  behind `BlocksFollow` only: so many bytes for each of its blocks, one block after the other

A fetch is one `FetchBlocks`, then any number of `BlocksFollow`, then a `FetchEnd`; then the connection may be used for
another. Whoever reads checks every length against a limit before it takes memory.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.blocks import HASH_BYTES, BlockHash, split_hashes
from shared.packing import NOT_DECODED

MAGIC = b"BKV1"
"""Another number, when frames change such that an older store would not understand them."""
PREFIX = struct.Struct("<4sI")
MAX_FRAME_BYTES = 2**21
"""Of a message: 65,536 hashes, or the checksums of as many blocks as are sent at a time."""
MAX_GROUP_BLOCKS = 32

PackedHash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class BadFrame(Exception):
    """What came is no frame, or not one that belongs there; the text says why."""


class FetchBlocks(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """receiver → sender: the leading run of these blocks that is there."""

    layout: Annotated[str, Meta(max_length=64)]
    hashes: Annotated[bytes, Meta(min_length=HASH_BYTES)]
    """16 bytes each, in the order of the chain."""
    patience: Annotated[float, Meta(ge=0.0)] = 0.0
    """Seconds that each block is waited for that is not there yet."""

    def names(self) -> list[BlockHash]:
        """The hashes. Raises BadFrame where the last one is not whole."""
        if len(self.hashes) % HASH_BYTES:
            raise BadFrame(f"{len(self.hashes)} bytes of hashes")
        return list(split_hashes(self.hashes))


class BlockHead(Struct, frozen=True, array_like=True):
    """What names one block, and by what its payload is verified."""

    hash: PackedHash
    parent: PackedHash
    tokens: Annotated[int, Meta(ge=1, le=255)]
    checksums: bytes
    """8 bytes for each cell."""


class BlocksFollow(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """sender → receiver: the next blocks of the run; their payloads come right behind this frame."""

    blocks: Annotated[tuple[BlockHead, ...], Meta(min_length=1, max_length=MAX_GROUP_BLOCKS)]
    payload_bytes: Annotated[int, Meta(ge=1)]
    """Of each block."""
    waited: bool = False
    """Whether the sender waited for the first of them to be committed."""


class FetchEnd(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """sender → receiver: no more blocks come."""

    refused: Annotated[str, Meta(max_length=64)] = ""
    """Why there were none, as in `FetchRefused.reason`; empty where the run has ended."""


Frame = FetchBlocks | BlocksFollow | FetchEnd

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode_frame(message: Frame) -> bytes:
    """Prefix and message. Raises BadFrame where it is longer than a receiver takes."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"{type(message).__name__} of {len(body)} bytes, {MAX_FRAME_BYTES} are allowed")
    return PREFIX.pack(MAGIC, len(body)) + body


def body_length(prefix: bytes | bytearray) -> int:
    """Bytes of the message behind this prefix. Raises BadFrame."""
    magic, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise BadFrame(f"begins with {magic!r}, not {MAGIC!r}")
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"{length} bytes, {MAX_FRAME_BYTES} are allowed")
    return int(length)


def decode_frame(body: bytes | bytearray) -> Frame:
    """The message. Raises BadFrame."""
    try:
        return _decoder.decode(body)
    except NOT_DECODED as error:
        raise BadFrame(str(error)) from None
