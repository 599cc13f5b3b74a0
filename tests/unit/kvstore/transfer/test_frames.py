"""Frames of the TCP transport: what is written is read, and whatever else comes is refused before memory is taken."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from kvstore.transfer.frames import (
    MAX_FRAME_BYTES,
    MAX_GROUP_BLOCKS,
    PREFIX,
    BadFrame,
    BlockHead,
    BlocksFollow,
    FetchBlocks,
    FetchEnd,
    Frame,
    body_length,
    decode_frame,
    encode_frame,
)
from tests.fuzz.mutations import mutated

NAME, PARENT = b"n" * 16, b"p" * 16
HEAD = BlockHead(NAME, PARENT, 16, b"checksum" * 4)
FRAMES: list[Frame] = [
    FetchBlocks(layout="5eed", hashes=NAME + PARENT, patience=2.5),
    BlocksFollow(blocks=(HEAD, replace(HEAD, hash=PARENT)), payload_bytes=4096, waited=True),
    FetchEnd(),
    FetchEnd(refused="not_found"),
]
SHARE = 20_000


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_what_is_written_is_read(frame: Frame) -> None:
    written = encode_frame(frame)
    prefix, body = written[: PREFIX.size], written[PREFIX.size :]
    assert body_length(prefix) == len(body)
    assert decode_frame(body) == frame


def test_the_bytes_of_a_frame_are_those_that_other_releases_read() -> None:
    assert encode_frame(FRAMES[0]).hex() == (
        "424b56313d00000094ab4665746368426c6f636b73a435656564c420" + (NAME + PARENT).hex() + "cb4004000000000000"
    )


@pytest.mark.parametrize(
    ("prefix", "said"),
    [(b"GET / HT", "begins with b'GET '"), (PREFIX.pack(b"BKV1", MAX_FRAME_BYTES + 1), "are allowed")],
)
def test_a_prefix_that_is_none_or_announces_too_much_is_refused(prefix: bytes, said: str) -> None:
    with pytest.raises(BadFrame, match=said):
        body_length(prefix)


@pytest.mark.parametrize(
    "frame",
    [
        FetchBlocks(layout="x" * 65, hashes=NAME),
        FetchBlocks(layout="x", hashes=NAME[:15]),
        FetchBlocks(layout="x", hashes=NAME, patience=-1.0),
        BlocksFollow(blocks=(), payload_bytes=1),
        BlocksFollow(blocks=(HEAD,) * (MAX_GROUP_BLOCKS + 1), payload_bytes=1),
        BlocksFollow(blocks=(HEAD,), payload_bytes=0),
        BlocksFollow(blocks=(replace(HEAD, tokens=0),), payload_bytes=1),
        BlocksFollow(blocks=(replace(HEAD, tokens=256),), payload_bytes=1),
        BlocksFollow(blocks=(replace(HEAD, hash=NAME + b"n"),), payload_bytes=1),
        FetchEnd(refused="x" * 65),
    ],
)
def test_a_message_out_of_bounds_is_refused(frame: Frame) -> None:
    with pytest.raises(BadFrame):
        decode_frame(encode_frame(frame)[PREFIX.size :])


def test_hashes_that_are_not_whole_are_refused() -> None:
    with pytest.raises(BadFrame, match="17 bytes of hashes"):
        FetchBlocks(layout="x", hashes=NAME + b"n").names()


def test_what_is_too_long_for_a_frame_is_not_written() -> None:
    with pytest.raises(BadFrame, match="are allowed"):
        encode_frame(FetchBlocks(layout="x", hashes=bytes(MAX_FRAME_BYTES)))


def test_spoilt_frames_are_decoded_or_refused_by_name() -> None:
    rng = random.Random(1)
    bodies = [encode_frame(frame)[PREFIX.size :] for frame in FRAMES]
    refused = 0
    for number in range(SHARE):
        try:
            decode_frame(mutated(bodies[number % len(bodies)], rng))
        except BadFrame:
            refused += 1
    assert SHARE > refused > SHARE / 2
