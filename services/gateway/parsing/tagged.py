"""`<tool_call>…</tool_call>`: JSON within (Hermes, Qwen 3), or `<function=…><parameter=…>` (Qwen3-Coder)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.parsing.call_object import read_call_object
from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.syntax import Openings
from services.gateway.parsing.tape import Reading, Tape
from services.gateway.parsing.xml_call import read_xml_call

START, END = "<tool_call>", "</tool_call>"
FUNCTION = "<function="


class Tagged:
    """Owns nothing. `bare`: calls of the second kind may stand alone, as Qwen3-Coder forgets the tag at times."""

    def __init__(self, schemas: Mapping[str, Any], *, bare: bool) -> None:
        self._schemas = schemas
        self.openings = Openings(anywhere=(START, FUNCTION) if bare else (START,))

    def read(self, tape: Tape, pieces: Pieces) -> Reading[None]:
        tagged = (yield from tape.ahead((START, FUNCTION))) == START
        if tagged:
            yield from tape.expect(START)
            yield from tape.space()
        if (yield from tape.peek()) == "{":
            yield from read_call_object(tape, pieces, other_keys=True)
        else:
            yield from read_xml_call(tape, pieces, self._schemas)
        if tagged:
            yield from self._close(tape)
        pieces.end()
        tape.mark()

    def _close(self, tape: Tape) -> Reading[None]:
        """The end's tag, or the output's end."""
        yield from tape.space()
        if (yield from tape.peek()):
            yield from tape.expect(END)
