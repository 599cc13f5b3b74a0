"""What a prompt is compared by: its tokens, its words or its characters, each as one code point of a `str`."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, Protocol

from tokenizers import Tokenizer

from services.bench.api import ApiError
from services.bench.prompt_files import BlockIds, Read, TokenIds

Unit = Literal["tokens", "words", "chars", "blocks"]
SYMBOLS = sys.maxunicode + 1


class Alphabet(Protocol):
    """What `unit` counts, and the way there and back."""

    unit: Unit

    def spelled(self, prompts: Sequence[Read]) -> list[str]:
        """Raises ApiError where a prompt cannot be compared by this."""

    def shown(self, symbols: str) -> str:
        """As a reader would recognise it."""


class Characters:
    unit: Unit = "chars"

    def spelled(self, prompts: Sequence[Read]) -> list[str]:
        return [_text(prompt) for prompt in prompts]

    def shown(self, symbols: str) -> str:
        return symbols


class Words:
    """Owns the numbers of the words seen; what separates them is not compared."""

    unit: Unit = "words"

    def __init__(self) -> None:
        self._numbers = Numbers()

    def spelled(self, prompts: Sequence[Read]) -> list[str]:
        return [self._numbers.spelled(_text(prompt).split()) for prompt in prompts]

    def shown(self, symbols: str) -> str:
        return " ".join(map(str, self._numbers.of(symbols)))


class Tokens:
    """By the ids of a tokenizer, special tokens in front included, or as a file gives them."""

    unit: Unit = "tokens"

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def spelled(self, prompts: Sequence[Read]) -> list[str]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and self._tokenizer is None:
            raise ApiError("a prompt of text among token ids: name a tokenizer")
        encoded = iter(self._tokenizer.encode_batch(texts) if self._tokenizer is not None and texts else ())
        return [_of_ids(next(encoded).ids if isinstance(prompt, str) else _ids(prompt)) for prompt in prompts]

    def shown(self, symbols: str) -> str:
        ids = [ord(symbol) for symbol in symbols]
        return " ".join(map(str, ids)) if self._tokenizer is None else str(self._tokenizer.decode(ids))


class Blocks:
    """By the hashes of blocks that a trace has in place of its prompts."""

    unit: Unit = "blocks"

    def __init__(self) -> None:
        self._numbers = Numbers()

    def spelled(self, prompts: Sequence[Read]) -> list[str]:
        if not all(isinstance(prompt, BlockIds) for prompt in prompts):
            raise ApiError("a prompt among block hashes: a file holds the one or the other")
        return [self._numbers.spelled(prompt.ids) for prompt in prompts if isinstance(prompt, BlockIds)]

    def shown(self, symbols: str) -> str:
        return " ".join(map(str, self._numbers.of(symbols)))


class Numbers:
    """Numbers whatever it is given in the order of first sight. Raises ApiError beyond as many as there are code
    points."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, str] = {}
        self._seen: list[Hashable] = []

    def spelled(self, items: Iterable[Hashable]) -> str:
        return "".join([self._numbers.get(item) or self._new(item) for item in items])

    def of(self, symbols: str) -> list[Hashable]:
        return [self._seen[ord(symbol)] for symbol in symbols]

    def _new(self, item: Hashable) -> str:
        if len(self._seen) == SYMBOLS:
            raise ApiError(f"more than {SYMBOLS} different words: compare by characters or by a tokenizer")
        self._numbers[item] = chr(len(self._seen))
        self._seen.append(item)
        return self._numbers[item]


def _text(prompt: Read) -> str:
    if not isinstance(prompt, str):
        raise ApiError("a prompt of numbers among text: only --unit tokens compares these")
    return prompt


def _ids(prompt: Read) -> Sequence[int]:
    if not isinstance(prompt, TokenIds):
        raise ApiError("block hashes among prompts: a file holds the one or the other")
    return prompt.ids


def _of_ids(ids: Sequence[int]) -> str:
    try:
        return "".join(map(chr, ids))
    except (ValueError, OverflowError):
        raise ApiError(f"{max(ids, key=abs)} is no token id") from None
