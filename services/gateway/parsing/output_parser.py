"""One output as it comes: thoughts first, then text and calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, assert_never

from services.gateway.parsing.content import Content
from services.gateway.parsing.llama3_json import Llama3Json
from services.gateway.parsing.mistral import Mistral
from services.gateway.parsing.pieces import Piece, Pieces
from services.gateway.parsing.pythonic import Pythonic
from services.gateway.parsing.syntax import Syntax
from services.gateway.parsing.tagged import Tagged
from services.gateway.parsing.tape import Reading, Tape
from services.gateway.parsing.thoughts import read_thoughts
from shared.dialects import Dialect, Thinking, ToolFormat

Schemas = Mapping[str, Any]
"""The JSON schema of each function's arguments, by its name."""


NO_SCHEMAS: Schemas = MappingProxyType({})


class Parsing(NamedTuple):
    """How an output is taken apart."""

    dialect: Dialect
    """Without `tools` where no calls are looked for."""
    schemas: Schemas = NO_SCHEMAS
    parallel: bool = True
    """Whether more than one call is wanted."""
    tell_reasoning: bool = True
    """False: thoughts are left out."""


def syntax_of(form: ToolFormat, schemas: Schemas) -> Syntax:
    match form:
        case "hermes":
            return Tagged(schemas, bare=False)
        case "qwen3_xml":
            return Tagged(schemas, bare=True)
        case "mistral":
            return Mistral()
        case "llama3_json":
            return Llama3Json(schemas)
        case "pythonic":
            return Pythonic(schemas)
        case _:
            assert_never(form)


class OutputParser:
    """Owns what has come of one output and is not decided yet.

    However the text is cut into deltas, the pieces are the same, but for where text and arguments are divided.
    """

    def __init__(self, parsing: Parsing) -> None:
        self._tape = Tape()
        self._pieces = Pieces(parallel=parsing.parallel, tell_reasoning=parsing.tell_reasoning)
        self._dialect = parsing.dialect
        self._syntax = None if parsing.dialect.tools is None else syntax_of(parsing.dialect.tools, parsing.schemas)
        self._reading: Reading[None] | None = None
        self.thinking: Thinking | None = None
        """How the prompt ends; to be set before the first text."""

    def feed(self, text: str) -> list[Piece]:
        """What is decided now that this text has come."""
        self._tape.feed(text)
        return self._go_on()

    def finish(self, *, cut: bool) -> list[Piece]:
        """The rest. `cut`: the output is as long as it may be, so a call that breaks off is one nevertheless."""
        self._tape.close(cut=cut)
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        if self._reading is None:
            self._reading = self._read()
        next(self._reading, None)
        return self._pieces.take()

    def _read(self) -> Reading[None]:
        tape, pieces = self._tape, self._pieces
        if self._dialect.reasoning is not None:
            yield from read_thoughts(tape, pieces, self._dialect.reasoning, self.thinking)
        if self._syntax is not None:
            yield from Content(tape, pieces, self._syntax).read()
        while True:
            pieces.content(tape.rest)
            tape.skip(len(tape.rest))
            tape.mark()
            yield
