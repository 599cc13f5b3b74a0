"""Tokens to text, one at a time: what every kind of vocabulary promises.

The promise: the text of a stream is what `tokenizer.decode` adds for the output tokens behind their context. A
character is delivered once it is complete, never before; bytes that are no UTF-8 become U+FFFD as soon as that is
certain, at the latest at the end.

`tokenizers.decoders.DecodeStream` (0.23) was measured and left: it has no end (a text that ends within a character
never comes out whole), raises where a run of byte tokens is no UTF-8, and costs 0.6 to 3 µs a token where the tables
here cost 0.2 to 0.4. Only for the general kind of vocabulary, which decodes a window, is it faster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer

from shared.messages.dialects import MARKUP_TOKENS

REPLACEMENT = "\ufffd"


class TokenSpelling(NamedTuple):
    """A token on its own: its text (U+FFFD where it is part of a character), and its exact bytes."""

    text: str
    raw: bytes


def token_piece(tokenizer: Tokenizer, token: int) -> str | None:
    """A token as the vocabulary spells it; None for a number that is no token of it, however large."""
    return tokenizer.id_to_token(token) if 0 <= token < 2**32 else None


def hidden_tokens(tokenizer: Tokenizer, special: frozenset[int]) -> dict[tuple[bool, bool], frozenset[int]]:
    """The tokens that have no text, by (skip_special_tokens, keep_markup): none, all special ones, or those of them
    that are no mark of tool calls and thoughts."""
    markup = {tokenizer.token_to_id(token) for token in MARKUP_TOKENS}
    hidden: dict[tuple[bool, bool], frozenset[int]] = {(True, False): special, (True, True): special - markup}
    return {(False, False): frozenset(), (False, True): frozenset(), **hidden}


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTINUATION = range(0x80, 0xC0)


def fallback_byte(piece: str) -> bytes | None:
    """The byte that a byte token of a vocabulary with byte fallback means; None for all other tokens."""
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else None


def is_continuation(byte: bytes | None) -> bool:
    """Whether this is a byte of UTF-8 that continues a character and begins none; False for None."""
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
        """A stream of the output behind `context`: the last tokens of the prompt, or all of them where `begins`.
        `keep_markup`: of special tokens, marks of tool calls and thoughts are not skipped."""

    def spelling(self, token: int) -> TokenSpelling:
        """The token on its own, as log-probabilities show it; empty for what is no token."""
