"""Rows that an encoder keeps, as this rank has them: mapped from a file of its host, or read by the bus."""

from __future__ import annotations

from mmap import mmap

from shared.messages.generation import MediaRows


class MappedRows(MediaRows, frozen=True, array_like=True):
    """Rows of a plan that is here. They stay as long as this does, whoever removes the file. Never sent."""

    rows: mmap | bytearray = bytearray()
    """`count` rows."""
