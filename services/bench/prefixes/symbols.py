"""The units by which prompts are compared: tokens, words or characters, each as one code point of a `str`."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, Protocol

from tokenizers import Tokenizer

from services.bench.errors import BenchError
from services.bench.prefixes.prompt_files import BlockIds, FilePrompt, TokenIds

Unit = Literal["tokens", "words", "chars", "blocks"]
SYMBOLS = sys.maxunicode + 1


class Alphabet(Protocol):
    """The unit's name, and the conversion to symbols and back."""

    unit: Unit

    def encode(self, prompts: Sequence[FilePrompt]) -> list[str]:
        """Each prompt as a string of symbols. Raises BenchError if a prompt cannot be compared in this unit."""

    def decode(self, symbols: str) -> str:
        """The symbols as readable text."""


class CharacterAlphabet:
    """Symbols are the characters of text."""

    unit: Unit = "chars"

    def encode(self, prompts: Sequence[FilePrompt]) -> list[str]:
        """As `Alphabet` has it."""
        return [_text(prompt) for prompt in prompts]

    def decode(self, symbols: str) -> str:
        """As `Alphabet` has it."""
        return symbols


class WordAlphabet:
    """Owns the numbers of the words seen; what separates them is not compared."""

    unit: Unit = "words"

    def __init__(self) -> None:
        self._numbers = SymbolTable()

    def encode(self, prompts: Sequence[FilePrompt]) -> list[str]:
        """As `Alphabet` has it."""
        return [self._numbers.encode(_text(prompt).split()) for prompt in prompts]

    def decode(self, symbols: str) -> str:
        """As `Alphabet` has it."""
        return " ".join(map(str, self._numbers.decode(symbols)))


class TokenAlphabet:
    """Symbols are the ids of a tokenizer, special tokens in front included, or as a file gives them."""

    unit: Unit = "tokens"

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def encode(self, prompts: Sequence[FilePrompt]) -> list[str]:
        """As `Alphabet` has it."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and self._tokenizer is None:
            raise BenchError("a prompt of text among token ids: name a tokenizer")
        encoded = iter(self._tokenizer.encode_batch(texts) if self._tokenizer is not None and texts else ())
        return [_of_ids(next(encoded).ids if isinstance(prompt, str) else _ids(prompt)) for prompt in prompts]

    def decode(self, symbols: str) -> str:
        """As `Alphabet` has it."""
        ids = [ord(symbol) for symbol in symbols]
        return " ".join(map(str, ids)) if self._tokenizer is None else str(self._tokenizer.decode(ids))


class BlockAlphabet:
    """Symbols are the hashes of blocks that a trace has in place of its prompts."""

    unit: Unit = "blocks"

    def __init__(self) -> None:
        self._numbers = SymbolTable()

    def encode(self, prompts: Sequence[FilePrompt]) -> list[str]:
        """As `Alphabet` has it."""
        if not all(isinstance(prompt, BlockIds) for prompt in prompts):
            raise BenchError("a prompt among block hashes: a file holds the one or the other")
        return [self._numbers.encode(prompt.ids) for prompt in prompts if isinstance(prompt, BlockIds)]

    def decode(self, symbols: str) -> str:
        """As `Alphabet` has it."""
        return " ".join(map(str, self._numbers.decode(symbols)))


class SymbolTable:
    """Numbers items in the order in which they first occur. Raises BenchError beyond as many as there are code
    points."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, str] = {}
        self._seen: list[Hashable] = []

    def encode(self, items: Iterable[Hashable]) -> str:
        """A symbol for each item, new ones for what was not seen before."""
        return "".join([self._numbers.get(item) or self._new(item) for item in items])

    def decode(self, symbols: str) -> list[Hashable]:
        """The items of the symbols."""
        return [self._seen[ord(symbol)] for symbol in symbols]

    def _new(self, item: Hashable) -> str:
        if len(self._seen) == SYMBOLS:
            raise BenchError(f"more than {SYMBOLS} different words: compare by characters or by a tokenizer")
        self._numbers[item] = chr(len(self._seen))
        self._seen.append(item)
        return self._numbers[item]


def _text(prompt: FilePrompt) -> str:
    if not isinstance(prompt, str):
        raise BenchError("a prompt of numbers among text: only --unit tokens compares these")
    return prompt


def _ids(prompt: FilePrompt) -> Sequence[int]:
    if not isinstance(prompt, TokenIds):
        raise BenchError("block hashes among prompts: a file holds the one or the other")
    return prompt.ids


def _of_ids(ids: Sequence[int]) -> str:
    try:
        return "".join(map(chr, ids))
    except (ValueError, OverflowError):
        raise BenchError(f"{max(ids, key=abs)} is no token id") from None
