"""A cursor over text that is still arriving. Where the text ends for now, a reader yields and continues later."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A reader in progress; each `yield` means that it needs more text."""

Emit = Callable[[str], None]
"""Receives text as it is read."""

SPACE = re.compile(r"\s*")


class NotAToolCall(Exception):
    """The text at the cursor does not follow the format."""


class OutputEnd(NotAToolCall):
    """The output ended where the format requires more."""


class MarkerSet(NamedTuple):
    """A set of markers to find in text that arrives in pieces."""

    pattern: re.Pattern[str]
    """Matches any of them."""
    prefixes: frozenset[str]
    """Every proper prefix of every marker."""
    max_prefix: int
    """Characters of the longest prefix."""

    def partial_length(self, text: str) -> int:
        """Returns how many characters at the end of `text` may be the start of a marker: the largest such number."""
        for length in range(min(len(text), self.max_prefix), 0, -1):
            if text[-length:] in self.prefixes:
                return length
        return 0


@lru_cache(maxsize=256)
def marker_set(texts: tuple[str, ...]) -> MarkerSet:
    """Builds the set of these markers; cached, as each request of a model needs the same."""
    prefixes = frozenset(text[:length] for text in texts for length in range(1, len(text)))
    pattern = re.compile("|".join(map(re.escape, texts)))
    return MarkerSet(pattern, prefixes, max(map(len, texts)) - 1)


class TextCursor:
    """Owns the text from the mark on: what was read since the mark is kept, so that it can be read again."""

    def __init__(self) -> None:
        self._read: list[str] = []
        """Text between the mark and `_text`."""
        self._text = ""
        self._at = 0
        """How far `_text` has been read."""
        self._marked = 0
        """Where the mark is, in characters from the beginning."""
        self.closed = False
        """Whether no more text will come."""
        self.truncated = False
        """Whether the output ended because it reached its length limit."""

    def feed(self, text: str) -> None:
        """Appends text that arrived."""
        self._read.append(self._text[: self._at])
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self, *, truncated: bool) -> None:
        """Declares the text complete."""
        self.closed, self.truncated = True, truncated

    # These never wait.

    @property
    def unread(self) -> str:
        """The text that has arrived and has not been read."""
        return self._text[self._at :]

    def mark(self) -> None:
        """Sets the mark here: `rewind` returns to this place, and the text before it is dropped."""
        self._marked = self.position
        self._read.clear()
        self._text = self._text[self._at :]
        self._at = 0

    def rewind(self) -> None:
        """Moves back to the mark."""
        self._text = "".join([*self._read, self._text])
        self._read.clear()
        self._at = 0

    @property
    def position(self) -> int:
        """Characters of the whole output that have been read."""
        return self._marked + sum(map(len, self._read)) + self._at

    @property
    def since_mark(self) -> str:
        """The text between the mark and the cursor."""
        return "".join([*self._read, self._text[: self._at]])

    def skip(self, count: int) -> None:
        """Moves over `count` characters, which must have arrived."""
        self._at += count

    def read_match(self, pattern: re.Pattern[str]) -> str:
        """Reads as much as matches the pattern and has arrived; more of it may follow."""
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    # These wait for more text where they need it.

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it; empty at the end of the output."""
        while self._at == len(self._text) and not self.closed:
            yield
        return self._text[self._at : self._at + 1]

    def read_char(self) -> Reading[str]:
        """Reads one character. Raises OutputEnd."""
        character = yield from self.peek()
        if not character:
            raise OutputEnd
        self._at += 1
        return character

    def skip_whitespace(self) -> Reading[None]:
        """Reads white space, if there is any."""
        yield from self.read_run(SPACE)

    def read_run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads all characters that match; the pattern must be a repetition of single characters."""
        parts = []
        while True:
            parts.append(self.read_match(pattern))
            if self._at < len(self._text) or self.closed:
                return "".join(parts)
            yield

    def match_ahead(self, literals: tuple[str, ...]) -> Reading[str | None]:
        """Returns which of the literals comes next, or None, without reading it. None of them may be a prefix of
        another."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, literals))]
            for literal in literals:
                if rest.startswith(literal):
                    return literal
            if self.closed or not any(literal.startswith(rest) for literal in literals):
                return None
            yield

    def expect(self, *literals: str) -> Reading[str]:
        """Reads one of the literals and returns it. Raises NotAToolCall where none comes next."""
        found = yield from self.match_ahead(literals)
        if found is None:
            rest = self.unread
            raise OutputEnd if any(literal.startswith(rest) for literal in literals) else NotAToolCall
        self._at += len(found)
        return found

    def read_until(self, literals: tuple[str, ...], emit: Emit) -> Reading[str]:
        """Passes the text before the first of the literals to `emit`, as it arrives, and returns that literal unread.

        Raises OutputEnd where none of them comes.
        """
        markers = marker_set(literals)
        while True:
            match = markers.pattern.search(self._text, self._at)
            held = 0 if self.closed else markers.partial_length(self.unread)
            stop = match.start() if match else len(self._text) - held
            if stop > self._at:
                emit(self._text[self._at : stop])
                self._at = stop
            if match:
                return match[0]
            if self.closed:
                raise OutputEnd
            yield
