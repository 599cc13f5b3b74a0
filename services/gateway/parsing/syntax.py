"""What a format of tool calls is to whoever reads an output."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.tape import Reading, Tape


class Openings(NamedTuple):
    """Texts at which a call may begin. No one of them may begin another."""

    anywhere: tuple[str, ...] = ()
    line_start: tuple[str, ...] = ()
    """Only where nothing but white space stands before it in its line."""


class Syntax(Protocol):
    """One format. Owns nothing."""

    openings: Openings

    def read(self, tape: Tape, pieces: Pieces) -> Reading[None]:
        """Reads one call or several, from an opening on. Raises NoCall; what was read since the tape's mark is then
        no call. Behind each whole call the mark is set anew."""
