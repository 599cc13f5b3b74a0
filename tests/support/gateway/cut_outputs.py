"""Outputs that reach a writer of events in pieces, cut anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shared.messages.generation import FinishReason

Entries = list[dict[str, Any]]


class EventWriter(Protocol):
    """What makes an answer's entries, and the events of its stream, of text."""

    def feed(self, text: str, finish: FinishReason | None, /) -> Entries: ...

    def body(self) -> Entries: ...


def assert_events_add_up(
    text: str,
    new: Callable[[], EventWriter],
    added_up: Callable[[Entries], Entries],
    without_ids: Callable[[Entries], Entries],
) -> None:
    """Whole, in two pieces, and in single characters, `text` comes to the same entries, and so do its events as a
    client adds them up."""
    whole = new()
    whole.feed(text, "stop")
    expected = without_ids(whole.body())
    for at in range(len(text) + 1):
        cut = new()
        events = [*cut.feed(text[:at], None), *cut.feed(text[at:], "stop")]
        assert without_ids(cut.body()) == expected
        assert without_ids(added_up(events)) == expected
    pieces = new()
    events = [event for character in text for event in pieces.feed(character, None)]
    assert without_ids(added_up([*events, *pieces.feed("", "stop")])) == expected
