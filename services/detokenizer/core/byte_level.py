"""Byte-level vocabularies (GPT-2's alphabet: Llama 3, Qwen, Mistral's Tekken): each token is a string of bytes.

So the text is the tokens' bytes decoded as UTF-8, and a table from token to text or bytes is all that is needed.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from tokenizers import Tokenizer

from services.detokenizer.core.text import TokenSpelling, hidden_tokens, token_piece
from shared.models.byte_alphabet import spelled_bytes


class ByteTable(dict[int, str | bytes]):
    """Token to text, or to bytes where they are not whole characters. Filled as tokens are met, so that a start
    costs nothing; bounded by the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __missing__(self, token: int) -> str | bytes:
        piece = "" if token in self._hidden else token_piece(self._tokenizer, token)
        if piece is None:
            return ""  # as `decode` does; not kept, as ids that are none have no bound
        raw = spelled_bytes(piece)
        try:
            self[token] = raw.decode()
        except UnicodeDecodeError:
            self[token] = raw
        return self[token]


class ByteLevelStream:
    """Owns the bytes at the end of one output that are no whole character yet."""

    __slots__ = ("_pending", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._pending = b""

    def push(self, token: int) -> str:
        """The text that this token completes; bytes that are no UTF-8 as U+FFFD."""
        piece = self._table[token]
        if not self._pending and type(piece) is str:
            return piece
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """The rest, now that nothing follows: U+FFFD for a character that is not whole, or nothing."""
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


class ByteLevelVocabulary:
    """The TextVocabulary of tokenizers whose decoder is `ByteLevel`."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tables = {key: ByteTable(tokenizer, ids) for key, ids in hidden_tokens(tokenizer, special).items()}

    def open(
        self, context: Sequence[int], *, begins: bool, skip_special_tokens: bool, keep_markup: bool = False
    ) -> ByteLevelStream:
        """Opens a stream; see `TextVocabulary.open`."""
        stream = ByteLevelStream(self._tables[skip_special_tokens, keep_markup])
        for token in context:
            stream.push(token)
        return stream

    def spelling(self, token: int) -> TokenSpelling:
        """The text and bytes of one token; see `TextVocabulary.spelling`."""
        piece = self._tables[False, False][token]
        if isinstance(piece, str):
            return TokenSpelling(piece, piece.encode())
        return TokenSpelling(piece.decode(errors="replace"), piece)
