"""Finds stop strings in a text that comes in pieces, and holds back an end of it that could become one.

Aho and Corasick's automaton (Efficient string matching, CACM 1975) over all of a request's stop strings: constant
work for each character however long they are, and its state's depth is the longest end of the text that begins one.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

_ROOT = 0


class StopHit(NamedTuple):
    """The stop string that ended the text, and the text that may be delivered before the end."""

    stop: str
    text: str


class StopStrings:
    """The automaton of a tuple of stop strings. Immutable; shared by all requests that have the same ones."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.found: list[str | None] = [None]
        """By state: the longest stop string that the text ends with."""
        self._depth = [0]
        for stop in stops:
            self._add(stop)
        self.fall = [_ROOT] * len(self.next)
        """By state: the one for the longest shorter end of the text that begins a stop string."""
        self.hold = [0] * len(self.next)
        """By state: how many characters at the text's end begin a stop string that is not complete."""
        self._link()
        self.firsts = frozenset(self.next[_ROOT])

    def _add(self, stop: str) -> None:
        state = _ROOT
        for character in stop:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.found.append(None)
                self._depth.append(self._depth[state] + 1)
            state = self.next[state][character]
        if stop:
            self.found[state] = stop

    def _link(self) -> None:
        """Breadth first, so that what a state falls back to is done before it."""
        todo = deque([_ROOT])
        while todo:
            state = todo.popleft()
            self.hold[state] = self._depth[state] if self.next[state] else self.hold[self.fall[state]]
            for character, child in self.next[state].items():
                if state != _ROOT:
                    self.fall[child] = self.step(self.fall[state], character)
                if self.found[child] is None:
                    self.found[child] = self.found[self.fall[child]]
                todo.append(child)

    def step(self, state: int, character: str) -> int:
        """The state behind `character`. Amortised constant time."""
        while True:
            following = self.next[state].get(character)
            if following is not None:
                return following
            if state == _ROOT:
                return _ROOT
            state = self.fall[state]


@lru_cache(maxsize=256)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these stop strings; the last 256 are kept."""
    return StopStrings(stops)


class StopScan:
    """Owns one text's place in the automaton, and the end of the text that is held back."""

    __slots__ = ("_held", "_include", "_state", "_strings")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._strings = stop_strings(stops)
        self._include = include
        """Whether a stop string is part of the text; nothing needs to be held back then."""
        self._state = _ROOT
        self._held = ""

    def feed(self, text: str, *, armed: bool) -> str | StopHit:
        """What of the text may be delivered now; or the hit that ends it: of several, the one complete first.

        While not `armed`, stop strings that end in this piece are text like any other.
        """
        strings, state = self._strings, self._state
        if state == _ROOT and strings.firsts.isdisjoint(text):
            return text
        for index, character in enumerate(text):
            state = strings.step(state, character)
            stop = strings.found[state]
            if stop is not None and armed:
                return self._hit(stop, self._held + text[: index + 1])
        self._state = state
        whole = self._held + text
        kept = 0 if self._include else strings.hold[state]
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept]

    def _hit(self, stop: str, text: str) -> StopHit:
        self._held = ""
        return StopHit(stop, text if self._include else text[: len(text) - len(stop)])

    def rest(self) -> str:
        """Returns the text that was held back as a possible stop string; call it when no more text follows."""
        held, self._held = self._held, ""
        return held
