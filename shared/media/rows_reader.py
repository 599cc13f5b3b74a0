"""Rows that lie in another host's memory: read by the bus, in pieces."""

from __future__ import annotations

from shared.bus import Bus, BusError
from shared.ids import RowsName
from shared.messages.encoder import ReadRows, RowsPiece
from shared.topics import Topic

PIECE_BYTES = 2 * 2**20
"""Of one message; a bus takes 8 MiB, and others pass in between."""
PIECE_TIMEOUT = 5.0
"""Seconds that a piece may take."""


class RowsLost(Exception):
    """Nobody has these rows any more, or who has them does not answer."""


class RowsReleased(Exception):
    """Who had these rows let them go, as nothing of its own needs them."""


async def read_rows(bus: Bus, owner: Topic[ReadRows], name: RowsName, size: int) -> bytearray:
    """All `size` bytes of them, from who keeps them (`topics.kept_rows`). Raises RowsLost, RowsReleased."""
    rows = bytearray()
    while len(rows) < size:
        try:
            reply: RowsPiece = await bus.request(owner, ReadRows(name, len(rows)), RowsPiece, PIECE_TIMEOUT)
        except BusError as error:
            raise RowsLost(f"{owner.subject} does not answer ({type(error).__name__})") from None
        if reply.released:
            raise RowsReleased
        if not reply.piece:
            raise RowsLost(f"{owner.subject} has them no longer")
        rows += reply.piece
    return rows
