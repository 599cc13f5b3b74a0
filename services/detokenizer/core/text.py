"""Tokens to text, one at a time: what every kind of vocabulary promises.

The promise: the text of a stream is what `tokenizer.decode` adds for the output tokens behind their context. A
character is delivered once it is complete, never before; bytes that are no UTF-8 become U+FFFD as soon as that is
certain, at the latest at the end. `tokenizers.decoders.DecodeStream` was measured and left: it has no end (a text that
ends in U+FFFD never comes out whole), and costs 0.7 to 2 µs a token where the tables here cost 0.1 to 0.2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer

from shared.dialects import MARKUP_TOKENS

REPLACEMENT = "\ufffd"


class Spelling(NamedTuple):
    """A token on its own: its text (U+FFFD where it is part of a character), and its exact bytes."""

    text: str
    raw: bytes


def spelled(tokenizer: Tokenizer, token: int) -> str | None:
    """A token as the vocabulary spells it; None for what is no token of it, numbers beyond all vocabularies too."""
    return tokenizer.id_to_token(token) if 0 <= token < 2**32 else None


def without_markup(tokenizer: Tokenizer, special: frozenset[int]) -> frozenset[int]:
    """Those of the special tokens that are no mark of tool calls and thoughts."""
    return special - {tokenizer.token_to_id(token) for token in MARKUP_TOKENS}


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTINUATION = range(0x80, 0xC0)


def fallback_byte(piece: str) -> bytes | None:
    """The byte that a token of a vocabulary with byte fallback stands for; None for all other tokens."""
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else None


def goes_on(byte: bytes | None) -> bool:
    """Whether this byte goes on with a character and begins none."""
    return byte is not None and byte[0] in _CONTINUATION


class TextStream(Protocol):
    """Owns what is still undecided of one output: the bytes of a character that is not complete."""

    def push(self, token: int) -> str:
        """The text that this token completes; often its own, sometimes none."""

    def flush(self) -> str:
        """What the end of the output makes of the rest."""


class TextVocabulary(Protocol):
    """A tokenizer's way from tokens to text."""

    def open(
        self, context: Sequence[int], *, begins: bool, skip_special_tokens: bool, keep_markup: bool = False
    ) -> TextStream:
        """A stream behind `context` (the end of the prompt, or all of it where `begins`). `keep_markup`: no mark of
        tool calls and thoughts is skipped."""

    def spelling(self, token: int) -> Spelling: ...
