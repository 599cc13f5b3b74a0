"""Reads the prompts of a file one after the other, whatever usual format it has; never the whole file at once.

- JSON lines: requests of the OpenAI API, as they are or in a batch file (`body`); `{"prompt": …}`, text or token ids;
  `{"messages": […]}`; conversations (`{"conversations": [{"from", "value"}]}`); Mooncake traces (`{"hash_ids": […]}`).
- A JSON array of the same, as ShareGPT's files are.
- Dolly's JSON lines (`{"instruction": …, "context": …}`).
- Parquet files of the same records, as LMSYS-Chat-1M's (`conversation`) are; needs pyarrow.
- Plain text: one prompt a line.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from services.bench.errors import BenchError

Format = Literal["auto", "jsonl", "json", "parquet", "text"]
Turns = Literal["all", "first"]
PARQUET = ".parquet"
PARQUET_ROWS = 1024
"""Records that are read from a Parquet file at a time."""
FIRST: dict[str, Format] = {"{": "jsonl", "[": "json"}
"""The format by a file's first character."""
CHUNK = 2**20
MAX_ELEMENT_CHARACTERS = 2**28
"""Characters that one element of an array may have."""


class TokenIds(NamedTuple):
    """A prompt that the file gives as token ids."""

    ids: list[int]


class BlockIds(NamedTuple):
    """Hashes of a prompt's blocks, each of which covers all blocks before it as well."""

    ids: list[int]


FilePrompt = str | TokenIds | BlockIds


def read_prompts(path: Path, format_: Format, turns: Turns) -> Iterator[FilePrompt]:
    """Raises BenchError, with the place, where the file is malformed. `-` is standard input."""
    try:
        if format_ == "parquet" or (format_ == "auto" and path.suffix == PARQUET):
            yield from _prompts_of_all(_parquet_records(path), turns, path)
            return
        with _opened(path) as file:
            yield from _prompts(file, format_, turns, path)
    except (OSError, ValueError) as error:  # not UTF-8; no Parquet
        raise BenchError(f"{path}: {error}") from None


def _opened(path: Path) -> TextIO:
    if str(path) == "-":
        return sys.stdin
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _prompts(file: TextIO, format_: Format, turns: Turns, path: Path) -> Iterator[FilePrompt]:
    start = file.read(CHUNK)
    if format_ == "auto":
        format_ = FIRST.get(start.lstrip()[:1], "text")
    if format_ == "text":
        yield from (line.rstrip("\n") for line in _lines(start, file) if line.strip())
        return
    records = _json_lines(start, file) if format_ == "jsonl" else array_elements(start, file)
    yield from _prompts_of_all(records, turns, path)


def _prompts_of_all(records: Iterator[Any], turns: Turns, path: Path) -> Iterator[FilePrompt]:
    for number in count(1):
        try:
            found = prompts_of(next(records), turns)
        except StopIteration:
            return
        except ValueError as error:
            raise BenchError(f"{path}: record {number}: {error}") from None
        yield from found


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file. Raises BenchError where pyarrow is not installed, ValueError for a file that is none."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise BenchError(f"{path}: Parquet needs pyarrow: pip install 'baton-serve[parquet]'") from None
    with ParquetFile(path) as file:
        for batch in file.iter_batches(PARQUET_ROWS):
            yield from batch.to_pylist()


def _lines(start: str, file: TextIO) -> Iterator[str]:
    """The characters that were read already, then the rest."""
    *whole, last = start.split("\n")
    yield from whole
    yield last + file.readline()
    yield from file


def _json_lines(start: str, file: TextIO) -> Iterator[Any]:
    return (json.loads(line) for line in _lines(start, file) if line.strip())


def array_elements(start: str, file: TextIO) -> Iterator[Any]:
    """The elements of a JSON array that begins in `start`, decoded as the file is read. Raises ValueError."""
    decoder, buffer, at, ended = json.JSONDecoder(), start.lstrip(), 1, False
    if not buffer.startswith("["):
        raise ValueError("a JSON array is expected")
    while True:
        at = _skip(buffer, at)
        if buffer[at : at + 1] == "]":
            return
        try:
            element, at = decoder.raw_decode(buffer, at)
            yield element
        except json.JSONDecodeError:
            if ended or len(buffer) - at > MAX_ELEMENT_CHARACTERS:
                raise
            more = file.read(CHUNK)
            buffer, at, ended = buffer[at:] + more, 0, not more


def _skip(buffer: str, at: int) -> int:
    while at < len(buffer) and (buffer[at].isspace() or buffer[at] == ","):
        at += 1
    return at


def prompts_of(record: Any, turns: Turns) -> list[FilePrompt]:
    """The prompts of one record: one for a request, one for each question of a conversation. Raises ValueError."""
    match record:
        case str():
            return [record]
        case {"body": dict() as body}:
            return prompts_of(body, turns)
        case {"hash_ids": [*ids]}:
            return [BlockIds(_numbers(ids))]
        case {"messages": [*messages]}:
            return [_rendered(messages, record.get("tools"))]
        case {"conversations": [*said]} | {"conversation": [*said]}:
            return list(_questions(said, turns))
        case {"instruction": str(instruction), **rest}:
            return [_instruction(instruction, rest.get("context"))]
        case {"prompt": prompt} | {"input": prompt} | {"text": prompt}:
            return _bare(prompt)
    raise ValueError("neither prompt, messages, conversations, instruction nor hash_ids is in it")


def _bare(prompt: Any) -> list[FilePrompt]:
    """The prompts of a completion's `prompt`: one text, its tokens, or several of either."""
    match prompt:
        case str():
            return [prompt]
        case [int(), *_]:
            return [TokenIds(_numbers(prompt))]
        case [str() | list(), *_]:
            return [read for each in prompt for read in _bare(each)]
        case [dict(), *_]:
            return [_rendered(prompt, None)]
    raise ValueError("its prompt is neither text nor token ids")


def _instruction(instruction: str, context: object) -> str:
    """A record of Dolly's, as it is trained on: what is to be done, and the text that it is about, if any."""
    if context is None or context == "":
        return instruction
    if not isinstance(context, str):
        raise ValueError("context is text")
    return f"{instruction}\n\n{context}"


def _numbers(ids: list[Any]) -> list[int]:
    if not all(isinstance(each, int) for each in ids):
        raise ValueError("ids are whole numbers")
    return ids


def _rendered(messages: list[Any], tools: Any) -> str:
    """What templates have in common: tools first, then each message behind its role."""
    said = [f"tools: {json.dumps(tools, sort_keys=True)}\n"] if tools else []
    return "".join([*said, *(_message(message) for message in messages)])


def _questions(said: list[Any], turns: Turns) -> Iterator[str]:
    """Each prompt contains everything before it."""
    asked = ""
    for message in said:
        asked += _message(message)
        if _role(message) in ("human", "user"):
            yield asked
            if turns == "first":
                return


def _role(message: Any) -> str:
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise ValueError("a message without role")
    return role


def _message(message: Any) -> str:
    role = _role(message)
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        content = "\n".join(part.get("text") or json.dumps(part) for part in content if isinstance(part, dict))
    if content is None and message.get("tool_calls"):
        content = json.dumps(message["tool_calls"])
    return f"{role}: {content or ''}\n"
