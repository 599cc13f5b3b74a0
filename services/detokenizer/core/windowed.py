"""Any other vocabulary (wordpiece, metaspace, ...): decode a short window again for each token, deliver the new end.

The scheme of TGI and vLLM: what a decoder does with a token may depend on its neighbours, so the window begins with
tokens whose text is out already, and the difference to that text is new. Constant work for each token.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from services.detokenizer.core.text import REPLACEMENT, Spelling, fallback_byte, goes_on, spelled, without_markup

MOST_PENDING = 8
"""Tokens that may wait for the end of a character. None has more than 4 bytes; what still ends in U+FFFD then is it."""


class WindowedStream:
    __slots__ = ("_delivered", "_hidden", "_ids", "_prefix", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], anchors: list[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids = anchors
        self._delivered = len(anchors)
        """How many of `_ids` have had their text delivered; it is `_prefix`."""
        self._prefix = self._decode(anchors)

    def push(self, token: int) -> str:
        if token in self._hidden or spelled(self._tokenizer, token) is None:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._delivered < MOST_PENDING:
            return ""
        return self._deliver(text)

    def flush(self) -> str:
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
    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._unmarked = without_markup(tokenizer, special)
        ordinary = (i for i in range(tokenizer.get_vocab_size()) if i not in special)
        # A token to stand before others, so that they are not taken for the beginning of a text.
        self._anchor = [next((i for i in ordinary if tokenizer.decode([i]).isalnum()), 0)]

    def open(
        self, context: Sequence[int], *, begins: bool, skip_special_tokens: bool, keep_markup: bool = False
    ) -> WindowedStream:
        skipped = self._unmarked if keep_markup else self._special
        hidden = skipped if skip_special_tokens else frozenset()
        stream = WindowedStream(self._tokenizer, hidden, [] if begins else list(self._anchor))
        start = 0
        if not begins:
            # The context may have been cut within a character: half of one would break a run of bytes.
            while start < len(context) and self._goes_on(context[start]):
                start += 1
        for token in context[start:]:
            stream.push(token)
        return stream

    def _goes_on(self, token: int) -> bool:
        piece = spelled(self._tokenizer, token)
        return piece is not None and goes_on(fallback_byte(piece))

    def spelling(self, token: int) -> Spelling:
        if spelled(self._tokenizer, token) is None:
            return Spelling("", b"")
        before = self._tokenizer.decode(self._anchor, skip_special_tokens=False)
        text = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)[len(before) :]
        return Spelling(text, text.encode())
