"""Which versions of the messages a process speaks, so that processes of different releases can serve together.

A new release may append fields with defaults to a message: decoders ignore what they do not know and fill in what is
missing. That does not change PROTOCOL. It goes up when a process must not take part without knowing what is new;
MIN_PROTOCOL goes up when the old way is no longer understood. Processes work together when each understands the other.

The ranks of an engine and its scheduler are upgraded together: plans have no compatibility beyond one version.
"""

from __future__ import annotations

from typing import NamedTuple

PROTOCOL = 2
"""1: releases up to 0.2, whose messages do not say it. 2: lifecycle messages name their protocol."""
MIN_PROTOCOL = 1


class SpokenProtocols(NamedTuple):
    """The protocol versions, first and last included, that a process understands."""

    first: int = MIN_PROTOCOL
    last: int = PROTOCOL

    def __str__(self) -> str:
        return str(self.last) if self.first == self.last else f"{self.first} to {self.last}"


OWN = SpokenProtocols()


def incompatibility(theirs: SpokenProtocols, ours: SpokenProtocols = OWN) -> str | None:
    """Why two processes cannot work together, for people; None if they can."""
    if theirs.last >= ours.first and ours.last >= theirs.first:
        return None
    older = "is too old" if theirs.last < ours.first else "is too new"
    return f"its release {older}: it speaks protocol {theirs}, this one {ours}"


def other_block_size(theirs: int | None, ours: int) -> str | None:
    """Why two processes cannot share KV blocks, for people; None if they can, or if the other does not say."""
    if theirs in (None, ours):
        return None
    return f"its KV blocks have {theirs} tokens, those here {ours}: --block-size must be the same in all of a stack"
