"""Ids of the events of resumable streams: how far a client has read, as it returns it in `Last-Event-ID`.

`chatcmpl-0f…:12.57,4.20f` names the stream, and for each choice the output tokens and characters up to and including
the event; `f` follows where the choice had finished, nothing stands where it had not begun. A last `:u` says that the
usage was sent.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from services.gateway.api.errors import abbreviated, invalid
from shared.messages.gateway import MAX_STREAM_CHOICES

_EVENT_ID = re.compile(r"((?:chatcmpl|cmpl)-[0-9a-f]{24}):([0-9.,f]*)(:u)?")
_CHOICE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(f?)")


class ChoicePosition(NamedTuple):
    """What a client has of one choice, which has begun for it."""

    tokens: int
    chars: int
    """Characters of the model's text, of which the client may see only some (markup)."""
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}.{self.chars}{'f' if self.finished else ''}"


class EventId(NamedTuple):
    """What a client has of a stream."""

    stream: str
    choices: tuple[ChoicePosition | None, ...]
    """None where a choice has not begun."""
    usage: bool = False
    """Whether it has the usage, with which a stream ends."""

    def __str__(self) -> str:
        choices = ",".join("" if choice is None else str(choice) for choice in self.choices)
        return f"{self.stream}:{choices}{':u' if self.usage else ''}"

    @staticmethod
    def read(header: bytes) -> EventId:
        """Reads the value of `Last-Event-ID`. Raises RequestError 400 for one that no stream has sent."""
        text = header.decode("latin-1").strip()
        match = _EVENT_ID.fullmatch(text)
        parts = match[2].split(",") if match else []
        choices = [_CHOICE.fullmatch(part) for part in parts]
        valid = all(choice or not part for choice, part in zip(choices, parts, strict=True))
        if match is None or not valid or len(parts) > MAX_STREAM_CHOICES:
            raise invalid("Last-Event-ID", f"{abbreviated(text)} is not allowed; it must be the id of an event")
        positions = (c and ChoicePosition(int(c[1]), int(c[2]), bool(c[3])) for c in choices)
        return EventId(match[1], tuple(positions), match[3] is not None)
