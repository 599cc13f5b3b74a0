"""The input of a batch: its lines in order, and what is wrong with them. One line is held at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import NamedTuple

from services.gateway.api.batches.batch import MAX_ERRORS, BatchLineError
from services.gateway.api.batches.lines import BadLine, BatchEndpoint, BatchRequest, read_line
from services.gateway.batches.file_store import FileObject, FileStore


class InputReport(NamedTuple):
    """What a validation has found."""

    requests: int
    errors: tuple[BatchLineError, ...]


class BatchInput:
    """Reads one file of requests, as often as it is asked to."""

    def __init__(self, files: FileStore, file: FileObject, endpoint: BatchEndpoint, max_line: int) -> None:
        """`max_line`: bytes of a line."""
        self._files, self._file, self._endpoint, self._max_line = files, file, endpoint, max_line

    async def validate(self, max_lines: int) -> InputReport:
        """Reads all of it, up to the line at which there are too many lines, or errors."""
        seen: dict[bytes, int] = {}
        errors: list[BatchLineError] = []
        requests = 0
        async for number, line in self.lines():
            requests += 1
            if requests > max_lines:
                errors.append(BatchLineError("too_many_lines", f"more than the {max_lines} requests that are allowed"))
            elif (error := self._error(number, line, seen)) is not None:
                errors.append(error)
            if requests > max_lines or len(errors) == MAX_ERRORS:
                break
        if not requests:
            errors.append(BatchLineError("empty_file", "there is no request in the file", param="input_file_id"))
        return InputReport(requests, tuple(errors))

    async def requests(self) -> AsyncIterator[tuple[int, BatchRequest]]:
        """Yields the requests of a validated file with the numbers of their lines; those before its end, where the file
        is removed meanwhile."""
        async for number, line in self.lines():
            request = read_line(number, line)
            if isinstance(request, BadLine):
                return  # the rest of a line of a file that went meanwhile
            yield number, request

    def _error(self, number: int, line: bytes, seen: dict[bytes, int]) -> BatchLineError | None:
        if len(line) > self._max_line:
            return BatchLineError("line_too_long", f"line {number}: longer than {self._max_line} bytes", number)
        request = read_line(number, line)
        if isinstance(request, BadLine):
            return BatchLineError(request.code, request.message, number)
        if request.url != self._endpoint:
            text = f"line {number}: url: {request.url!r} is not the batch's endpoint, {self._endpoint}"
            return BatchLineError("mismatched_endpoint", text, number, "url")
        first = seen.setdefault(blake2b(request.custom_id.encode(), digest_size=16).digest(), number)
        if first != number:
            text = f"line {number}: custom_id {request.custom_id[:80]!r} stands in line {first} already"
            return BatchLineError("duplicate_custom_id", text, number, "custom_id")
        return None

    async def lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yields each line that is not blank with its number, counted from 1. What is too long is cut off one byte
        behind that."""
        number, rest = 0, b""
        async for piece in self._files.contents(self._file):
            *whole, last = piece.split(b"\n")
            for part in whole:
                number += 1
                line, rest = (rest + part)[: self._max_line + 1], b""
                if line.strip():
                    yield number, line
            rest = (rest + last)[: self._max_line + 1]
            await asyncio.sleep(0)
        if rest.strip():
            yield number + 1, rest
