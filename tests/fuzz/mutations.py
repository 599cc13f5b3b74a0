"""Bytes of valid messages, spoilt: flipped, cut and repeated bytes, and MessagePack whose parts have changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

NUMBERS = (0, -1, 1, 2**31, -(2**31) - 1, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, -1e308, 1e-320)
STRANGE = (float("nan"), float("inf"), -float("inf"))
TEXTS = ("", "\0", "a.b", "*", ">", "engine-1", " ", "é" * 200, "x" * 5000)
DEEP = 40


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """Returns `payload` with one to three mutations of its bytes or of its structure."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        payload = (_structure if rng.random() < 0.6 else spoilt_bytes)(payload, rng)
    return payload


def spoilt_bytes(payload: bytes, rng: random.Random) -> bytes:
    """Returns `payload` with some bytes flipped, replaced, missing or repeated, whatever they mean."""
    data = bytearray(payload) or bytearray(1)
    at = rng.randrange(len(data))
    match rng.randrange(6):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at] = rng.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xCB, 0xCF, 0xD3, 0xDC, 0xDD, 0xDF, 0xFF))
        case 2:
            del data[at:]
        case 3:
            del data[at : at + rng.randrange(1, 8)]
        case 4 if rng.random() < 0.02:
            data[at:at] = rng.choice((b"\x91", b"\xc1", b"[", b'{"a":')) * 5000
        case 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 8))
        case _:
            data += data[at:]
    return bytes(data)


def _structure(payload: bytes, rng: random.Random) -> bytes:
    try:
        value = msgspec.msgpack.decode(payload)
        return msgspec.msgpack.encode(changed(value, rng))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError, TypeError):
        return spoilt_bytes(payload, rng)  # it is spoilt already


def changed(value: Any, rng: random.Random) -> Any:
    """`value` with one part, at any depth, replaced."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:at]
            case 1:
                return value + value[at:]
            case 2:
                return value[:at] + value[at + 1 :]
            case _:
                return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: changed(value[key], rng)}
    return rng.choice(REPLACEMENTS)(value, rng)


def _nested(value: Any, _: random.Random) -> Any:
    for _ in range(DEEP):
        value = [value]
    return value


def _similar(value: Any, rng: random.Random) -> Any:
    """Another value of the same type: what a decoder cannot know to be wrong."""
    match value:
        case bool():
            return not value
        case int():
            return value + rng.choice((-1, 1, 7, 1000))
        case float():
            return value * rng.choice((-1.0, 0.0, 1e6))
        case str():
            return rng.choice(TEXTS)
        case bytes():
            return rng.choice((b"", value[:-1], value + b"\xff", rng.randbytes(len(value)), value * 3))
        case _:
            return None


REPLACEMENTS: tuple[Callable[[Any, random.Random], Any], ...] = (
    lambda _, rng: rng.choice(NUMBERS),
    lambda _, rng: rng.choice(STRANGE),
    lambda _, rng: rng.choice(TEXTS),
    lambda _, rng: rng.choice((None, True, False, b"", [], {}, [[]], {"a": 1})),
    lambda _, rng: rng.randbytes(rng.randrange(0, 40)),
    _nested,
    _similar,
    _similar,
    _similar,
)
