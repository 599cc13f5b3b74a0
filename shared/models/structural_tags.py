"""Grammars as parts of one another: xgrammar's structural tags as plain objects, built without xgrammar.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
from typing import Any

from shared.messages.generation import Grammar

Format = dict[str, Any]


def literal(text: str) -> Format:
    """Matches exactly this text."""
    return {"type": "const_string", "value": text}


def either(*formats: Format) -> Format:
    """One of the formats."""
    return {"type": "or", "elements": list(formats)}


def sequence(*formats: Format) -> Format:
    """The formats one behind the other."""
    return {"type": "sequence", "elements": list(formats)}


def perhaps(content: Format) -> Format:
    """The format, or nothing."""
    return {"type": "optional", "content": content}


def regex(pattern: str) -> Format:
    """Any text that the regular expression matches as a whole."""
    return {"type": "regex", "pattern": pattern}


def tag(begin: str, content: Format, end: str | list[str]) -> Format:
    """The content between `begin` and `end`, of which there may be several to choose from."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY_TEXT: Format = {"type": "any_text"}


SPACE_AFTER_THOUGHTS = regex("[ \\n]{0,4}")


def perhaps_behind_thoughts(content: Format, start: str, end: str) -> Format:
    """The format, at once or behind reasoning of any length between the two marks."""
    return either(content, sequence(tag(start, ANY_TEXT, end), SPACE_AFTER_THOUGHTS, content))


def tagged(content: Format) -> Format:
    """A whole structural tag."""
    return {"type": "structural_tag", "format": content}


def as_format(grammar: Grammar) -> Format | None:
    """A grammar as a part of others. None where its text is not what it should be, which its compiler will say."""
    try:
        match grammar.kind:
            case "json":
                space = {"max_whitespace_cnt": 1} if grammar.compact else {}
                return {"type": "json_schema", "json_schema": json.loads(grammar.text), **space}
            case "regex":
                return regex(grammar.text)
            case "grammar":
                return {"type": "grammar", "grammar": grammar.text}
            case "choice":
                return either(*(literal(text) for text in json.loads(grammar.text)))
            case "structural_tag":
                inner = json.loads(grammar.text).get("format")
                return inner if isinstance(inner, dict) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
