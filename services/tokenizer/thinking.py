"""Whether a chat's prompt ends within thoughts, and what that means for a grammar that binds behind them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.dialects import THINKING_MARKS, Thinking, ThinkingMarks
from shared.messages.generation import Grammar
from shared.messages.tokenizer import ChatPrompt

MARKS = tuple(dict.fromkeys(THINKING_MARKS.values()))
LOOKED_AT = 16
"""Tokens at a prompt's end that hold the marks which a template writes there."""


def thinking_at(end: str) -> Thinking | None:
    """By a prompt's last words, as the template wrote them."""
    end = end.rstrip()
    for marks in MARKS:
        if end.endswith(marks.start):
            return "open"
        if end.endswith(marks.end):
            return "closed"
    return None


def thinking_of_continued(prompt: ChatPrompt) -> Thinking:
    """By the message that is to be continued: its text goes on, unless it breaks off in the middle of thoughts."""
    final = msgspec.json.decode(prompt.messages)[-1].get("content")
    text = final if isinstance(final, str) else ""
    within = any(text.rfind(marks.start) > text.rfind(marks.end) for marks in MARKS)
    return "open" if within else "closed"


def adapted(grammar: Grammar | None, thinking: Thinking | None) -> Grammar | None:
    """The grammar for a prompt that ends so. Where nothing shows whether the model will think, it may do either."""
    marks = next((marks for marks in MARKS if grammar is not None and marks.end == grammar.after), None)
    if grammar is None or marks is None or thinking == "open":
        return grammar
    if thinking == "closed":
        return replace(grammar, after="")
    inner = _format(grammar)
    return grammar if inner is None else Grammar("structural_tag", _tag(_perhaps_thoughts(marks, inner)))


def _perhaps_thoughts(marks: ThinkingMarks, inner: dict[str, Any]) -> dict[str, Any]:
    thoughts = {"type": "tag", "begin": marks.start, "content": {"type": "any_text"}, "end": marks.end}
    space = {"type": "regex", "pattern": "[ \\n]{0,4}"}
    return {"type": "or", "elements": [inner, {"type": "sequence", "elements": [thoughts, space, inner]}]}


def _tag(content: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": content}, ensure_ascii=False)


def _format(grammar: Grammar) -> dict[str, Any] | None:
    """As part of a structural tag. None where the text is not what it should be: the compiler tells the client."""
    try:
        match grammar.kind:
            case "json":
                return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
            case "regex":
                return {"type": "regex", "pattern": grammar.text}
            case "grammar":
                return {"type": "grammar", "grammar": grammar.text}
            case "choice":
                choices = [{"type": "const_string", "value": text} for text in json.loads(grammar.text)]
                return {"type": "or", "elements": choices}
            case "structural_tag":
                tag = json.loads(grammar.text).get("format")
                return tag if isinstance(tag, dict) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
