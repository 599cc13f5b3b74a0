"""Forms with a file in them, read as they arrive: nothing is held but small fields and one piece of the body."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.gateway.api.errors import RequestError, abbreviated, invalid

MAX_PARTS = 32
MAX_FIELD_BYTES = 1024
"""Of a field that is no file, and of a field's name."""
FORM_BYTES = 64 * 2**10
"""Of everything in a form but its file."""


class FormField(NamedTuple):
    """A field that is no file."""

    name: str
    value: str


class FileBegin(NamedTuple):
    """A file begins; its contents follow as bytes."""

    name: str
    filename: str


FormEvent = FormField | FileBegin | bytes


class FormReader:
    """Owns the state of one form's parser."""

    def __init__(self, content_type: bytes, max_field: int = MAX_FIELD_BYTES) -> None:
        """`content_type`: the header. `max_field`: bytes of a field that is no file. Raises RequestError where it is no
        form's."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary or len(boundary) > 200:
            raise invalid("body", "multipart/form-data with a boundary is expected")
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._max_field = max_field
        self._events: list[FormEvent] = []
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._field = bytearray()
        self._parts = 0
        self._ended = False

    async def events(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[FormEvent]:
        """Yields what is in the form. Raises RequestError where it is none, or ends too soon."""
        async for piece in pieces:
            for event in self._fed(piece):
                yield event
        if not self._ended:
            raise invalid("body", "the form ends before its last boundary")

    def _fed(self, piece: bytes) -> Iterator[FormEvent]:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise invalid("body", f"not a valid form ({str(error)[:120]})") from None
        events, self._events = self._events, []
        yield from events

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise invalid("body", f"more than {MAX_PARTS} fields")
        self._disposition, self._field = b"", bytearray()
        self._header.clear()
        self._value.clear()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"")
        if kind != b"form-data" or not name or len(name) > MAX_FIELD_BYTES:
            raise invalid("body", "a part of the form has no name")
        self._name = name.decode(errors="replace")
        filename = options.get(b"filename")
        self._is_file = filename is not None
        if filename is not None:
            self._events.append(FileBegin(self._name, filename.decode(errors="replace")))

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._events.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > self._max_field:
            raise invalid(self._name, f"longer than the {self._max_field} bytes that are allowed; no file without name")

    def _end_part(self) -> None:
        if not self._is_file:
            try:
                self._events.append(FormField(self._name, self._field.decode()))
            except UnicodeDecodeError:
                raise invalid(self._name, "UTF-8 is expected") from None

    def _end(self) -> None:
        self._ended = True


def unknown_field(name: str) -> RequestError:
    """Makes a 400 for a field that the API does not have."""
    text = f"{abbreviated(name)[1:-1]}: this field is not known"
    return RequestError(400, text, param=name[:80], code="unsupported_parameter")
