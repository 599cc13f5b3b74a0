"""Sentencepiece vocabularies with byte fallback (Llama 2, Mistral, Gemma): tokens are text, rare characters bytes.

`tokenizers` decodes them by Replace(▁ → space), ByteFallback, Fuse and, for some, Strip of the first space. A run of
byte tokens is UTF-8 as a whole or U+FFFD for each of its bytes. Here the characters of a run are delivered as they
are complete, not at the run's end (a newline is a byte token, a text in a rare script one long run); so where a run
breaks later, what was delivered of it stays, and only the rest becomes U+FFFD. That is the one difference.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from tokenizers import Tokenizer

from services.detokenizer.core.text import (
    REPLACEMENT,
    TokenSpelling,
    fallback_byte,
    hidden_tokens,
    is_continuation,
    token_piece,
)


class PieceTable(dict[int, str | bytes | None]):
    """Token to text, to a single byte, or to None where it is hidden or unknown. Filled as tokens are met."""

    def __init__(self, tokenizer: Tokenizer, space: str, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._space = space
        self._hidden = hidden

    def __missing__(self, token: int) -> str | bytes | None:
        piece = None if token in self._hidden else token_piece(self._tokenizer, token)
        if piece is None:
            return None
        piece = piece.replace(self._space, " ")
        byte = fallback_byte(piece)
        self[token] = piece if byte is None else byte
        return self[token]


class ByteFallbackStream:
    """Owns the bytes of one output's present run that are no whole character yet, and whether that run is UTF-8."""

    __slots__ = ("_broken", "_pending", "_strip", "_table")

    def __init__(self, table: PieceTable, strip: int) -> None:
        self._table = table
        self._pending = b""
        self._broken = False
        """Whether the present run of bytes is no UTF-8."""
        self._strip = strip
        """Leading spaces that would still be dropped."""

    def push(self, token: int) -> str:
        """The text that this token completes."""
        piece = self._table[token]
        if type(piece) is str:
            text = self._end_run() + piece if self._pending or self._broken else piece
        elif piece is None:
            return ""
        else:
            text = self._add_byte(piece)  # type: ignore[arg-type]
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        """The rest, now that nothing follows: U+FFFD for each byte of a character that is not whole."""
        return self._end_run()

    def _add_byte(self, byte: bytes) -> str:
        if self._broken:
            return REPLACEMENT
        self._pending += byte
        try:
            text, used = utf_8_decode(self._pending, "strict", False)
        except UnicodeDecodeError:
            self._broken = True
            text, used = REPLACEMENT * len(self._pending), len(self._pending)
        self._pending = self._pending[used:]
        return text

    def _end_run(self) -> str:
        text = REPLACEMENT * len(self._pending)
        self._pending = b""
        self._broken = False
        return text

    def _stripped(self, text: str) -> str:
        kept = text
        while self._strip and kept.startswith(" "):
            kept = kept[1:]
            self._strip -= 1
        if kept:
            self._strip = 0
        return kept


class ByteFallbackVocabulary:
    """The TextVocabulary of tokenizers with byte fallback. `space`: the mark that means a space; `strip`: how many
    spaces at the very beginning of a text are dropped."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int], space: str, strip: int) -> None:
        hidden = hidden_tokens(tokenizer, special)
        self._tables = {key: PieceTable(tokenizer, space, ids) for key, ids in hidden.items()}
        self._strip = strip

    def open(
        self, context: Sequence[int], *, begins: bool, skip_special_tokens: bool, keep_markup: bool = False
    ) -> ByteFallbackStream:
        """Opens a stream; see `TextVocabulary.open`."""
        table = self._tables[skip_special_tokens, keep_markup]
        stream = ByteFallbackStream(table, self._strip if begins else 0)
        start = 0
        if not begins:
            # The context may have been cut within a character: half of one would break the whole run.
            while start < len(context) and _is_continuation(table[context[start]]):
                start += 1
        for token in context[start:]:
            stream.push(token)
        return stream

    def spelling(self, token: int) -> TokenSpelling:
        """The text and bytes of one token; see `TextVocabulary.spelling`."""
        piece = self._tables[False, False][token]
        if isinstance(piece, bytes):
            return TokenSpelling(piece.decode(errors="replace"), piece)
        return TokenSpelling(piece or "", (piece or "").encode())


def _is_continuation(piece: str | bytes | None) -> bool:
    return isinstance(piece, bytes) and is_continuation(piece)
