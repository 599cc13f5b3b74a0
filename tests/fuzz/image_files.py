"""Files of images, spoilt behind their headers: with right checksums and lengths, so that decoders get to them."""

from __future__ import annotations

import random
import struct
import zlib
from typing import NamedTuple

from tests.fuzz.mutations import spoilt_bytes
from tests.support.models.tiny_images import picture

PNG_HEAD = b"\x89PNG\r\n\x1a\n"
KINDS = (
    *(("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "L"), ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK")),
    *(("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P")),
)
SIZES = (0, 1, 2, 7, 40, 255, 256, 65_535)
TAGS = (b"gAMA", b"tRNS", b"PLTE", b"eXIf", b"iCCP", b"zTXt", b"iTXt", b"acTL", b"fcTL", b"fdAT", b"sRGB", b"cHRM")
"""Of chunks that a PNG may have beside its own."""


class Part(NamedTuple):
    """A chunk of a PNG or of a WebP, or a segment of a JPEG."""

    name: bytes
    content: bytes


def valid_files() -> list[bytes]:
    """Of each kind that is decoded, with and without what is optional in it."""
    plain = [picture(seed, kind=kind, mode=mode) for seed, (kind, mode) in enumerate(KINDS) if mode != "CMYK"]
    large = {"size": (97, 61), "exif": EXIF}
    return [
        *plain,
        picture(21, kind="PNG", mode="RGB", compress_level=0),
        picture(22, kind="JPEG", mode="CMYK", quality=40),
        picture(23, kind="JPEG", mode="RGB", progressive=True, **large),
        picture(24, kind="WEBP", mode="RGB", lossless=True, **large),
        picture(25, kind="PNG", mode="RGB", **large),
    ]


EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
"""That asks to be turned by a quarter."""


def spoilt(files: list[bytes], rng: random.Random) -> bytes:
    """A file of which something is changed: mostly behind what says what it is."""
    file = rng.choice(files)
    if rng.random() < 0.15:
        return spoilt_bytes(file, rng) if rng.random() < 0.7 else file[: rng.randrange(len(file))]
    for _ in range(rng.choice((1, 1, 2, 4))):
        if file.startswith(PNG_HEAD):
            file = _png(file, rng)
        elif file.startswith(b"\xff\xd8"):
            file = _jpeg(file, rng)
        elif file.startswith(b"RIFF"):
            file = _webp(file, rng)
        else:
            file = _behind(file, 13, rng)
    return file


def _behind(data: bytes, start: int, rng: random.Random) -> bytes:
    return data[:start] + spoilt_bytes(data[start:], rng)


def _changed(parts: list[Part], rng: random.Random, fixed: int = 1) -> list[Part]:
    """Parts of which one is spoilt, left out, doubled or moved; the first `fixed` stay."""
    if len(parts) <= fixed:
        return parts
    at = rng.randrange(fixed, len(parts))
    match rng.randrange(8):
        case 0:
            return parts[:at] + parts[at + 1 :]
        case 1:
            return [*parts[: at + 1], *parts[at:]]
        case 2:
            return [*parts[:at], *parts[at + 1 :], parts[at]]
        case _:
            return [*parts[:at], Part(parts[at].name, spoilt_bytes(parts[at].content, rng)), *parts[at + 1 :]]


def _png(file: bytes, rng: random.Random) -> bytes:
    parts, at = list[Part](), len(PNG_HEAD)
    while at + 8 <= len(file):
        size = int.from_bytes(file[at : at + 4], "big")
        parts.append(Part(file[at + 4 : at + 8], file[at + 8 : at + 8 + size]))
        at += 12 + size
    head = bytearray(parts[0].content.ljust(13, b"\0"))
    match rng.randrange(6):
        case 0:  # sizes, depth, type of colours, interlacing
            head[rng.choice((3, 7))] = rng.choice(SIZES) % 256
        case 1:
            head[8:13] = bytes((rng.choice((1, 2, 4, 8, 16)), rng.choice((0, 2, 3, 4, 6)), 0, 0, rng.randrange(2)))
        case 2:
            name, content = rng.choice(TAGS), rng.randbytes(rng.randrange(40))
            packed = b"name\0\0" + zlib.compress(rng.choice((content, bytes(2**22))))
            parts.insert(rng.randrange(1, len(parts) + 1), Part(name, rng.choice((content, packed, EXIF[6:]))))
        case 3:
            parts = [_repacked(part, rng) if part.name == b"IDAT" else part for part in parts]
        case _:
            parts = _changed(parts, rng)
    parts[0] = Part(b"IHDR", bytes(head))
    written = [
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in parts
    ]
    return PNG_HEAD + b"".join(written)


def _repacked(part: Part, rng: random.Random) -> Part:
    """Rows that were spoilt and packed again, so that the stream of deflated data is right."""
    try:
        rows = zlib.decompress(part.content)
    except zlib.error:
        return part
    return Part(part.name, zlib.compress(spoilt_bytes(rows, rng)))


def _jpeg(file: bytes, rng: random.Random) -> bytes:
    parts, at, scan = list[Part](), 2, b""
    while at + 4 <= len(file) and file[at] == 0xFF:
        name, size = file[at : at + 2], int.from_bytes(file[at + 2 : at + 4], "big")
        parts.append(Part(name, file[at + 4 : at + 2 + size]))
        at += 2 + size
        if name == b"\xff\xda":
            scan = file[at:]
            break
    if rng.random() < 0.4:
        scan = spoilt_bytes(scan, rng)
    else:
        parts = _changed(parts, rng)
    written = [name + struct.pack(">H", min(len(content) + 2, 65_535)) + content for name, content in parts]
    return b"\xff\xd8" + b"".join(written) + scan


def _webp(file: bytes, rng: random.Random) -> bytes:
    parts, at = list[Part](), 12
    while at + 8 <= len(file):
        size = int.from_bytes(file[at + 4 : at + 8], "little")
        parts.append(Part(file[at : at + 4], file[at + 8 : at + 8 + size]))
        at += 8 + size + size % 2
    if len(parts) == 1:
        name, content = parts[0]
        parts = [Part(name, _behind(content, min(len(content), rng.choice((0, 5, 10))), rng))]
    else:
        parts = _changed(parts, rng, fixed=0)
    written = [name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2) for name, content in parts]
    body = b"WEBP" + b"".join(written)
    return b"RIFF" + struct.pack("<I", len(body)) + body
