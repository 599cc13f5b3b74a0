"""Documents and search results of a turn, as texts that name them. Those that have no text (PDF, files) are refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

from services.gateway.api.errors import abbreviated, not_allowed, unsupported

_FORMS = '{"type": "text", "media_type": "text/plain", "data": "…"} or {"type": "content", "content": …} is'


def document_text(block: dict[str, Any], where: str) -> str:
    """Returns what the model reads of a `document`. Raises RequestError."""
    named = {name: _named(block, name, where) for name in ("title", "context")}
    return _marked(block, where, named, _source(block.get("source"), f"{where}.source"))


def search_result_text(block: dict[str, Any], where: str) -> str:
    """Returns what the model reads of a `search_result`. Raises RequestError."""
    named = {name: _named(block, name, where, required=True) for name in ("source", "title")}
    return _marked(block, where, named, texts(block.get("content"), f"{where}.content"))


def texts(blocks: Any, where: str) -> str:
    """Returns the lines of a list of text blocks. Raises RequestError."""
    if not isinstance(blocks, list):
        raise not_allowed(where, blocks, "a list of blocks of type text is")
    return "\n".join(plain_text(block, f"{where}[{i}]") for i, block in enumerate(blocks))


def plain_text(block: Any, where: str) -> str:
    """Returns a text block's text. Raises RequestError for every other block."""
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise not_allowed(where, block, '{"type": "text", "text": "…"} is')
        case {"type": str(kind)}:
            raise unsupported(f"{where}.type", f"a block of type {abbreviated(kind)} here")
        case _:
            raise not_allowed(where, block, "a block with a type is")


def _source(source: Any, where: str) -> str:
    match source:
        case {"type": "text", "data": str(text)}:
            if (kind := source.get("media_type", "text/plain")) != "text/plain":
                raise not_allowed(f"{where}.media_type", kind, "'text/plain' is")
            return text
        case {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": blocks}:
            return texts(blocks, f"{where}.content")
        case {"type": "base64" | "url" | "file" as kind}:
            raise unsupported(
                f"{where}.type", f"a document of type {abbreviated(kind)}, of which a text is to be made,"
            )
        case _:
            raise not_allowed(where, source, _FORMS)


def _named(block: dict[str, Any], name: str, where: str, *, required: bool = False) -> str | None:
    value = block.get(name)
    if isinstance(value, str) or (value is None and not required):
        return value
    raise not_allowed(f"{where}.{name}", value, "a text is")


def _marked(block: dict[str, Any], where: str, named: dict[str, str | None], text: str) -> str:
    """The text between marks, behind what is said of it, so that the model knows one from another. Where it has such a
    mark itself the marks are numbered: no text ends before its end."""
    match block.get("citations"):
        case None | {"enabled": False}:
            pass
        case {"enabled": True}:
            raise unsupported(f"{where}.citations", "citing")
        case citations:
            raise not_allowed(f"{where}.citations", citations, '{"enabled": false} is')
    kind = block["type"]
    content = "\n".join([*(f"{name}: {value}" for name, value in named.items() if value is not None), text])
    taken = set(re.findall(rf"</{kind}((?:-\d+)?)>", content))
    suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    mark = kind + next(suffix for suffix in suffixes if suffix not in taken)
    return f"<{mark}>\n{content}\n</{mark}>"
