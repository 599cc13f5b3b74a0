"""Which kind of vocabulary a tokenizer has, by its decoder; and the general kind, for decoders not known here.

The general kind (wordpiece, metaspace, ...) decodes a short window again for each token and delivers the new end, as
TGI and vLLM do: what a decoder does with a token may depend on its neighbours, so the window begins with tokens whose
text is out already, and the difference to that text is new. Constant work for each token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from services.detokenizer.core.byte_fallback import ByteFallbackVocabulary
from services.detokenizer.core.byte_level import ByteLevelVocabulary
from services.detokenizer.core.text import (
    REPLACEMENT,
    TextVocabulary,
    TokenSpelling,
    fallback_byte,
    hidden_tokens,
    is_continuation,
    token_piece,
)

MAX_PENDING = 8
"""Tokens that may wait for the end of a character. None has more than 4 bytes; what still ends in U+FFFD then is it."""


def text_vocabulary(tokenizer: Tokenizer, special: frozenset[int]) -> TextVocabulary:
    """The vocabulary of a tokenizer, by the kind of its decoder; the general kind for those not known here."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelVocabulary(tokenizer, special)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_plain_replace(steps[0]):
        if len(steps) == 3:
            return ByteFallbackVocabulary(tokenizer, special, steps[0]["pattern"]["String"], strip=0)
        if kinds[3:] == ["Strip"] and steps[3]["content"] == " " and steps[3]["stop"] == 0:
            return ByteFallbackVocabulary(tokenizer, special, steps[0]["pattern"]["String"], strip=steps[3]["start"])
    return WindowedVocabulary(tokenizer, special)


class WindowedStream:
    """Owns the window of one output: the tokens delivered last, and those behind them whose text is undecided."""

    __slots__ = ("_delivered", "_hidden", "_ids", "_prefix", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], anchors: list[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids = anchors
        self._delivered = len(anchors)
        """How many of `_ids` have had their text delivered; it is `_prefix`."""
        self._prefix = self._decode(anchors)

    def push(self, token: int) -> str:
        """The text that this token completes."""
        if token in self._hidden or token_piece(self._tokenizer, token) is None:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._delivered < MAX_PENDING:
            return ""
        return self._deliver(text)

    def flush(self) -> str:
        """The rest, now that nothing follows."""
        return self._deliver(self._decode(self._ids))

    def _deliver(self, text: str) -> str:
        new = text[len(self._prefix) :]
        # What was delivered last stays: it begins with a whole character, which a fixed number of tokens need not.
        self._ids = self._ids[self._delivered :] or self._ids
        self._delivered = len(self._ids)
        self._prefix = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class WindowedVocabulary:
    """The TextVocabulary of any tokenizer, by its own `decode`."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden_tokens(tokenizer, special)
        ordinary = (i for i in range(tokenizer.get_vocab_size()) if i not in special)
        # A token to put before others, so that they are not decoded as the beginning of a text.
        self._anchor = [next((i for i in ordinary if tokenizer.decode([i]).isalnum()), 0)]

    def open(
        self, context: Sequence[int], *, begins: bool, skip_special_tokens: bool, keep_markup: bool = False
    ) -> WindowedStream:
        """See TextVocabulary."""
        hidden = self._hidden[skip_special_tokens, keep_markup]
        stream = WindowedStream(self._tokenizer, hidden, [] if begins else list(self._anchor))
        start = 0
        if not begins:
            # The context may have been cut within a character: half of one would break a run of bytes.
            while start < len(context) and self._is_continuation(context[start]):
                start += 1
        for token in context[start:]:
            stream.push(token)
        return stream

    def _is_continuation(self, token: int) -> bool:
        piece = token_piece(self._tokenizer, token)
        return piece is not None and is_continuation(fallback_byte(piece))

    def spelling(self, token: int) -> TokenSpelling:
        """See TextVocabulary."""
        if token_piece(self._tokenizer, token) is None:
            return TokenSpelling("", b"")
        before = self._tokenizer.decode(self._anchor, skip_special_tokens=False)
        text = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)[len(before) :]
        return TokenSpelling(text, text.encode())


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _is_plain_replace(step: dict[str, Any]) -> bool:
    return "String" in step["pattern"] and step["content"] == " "
