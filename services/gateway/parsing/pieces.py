"""What an output is taken apart into, and where the readers put it."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """Text for the client."""

    text: str


class Reasoning(NamedTuple):
    """Thoughts, without their marks."""

    text: str


class CallBegan(NamedTuple):
    """A call of this function; what follows until its end is its own."""

    name: str


class Arguments(NamedTuple):
    """More of the present call's arguments. Together they are the JSON of an object."""

    text: str


class CallEnded(NamedTuple):
    """The present call is whole; or as much of it as the output's length allowed."""


class CallBroken(NamedTuple):
    """The present call turned out to be none. Its text follows as content, unchanged."""


Piece = Content | Reasoning | CallBegan | Arguments | CallEnded | CallBroken


class Pieces:
    """Owns what has been read and not been taken yet. Neighbours of a kind are joined."""

    def __init__(self, *, parallel: bool, tell_reasoning: bool) -> None:
        self._pieces: list[Piece] = []
        self._parallel = parallel
        """Whether there may be more than one call; further ones are dropped otherwise."""
        self._tell_reasoning = tell_reasoning
        self._dropping = False
        self._calls = 0
        self.calling = False
        """Whether a call has begun and not ended."""

    def take(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        return taken

    def content(self, text: str) -> None:
        if not text:
            return
        if self._pieces and isinstance(last := self._pieces[-1], Content):
            self._pieces[-1] = Content(last.text + text)
        else:
            self._pieces.append(Content(text))

    def reasoning(self, text: str) -> None:
        if not text or not self._tell_reasoning:
            return
        if self._pieces and isinstance(last := self._pieces[-1], Reasoning):
            self._pieces[-1] = Reasoning(last.text + text)
        else:
            self._pieces.append(Reasoning(text))

    def begin(self, name: str) -> None:
        self.calling = True
        self._dropping = self._calls > 0 and not self._parallel
        self._put(CallBegan(name))

    def arguments(self, text: str) -> None:
        if text and self._pieces and isinstance(last := self._pieces[-1], Arguments) and not self._dropping:
            self._pieces[-1] = Arguments(last.text + text)
        elif text:
            self._put(Arguments(text))

    def end(self) -> None:
        self.calling = False
        self._calls += 1
        self._put(CallEnded())

    def broken(self) -> None:
        self.calling = False
        self._put(CallBroken())

    def _put(self, piece: Piece) -> None:
        if not self._dropping:
            self._pieces.append(piece)
