"""Loads that were recorded: request traces in the formats of Mooncake and of Azure. Read line by line.

Mooncake (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces): JSON lines of `timestamp` (milliseconds),
`input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt; equal ids mean equal tokens up to
there. Azure (https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace): CSV of TIMESTAMP, ContextTokens and
GeneratedTokens; nothing is known of the prompts, and so none shares anything.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TextIO

import msgspec
from msgspec import Meta, Struct

from deploy.simulation.prompts import PromptSegment, SimRequest
from deploy.simulation.workloads import LOAD, UNSHARED
from shared.packing import NOT_DECODED
from shared.settings import UpOption

TraceFormat = Literal["auto", "mooncake", "azure"]
MOONCAKE_BLOCK = 512
"""Tokens that a hash id of Mooncake's stands for."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
Length = Annotated[int, Meta(ge=0)]


class TraceError(Exception):
    """The trace cannot be read. The text names the file, the line, and what is wrong with it."""


class _MooncakeRequest(Struct, frozen=True):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Length
    output_length: Length
    hash_ids: list[Annotated[int, Meta(ge=0, lt=UNSHARED)]] = []


class TracedRequest(NamedTuple):
    """One line of a trace. Lengths in tokens."""

    at: float
    """Seconds on the trace's own clock."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    """One for each `MOONCAKE_BLOCK` tokens of the prompt, the last of which may be fewer; empty where prompts share
    nothing that is known."""


class TraceLoad(Struct, frozen=True, kw_only=True):
    """The requests of a trace at their own times, the first one at 0."""

    path: Annotated[
        Path,
        Meta(description="File of requests in Mooncake's or Azure's format, in place of those."),
        UpOption(LOAD, "trace"),
    ]
    format: Annotated[
        TraceFormat, Meta(description="The format, where it does not show."), UpOption(LOAD, "trace_format")
    ] = "auto"
    """auto: a file with a table's heading is Azure's, any other Mooncake's."""
    time_scale: Annotated[
        float,
        Meta(gt=0, description="Factor on a trace's times: 0.5 is twice the rate."),
        UpOption(LOAD, "trace_scale"),
    ] = 1.0
    count: Annotated[int, Meta(ge=1), UpOption(LOAD, "num_prompts")] | None = None
    """At most so many requests."""
    seconds: Annotated[float, Meta(gt=0), UpOption(LOAD, "duration")] | None = None
    """Only requests that come within so long, on the scaled clock."""

    @property
    def concurrency(self) -> int | None:
        """None: as `Workload` has it."""
        return None

    @property
    def description(self) -> dict[str, object]:
        """As `Workload` has it."""
        return {
            "workload": "trace",
            **{name: getattr(self, name) for name in ("format", "time_scale", "count", "seconds")},
            "trace": str(self.path),
        }

    def requests(self) -> Iterator[SimRequest]:
        """As `Workload` has it. Raises TraceError, at once or at the line that is wrong."""
        start, last = None, 0.0
        for number, traced in enumerate(read_trace(self.path, self.format)):
            start = traced.at if start is None else start
            at = (traced.at - start) * self.time_scale
            if (self.count is not None and number >= self.count) or (self.seconds is not None and at >= self.seconds):
                return
            if at < last:
                raise TraceError(f"{self.path}: request {number + 1} comes before the one before it")
            last = at
            yield SimRequest(number, at, _segments(traced, number), max(1, traced.output_length))


def read_trace(path: Path, format_: TraceFormat = "auto") -> Iterator[TracedRequest]:
    """The lines of a file, which may end in .gz. Raises TraceError."""
    try:
        with _opened(path) as file:
            first = file.readline()
            if format_ == "auto":
                format_ = "azure" if first.startswith(AZURE_COLUMNS[0]) else "mooncake"
            read = _azure if format_ == "azure" else _mooncake
            yield from read(first, file, lambda number, error: TraceError(f"{path}: line {number}: {error}"))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return TextIOWrapper(gzip.open(path), encoding="utf-8")
    return path.open(encoding="utf-8")


_Complaint = Callable[[int, object], TraceError]


def _mooncake(first: str, file: TextIO, complaint: _Complaint) -> Iterator[TracedRequest]:
    decoder = msgspec.json.Decoder(_MooncakeRequest)
    for number, line in enumerate(_lines(first, file), 1):
        if not line.strip():
            continue
        try:
            read = decoder.decode(line)
        except NOT_DECODED as error:
            raise complaint(number, error) from None
        expected = -(-read.input_length // MOONCAKE_BLOCK)
        if read.hash_ids and len(read.hash_ids) != expected:
            raise complaint(number, f"{len(read.hash_ids)} hash_ids for {read.input_length} tokens, not {expected}")
        yield TracedRequest(read.timestamp / 1000, read.input_length, read.output_length, read.hash_ids)


def _azure(first: str, file: TextIO, complaint: _Complaint) -> Iterator[TracedRequest]:
    rows = csv.DictReader(_lines(first, file))
    missing = set(AZURE_COLUMNS) - set(rows.fieldnames or ())
    if missing:
        raise complaint(1, f"no column {', '.join(sorted(missing))}")
    for row in rows:
        time, context, generated = (row[column] for column in AZURE_COLUMNS)
        try:
            at, lengths = datetime.fromisoformat(time).timestamp(), (int(context), int(generated))
        except (TypeError, ValueError) as error:
            raise complaint(rows.line_num, error) from None
        if min(lengths) < 0:
            raise complaint(rows.line_num, "a number of tokens is below 0")
        yield TracedRequest(at, *lengths, [])


def _lines(first: str, file: TextIO) -> Iterator[str]:
    yield first
    yield from file


def _segments(traced: TracedRequest, number: int) -> tuple[PromptSegment, ...]:
    length = max(1, traced.input_length)
    if not traced.hash_ids:
        return (PromptSegment(UNSHARED + number, length),)
    starts = range(0, length, MOONCAKE_BLOCK)
    return tuple(
        PromptSegment(name, min(MOONCAKE_BLOCK, length - start))
        for name, start in zip(traced.hash_ids, starts, strict=True)
    )
