"""The text that a reader goes along. Where it ends for now, the reader waits; how it was cut can make no difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from services.gateway.parsing.marks import marks_of

T = TypeVar("T")

Reading = Generator[None, None, T]
"""Reads something; each `yield` means that more text is needed."""

Emit = Callable[[str], None]
"""Takes text as it is read."""

SPACE = re.compile(r"\s*")


class NoCall(Exception):
    """What stands here is not what the format wants."""


class Ended(NoCall):
    """The output ended where more was wanted."""


class Tape:
    """Owns the text from the mark on: what was read since stays, so that it can be read again as something else."""

    def __init__(self) -> None:
        self._read: list[str] = []
        """Since the mark, ahead of `_text`."""
        self._text = ""
        self._at = 0
        """Up to where `_text` is read."""
        self.closed = False
        """Whether nothing more will come."""
        self.cut = False
        """Whether that is because the output was as long as it may be."""

    def feed(self, text: str) -> None:
        self._read.append(self._text[: self._at])
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self, *, cut: bool) -> None:
        self.closed, self.cut = True, cut

    # Without waiting.

    @property
    def rest(self) -> str:
        """What has come and has not been read."""
        return self._text[self._at :]

    def mark(self) -> None:
        """Here something begins that may have to be read again; what was before is done with."""
        self._read.clear()
        self._text = self._text[self._at :]
        self._at = 0

    def rewind(self) -> None:
        """Back to the mark."""
        self._text = "".join([*self._read, self._text])
        self._read.clear()
        self._at = 0

    @property
    def since_mark(self) -> str:
        return "".join([*self._read, self._text[: self._at]])

    def skip(self, count: int) -> None:
        self._at += count

    def take(self, pattern: re.Pattern[str]) -> str:
        """As much as fits the pattern and has come; there may be more of it."""
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    # Waiting for more where needed.

    def peek(self) -> Reading[str]:
        """The next character; empty at the end of the output."""
        while self._at == len(self._text) and not self.closed:
            yield
        return self._text[self._at : self._at + 1]

    def char(self) -> Reading[str]:
        """Reads one character. Raises Ended."""
        character = yield from self.peek()
        if not character:
            raise Ended
        self._at += 1
        return character

    def space(self) -> Reading[None]:
        """Reads white space, if there is any."""
        while True:
            self.take(SPACE)
            if self._at < len(self._text) or self.closed:
                return
            yield

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads all that fits the pattern, which is one of single characters."""
        parts = []
        while True:
            parts.append(self.take(pattern))
            if self._at < len(self._text) or self.closed:
                return "".join(parts)
            yield

    def ahead(self, literals: tuple[str, ...]) -> Reading[str | None]:
        """Which of the literals stands here; none of them may begin another."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, literals))]
            for literal in literals:
                if rest.startswith(literal):
                    return literal
            if self.closed or not any(literal.startswith(rest) for literal in literals):
                return None
            yield

    def expect(self, *literals: str) -> Reading[str]:
        """Reads one of the literals. Raises NoCall."""
        found = yield from self.ahead(literals)
        if found is None:
            rest = self.rest
            raise Ended if any(literal.startswith(rest) for literal in literals) else NoCall
        self._at += len(found)
        return found

    def until(self, literals: tuple[str, ...], emit: Emit) -> Reading[str]:
        """Reads up to the first of the literals, and answers with that, unread. Raises Ended."""
        marks = marks_of(literals)
        while True:
            match = marks.pattern.search(self._text, self._at)
            stop = match.start() if match else len(self._text) - (0 if self.closed else marks.begun(self.rest))
            if stop > self._at:
                emit(self._text[self._at : stop])
                self._at = stop
            if match:
                return match[0]
            if self.closed:
                raise Ended
            yield
