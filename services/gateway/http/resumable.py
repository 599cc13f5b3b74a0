"""Resumable streams as clients see them: an id on every event, and nothing that a client has is sent again."""

from __future__ import annotations

from typing import Any

from services.gateway.api.event_ids import ChoicePosition, EventId
from services.gateway.api.response import ChoiceState
from services.gateway.http.streaming import StreamWriter
from shared.messages.gateway import Delta

NOTHING = ChoicePosition(0, 0)


class ResumableWriter(StreamWriter):
    """Owns how far the client is in each choice.

    It is given the whole output, or a copy's that may be behind the client, and leaves out what the client has: by the
    position in the model's text, as deltas may be cut elsewhere than when they were first sent. Markup is parsed from
    the start, so that tool calls and reasoning go on where they were.
    """

    with_ids = True

    def __init__(self, *arguments: Any, last: EventId, **settings: Any) -> None:
        """`last`: the last event that the client has; one without any position for a new stream. For the rest see
        `StreamWriter`."""
        super().__init__(*arguments, **settings)
        self._last = last
        self._ahead = dict(enumerate(last.choices))
        """What the client has of a choice as long as the output given is not as far."""
        self._sent = list(last.choices)
        """What it will have with the next event."""
        self._given = [NOTHING] * len(last.choices)
        """How much of each choice's output was given."""

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `StreamWriter.write`."""
        had = self._ahead.get(choice.index)
        rest = delta if had is None else self._unread_part(choice, delta, had)
        if rest is None:
            return True
        self._given[choice.index] = _after(self._given[choice.index], rest)
        return super().write(choice, rest, now)

    def _unread_part(self, choice: ChoiceState, delta: Delta, had: ChoicePosition) -> Delta | None:
        """Passes over what the client has; None where that is all."""
        given = self._given[choice.index]
        tokens, chars = had.tokens - given.tokens, had.chars - given.chars
        if had.finished or (delta.finish is None and len(delta.tokens) <= tokens and len(delta.text) <= chars):
            self._frames.pass_over(choice, delta)
            self._given[choice.index] = _after(given, delta)
            return None
        tokens, chars = max(0, tokens), max(0, chars)
        logprobs = delta.logprobs or ()
        known = Delta(
            delta.request,
            delta.attempt,
            delta.position,
            delta.tokens[:tokens],
            delta.text[:chars],
            logprobs=logprobs[:tokens] or None,
        )
        self._frames.pass_over(choice, known)
        self._given[choice.index] = _after(given, known)
        del self._ahead[choice.index]
        return Delta(
            delta.request,
            delta.attempt,
            delta.position + tokens,
            delta.tokens[tokens:],
            delta.text[chars:],
            delta.finish,
            delta.stop_reason,
            logprobs[tokens:] or None,
        )

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns the events of new output, each with its id."""
        begins = not choice.started and choice.message is not None
        events = super().frames(choice, delta)
        identified: list[bytes] = []
        for number, event in enumerate(events, start=1):
            role = number < len(events) or (begins and number == 1)
            self._sent[choice.index] = NOTHING if role else self._given[choice.index]
            identified.append(self._id() + event)
        return identified

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns the usage, unless the client has it, and the end."""
        *usage, done = super().last_frames(choices)
        return [*(self._id(usage=True) + event for event in usage if not self._last.usage), done]

    def _id(self, *, usage: bool = False) -> bytes:
        return b"id: %b\n" % str(EventId(self._last.stream, tuple(self._sent), usage)).encode()


def _after(given: ChoicePosition, delta: Delta) -> ChoicePosition:
    return ChoicePosition(given.tokens + len(delta.tokens), given.chars + len(delta.text), delta.finish is not None)
