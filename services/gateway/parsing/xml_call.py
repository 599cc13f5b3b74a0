"""Qwen3-Coder's calls: `<function=NAME><parameter=KEY>VALUE</parameter>…</function>`, turned into JSON arguments.

Values stand there without quotation marks, so what one means is decided by the tool's JSON schema, as vLLM does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from services.gateway.parsing.json_text import as_json
from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.tape import Emit, NoCall, Reading, Tape
from services.gateway.parsing.xml_value import converted, is_free_text, parameter_schema

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]*")
VALUE_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END)
"""A value ends, too, where the next begins: models forget to close them."""


def read_xml_call(tape: Tape, pieces: Pieces, schemas: Mapping[str, Any]) -> Reading[None]:
    """Reads one call, its parameters in their order. Raises NoCall."""
    yield from tape.expect(FUNCTION)
    name = yield from _name(tape)
    parameters = schemas.get(name)
    pieces.begin(name)
    pieces.arguments("{")
    keys: set[str] = set()
    while True:
        yield from tape.space()
        if (yield from tape.expect(PARAMETER, FUNCTION_END)) == FUNCTION_END:
            pieces.arguments("}")
            return
        key = yield from _name(tape)
        if key in keys:
            raise NoCall
        keys.add(key)
        pieces.arguments(f'{", " if len(keys) > 1 else ""}"{as_json(key)}": ')
        yield from _read_argument(tape, pieces.arguments, parameter_schema(parameters, key))


def _name(tape: Tape) -> Reading[str]:
    name = (yield from tape.run(NAME)).strip()
    yield from tape.expect(">")
    if not name:
        raise NoCall
    return name


def _read_argument(tape: Tape, emit: Emit, schema: dict[str, Any]) -> Reading[None]:
    if is_free_text(schema):
        emit('"')
        text = _WithoutFrame(lambda part: emit(as_json(part)))
        end = yield from tape.until(VALUE_ENDS, text.feed)
        emit('"')
    else:
        parts: list[str] = []
        end = yield from tape.until(VALUE_ENDS, parts.append)
        emit(converted("".join(parts), schema))
    if end == PARAMETER_END:
        yield from tape.expect(PARAMETER_END)


class _WithoutFrame:
    """Owns the place in a value whose first and last line breaks are no part of it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._begun = False
        self._held = ""

    def feed(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        if kept:
            self._emit(kept)
