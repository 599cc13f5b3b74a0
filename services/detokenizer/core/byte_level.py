"""Byte-level vocabularies (GPT-2's alphabet: Llama 3, Qwen, Mistral's Tekken): each token is a string of bytes.

So the text is the UTF-8 of the bytes in a row, and a table from token to text or bytes is all there is to it.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from tokenizers import Tokenizer

from services.detokenizer.core.text import Spelling, spelled, without_markup
from shared.byte_alphabet import spelled_bytes


class ByteTable(dict[int, str | bytes]):
    """Token to text, or to bytes where they are not whole characters. Filled as tokens are met, so that a start
    costs nothing; bounded by the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __missing__(self, token: int) -> str | bytes:
        letters = None if token in self._hidden else spelled(self._tokenizer, token)
        if letters is None:
            return ""  # as `decode` does; not kept, as ids that are none have no bound
        raw = spelled_bytes(letters)
        try:
            self[token] = raw.decode()
        except UnicodeDecodeError:
            self[token] = raw
        return self[token]


class ByteLevelStream:
    __slots__ = ("_pending", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._pending = b""

    def push(self, token: int) -> str:
        piece = self._table[token]
        if not self._pending and type(piece) is str:
            return piece
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


class ByteLevelVocabulary:
    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._all = ByteTable(tokenizer, frozenset())
        self._ordinary = ByteTable(tokenizer, special)
        self._with_markup = ByteTable(tokenizer, without_markup(tokenizer, special))

    def open(
        self, context: Sequence[int], *, begins: bool, skip_special_tokens: bool, keep_markup: bool = False
    ) -> ByteLevelStream:
        stream = ByteLevelStream(self._table(skip_special_tokens, keep_markup))
        for token in context:
            stream.push(token)
        return stream

    def _table(self, skip_special_tokens: bool, keep_markup: bool) -> ByteTable:
        if not skip_special_tokens:
            return self._all
        return self._with_markup if keep_markup else self._ordinary

    def spelling(self, token: int) -> Spelling:
        piece = self._all[token]
        if isinstance(piece, str):
            return Spelling(piece, piece.encode())
        return Spelling(piece.decode(errors="replace"), piece)
