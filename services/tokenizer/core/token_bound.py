"""A lower bound on the number of tokens that a text becomes, found in a hundredth of the time that the tokens take.

Take any set of bytes, and the token of the vocabulary with the most of them, `most`. Where each byte of the text lies
in exactly one token, a text with `count` bytes of the set has at least `count / most` tokens. This holds for BPE over
bytes or with byte fallback, as nothing is dropped there or taken together as unknown, provided that

- pre-tokenizers only split, and post-processors only add;
- normalizers keep the bytes (a space may become `▁`), add some, or are NFC. Under NFC an ASCII character is lost only
  by composition with a character that is none, at most one for each; so their number is subtracted. All bytes together
  shrink to a quarter at worst;
- an added token that strips takes in white space without bound: then white space is in no set.

For WordPiece and Unigram there is no bound: a word or a run of any length may be one unknown token.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from unicodedata import normalize

from tokenizers import Tokenizer

from shared.models.byte_alphabet import ALPHABET, spelled_bytes

NFC_SHRINKS = 4
"""Upper bound of the factor by which NFC makes UTF-8 shorter: 3.5 for U+0390 from U+1FBE U+0308 U+0301."""
PIECE = 2**18
"""Characters that are counted at a time: other threads get their turn in between."""

WHITE = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0"
"""Bytes that white space, or a part of it, may consist of; those of longer white space are no ASCII."""
SETS = (
    b"abcdefghijklmnopqrstuvwxyz",
    b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    b"0123456789",
    b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    b" ",
    b"\t\n\r",
)
"""Only ASCII: bytes of other characters may become other bytes."""
SPLITTING = frozenset({"Split", "ByteLevel", "Digits", "Punctuation", "Metaspace"})


class ByteSet(NamedTuple):
    """A set of bytes, and the most of them in any token."""

    members: bytes
    most: int


class TokenBound:
    """What one token of a tokenizer can take in at most. Stateless, so any thread may use it."""

    def __init__(self, sets: tuple[ByteSet, ...], most_bytes: int | None, *, composes: bool) -> None:
        """`most_bytes`: of all kinds; None where white space is unbounded. `composes`: the normalizer is NFC."""
        self._sets, self._most_bytes, self._composes = sets, most_bytes, composes

    def at_least(self, text: str) -> int:
        """Returns a number of tokens that `text` has at least. Lone surrogates count as other characters do."""
        size = lost = 0
        counts = [0] * len(self._sets)
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            data = piece.encode("utf-8", "surrogatepass")
            size += len(data)
            if self._composes and not piece.isascii():
                lost += len(piece) - len(data.translate(None, bytes(range(128, 256))))
            for i, entry in enumerate(self._sets):
                counts[i] += len(data) - len(data.translate(None, entry.members))
        bounds = [-(-(count - lost) // entry.most) for count, entry in zip(counts, self._sets, strict=True)]
        if self._most_bytes is not None:
            bounds.append(-(-size // (self._most_bytes * (NFC_SHRINKS if lost else 1))))
        return max(0, *bounds)


def token_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """Returns the bound; None where none can be proven."""
    definition = json.loads(tokenizer.to_str())
    model, normalizers = definition["model"], _steps(definition["normalizer"], "normalizers")
    splitters = _steps(definition["pre_tokenizer"], "pretokenizers")
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if not all(map(_keeps_bytes, normalizers)) or not all(map(_only_splits, splitters)):
        return None
    over_bytes = any(step["type"] == "ByteLevel" for step in splitters)
    singles = list(map(chr, ALPHABET)) if over_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    if not (over_bytes or model.get("byte_fallback")) or any(single not in model["vocab"] for single in singles):
        return None
    added = definition["added_tokens"]
    tokens = [spelled_bytes(token) if over_bytes else token.replace("▁", " ").encode() for token in model["vocab"]]
    contents = {text for token in added for text in (token["content"], normalize("NFC", token["content"]))}
    tokens += [text.replace("▁", " ").encode() for text in contents]
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    sets = [ByteSet(members, max(1, *(_count(token, members) for token in tokens))) for members in SETS]
    sizes = [len(token) if over_bytes else len(token.encode()) for token in model["vocab"]]
    sizes += [len(text.encode()) for text in contents]
    return TokenBound(
        tuple(entry for entry in sets if not (strips and set(entry.members) & set(WHITE))),
        None if strips else max(sizes),
        composes=any(step["type"] == "NFC" for step in normalizers),
    )


def _steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a sequence, however nested."""
    if step is None:
        return []
    return [found for part in step[inner] for found in _steps(part, inner)] if step["type"] == "Sequence" else [step]


def _keeps_bytes(normalizer: dict[str, Any]) -> bool:
    match normalizer:
        case {"type": "NFC" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
        case _:
            return False


def _only_splits(step: dict[str, Any]) -> bool:
    return step["type"] in SPLITTING and step.get("behavior") != "Removed"


def _count(token: bytes, members: bytes) -> int:
    return len(token) - len(token.translate(None, members))
