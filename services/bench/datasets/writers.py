"""Writes prompts of an exact number of tokens: as token ids, or as text fitted to what the tokenizer counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from tokenizers import Tokenizer

from services.bench.client.api import PromptBody
from services.bench.errors import BenchError

Count = Callable[[PromptBody], Awaitable[int]]

COMMON_WORDS = ("a", "the", "of", "and", "to", "in", "is", "it", "on", "for", "as", "at", "by", "or", "be", "we")
SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "lo", "mi", "na", "po", "ri", "so", "ta", "ve", "zu")
WORDS = 64
COPIES = 8
ATTEMPTS = 16


class PromptWriter(Protocol):
    """Makes prompts of exact lengths, as text or as token ids."""

    async def prefix(self, tokens: int, random: Random) -> str | list[int]:
        """The beginning of several prompts, to be given to `prompt`."""

    async def prompt(self, tokens: int, random: Random, prefix: str | list[int] | None = None) -> PromptBody:
        """A prompt of exactly `tokens` tokens, `prefix` included. Raises BenchError where there is none."""


class TokenWriter:
    """Draws token ids from a vocabulary: exact by construction, and nothing is left to tokenize."""

    def __init__(self, vocabulary: Sequence[int]) -> None:
        if not vocabulary:
            raise BenchError("no token ids to draw from")
        self._vocabulary = vocabulary

    async def prefix(self, tokens: int, random: Random) -> list[int]:
        """As `PromptWriter` has it."""
        return random.choices(self._vocabulary, k=tokens)

    async def prompt(self, tokens: int, random: Random, prefix: str | list[int] | None = None) -> list[int]:
        """As `PromptWriter` has it. Raises BenchError where the prefix alone is longer."""
        start = list(prefix) if isinstance(prefix, list) else []
        if len(start) > tokens:
            raise BenchError(f"a prefix of {len(start)} tokens does not go into a prompt of {tokens}")
        return start + random.choices(self._vocabulary, k=tokens - len(start))


class TextWriter:
    """Strings words together until the tokenizer counts the requested number. Make one with `text_writer`."""

    def __init__(self, count: Count, costs: dict[str, int], chat: bool) -> None:
        self._count = count
        self._costs = costs
        self._words = list(costs)
        self._units = [word for word, cost in costs.items() if cost == 1]
        self._chat = chat

    async def prefix(self, tokens: int, random: Random) -> str:
        """Text of about `tokens` tokens: where it meets the rest, tokens may join, so only the whole is exact."""
        return " ".join(self._draw(tokens, random))

    async def prompt(self, tokens: int, random: Random, prefix: str | list[int] | None = None) -> PromptBody:
        """As `PromptWriter` has it: the server, or the local tokenizer, counts each attempt."""
        start = prefix if isinstance(prefix, str) else None
        bare = await self._count(self._body(start, self._units[:1])) - 1  # servers refuse an empty prompt
        words = self._draw(max(1, tokens - bare), random)
        for _ in range(ATTEMPTS):
            counted = await self._count(self._body(start, words))
            if counted == tokens:
                return self._body(start, words)
            if counted < tokens:
                words += random.choices(self._units, k=tokens - counted)
            elif len(words) > 1:
                self._drop(words, counted - tokens)
            else:
                raise BenchError(f"a prompt of {tokens} tokens is too short: with one word it has {counted} already")
        raise BenchError(f"no text of exactly {tokens} tokens was found in {ATTEMPTS} attempts; use token ids")

    def _body(self, prefix: str | None, words: list[str]) -> PromptBody:
        text = " ".join(words)
        if not self._chat:
            return f"{prefix} {text}" if prefix else text
        return (*((("system", prefix),) if prefix else ()), ("user", text))

    def _draw(self, tokens: int, random: Random) -> list[str]:
        words: list[str] = []
        while tokens > 0:
            word = random.choice(self._words)
            if self._costs[word] > tokens:
                word = random.choice(self._units)
            words.append(word)
            tokens -= self._costs[word]
        return words

    def _drop(self, words: list[str], tokens: int) -> None:
        while len(words) > 1 and tokens > 0:
            tokens -= self._costs[words.pop()]


async def text_writer(count: Count, chat: bool) -> TextWriter:
    """A writer whose words cost the same number of tokens in any position. Raises BenchError."""
    random = Random(0)
    words = [*COMMON_WORDS]
    while len(words) < WORDS:
        words.append("".join(random.choices(SYLLABLES, k=random.randint(1, 3))))
    costs = {}
    for word in dict.fromkeys(words):
        cost = await _cost(word, count)
        if cost is not None:
            costs[word] = cost
    if 1 not in costs.values():
        raise BenchError("the tokenizer has no word of one token, so no text of an exact length; use token ids")
    return TextWriter(count, costs, chat)


async def _cost(word: str, count: Count) -> int | None:
    one, many = await count(word), await count(" ".join([word] * (COPIES + 1)))
    cost, rest = divmod(many - one, COPIES)
    return cost if rest == 0 and cost > 0 else None


async def seen_vocabulary(tokenize: Callable[[PromptBody], Awaitable[list[int]]]) -> list[int]:
    """Token ids that a tokenizer gives for ordinary text: valid, and none of them special. Raises BenchError."""
    random = Random(0)
    special = set.intersection(*[set(await tokenize(letter)) for letter in "abc"])  # around any text
    syllables = ["".join(random.choices(SYLLABLES, k=random.randint(1, 4))) for _ in range(400)]
    letters = [chr(code) for code in range(33, 127)]
    seen = set(await tokenize(" ".join([*COMMON_WORDS, *syllables, *letters])))
    return sorted(seen - special)


# A tokenizer read from a model's folder, for servers that do not tell their own counts.


class LocalTokenizer:
    """Counts a prompt's text. A chat's template is not known here: only its contents count."""

    def __init__(self, folder: Path) -> None:
        """Raises BenchError where the folder holds no tokenizer.json."""
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        if not path.is_file():
            raise BenchError(f"{path} is no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))

    async def count(self, body: PromptBody) -> int:
        """Tokens of a prompt; of a chat those of its contents, of token ids their number."""
        if isinstance(body, tuple):
            return sum(len(self._tokenizer.encode(content, add_special_tokens=False).ids) for _, content in body)
        return len(body) if isinstance(body, list) else len(self._tokenizer.encode(body).ids)

    def vocabulary(self) -> list[int]:
        """Every token id that is not special."""
        special = {id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return sorted(set(self._tokenizer.get_vocab(with_added_tokens=True).values()) - special)
