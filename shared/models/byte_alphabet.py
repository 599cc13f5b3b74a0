"""GPT-2's alphabet: the letters in which byte-level vocabularies (Llama 3, Qwen, Tekken) spell bytes. Pure."""

from __future__ import annotations


def _alphabet() -> dict[int, int]:
    """The character of each byte, as a table for `str.translate` to Latin-1, whose characters are bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}


ALPHABET = _alphabet()
_LETTERS = frozenset(map(chr, ALPHABET))


def spelled_bytes(letters: str) -> bytes:
    """The bytes of a token as the vocabulary spells it; a token with letters outside the alphabet is UTF-8 text."""
    return letters.translate(ALPHABET).encode("latin-1") if _LETTERS.issuperset(letters) else letters.encode()
