"""Numbered streams: whether a message is the next one of its source, or some before it were lost. Pure.

The bus delivers at most once, so the sender of a stream numbers its messages from 0 in each epoch (the sender's
incarnation), and its receiver finds the gap here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from shared.ids import Incarnation

Arrival = Literal["first", "next", "gap", "repeated", "new epoch", "joined", "old epoch"]
"""first: number 0 of a source that was not known. next: the number that was expected. gap: a later one, so messages
were lost. repeated: an earlier one. new epoch: number 0 of another epoch. joined: a later number of an epoch that was
not known, whose beginning was missed. old epoch: of the epoch before the present one, which is over."""

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Stream:
    epoch: Incarnation
    expected: int
    former: Incarnation | None


class SourceNumbers(Generic[K]):
    """Owns, for each source of a stream, its epoch, the epoch before it, and the number of its next message."""

    def __init__(self) -> None:
        self._streams: dict[K, _Stream] = {}

    def record(self, source: K, epoch: Incarnation, number: int) -> Arrival:
        """How this message follows those before it. Counts it in, and goes on behind a gap, unless it is repeated or of
        an old epoch."""
        stream = self._streams.get(source)
        if stream is not None and epoch == stream.epoch:
            if number < stream.expected:
                return "repeated"
            arrival: Arrival = "next" if number == stream.expected else "gap"
            stream.expected = number + 1
            return arrival
        if stream is not None and epoch == stream.former:
            return "old epoch"
        self._streams[source] = _Stream(epoch, number + 1, None if stream is None else stream.epoch)
        if number:
            return "joined"
        return "first" if stream is None else "new epoch"

    def forget(self, source: K) -> None:
        """The source is gone. Should it send on after all, its next message has "joined"."""
        self._streams.pop(source, None)
