"""A spoilt GGUF file is found by its header, wherever it was cut."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from shared.models.gguf_header import GgufError, check_gguf


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def whole() -> bytes:
    """A file with a value of each form, two tensors, and an alignment of its own."""
    words = b"".join(map(text, ("a", "bc", "")))
    values = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("llama.context_length") + struct.pack("<IQ", 10, 4096),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + words,
        text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3),
        text("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 0, 2) + b"xy",
    ]
    tensors = [text(name) + struct.pack("<IQQIQ", 2, 4, 4, 0, 64 * n) for n, name in enumerate(("first", "second"))]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values + tensors)
    return header.ljust(-(-len(header) // 64) * 64, b"\0") + bytes(128)


def test_a_whole_file_passes_and_one_cut_before_its_last_tensor_does_not(tmp_path: Path) -> None:
    content, path = whole(), tmp_path / "model.gguf"
    path.write_bytes(content)
    check_gguf(path)
    begin = len(content) - 64  # of the last tensor, which is as long
    for end in range(begin):
        path.write_bytes(content[:end])
        with pytest.raises(GgufError, match=r"model\.gguf: (no GGUF file that can be read|cut short)"):
            check_gguf(path)


@pytest.mark.parametrize(
    ("at", "other", "said"),
    [
        (0, b"PK\3\4", "it begins with b'PK"),
        (4, struct.pack("<I", 9), "version 9"),
        (8, struct.pack("<Q", 2**60), "entries are in no model"),
        (24, struct.pack("<Q", 2**62), "before it is whole"),
        (52, struct.pack("<I", 77), "a value of type 77"),
        (56, struct.pack("<Q", 2**63), "goes on behind byte"),
    ],
)
def test_other_bytes_are_named(at: int, other: bytes, said: str, tmp_path: Path) -> None:
    content, path = bytearray(whole()), tmp_path / "model.gguf"
    content[at : at + len(other)] = other
    path.write_bytes(content)
    with pytest.raises(GgufError, match=said):
        check_gguf(path)
