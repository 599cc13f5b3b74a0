"""Whether a chat's prompt ends within thoughts, and what that means for a grammar that binds behind them."""

from __future__ import annotations

import json

import msgspec
from msgspec.structs import replace

from shared.dialects import THINKING_MARKS, Thinking
from shared.messages.generation import Grammar
from shared.messages.tokenizer import ChatPrompt
from shared.structural_tags import ANY_TEXT, as_format, either, regex, sequence, tag, tagged

MARKS = tuple(dict.fromkeys(THINKING_MARKS.values()))
SPACE = regex("[ \\n]{0,4}")
"""What may stand between thoughts and the answer."""
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
    if grammar is None or thinking == "open":
        return grammar
    marks = next((marks for marks in MARKS if marks.end == grammar.after), None)
    if marks is None:
        return grammar
    if thinking == "closed":
        return replace(grammar, after="")
    inner = as_format(grammar)
    if inner is None:
        return grammar
    thoughts = tag(marks.start, ANY_TEXT, marks.end)
    text = json.dumps(tagged(either(inner, sequence(thoughts, SPACE, inner))), ensure_ascii=False)
    return Grammar("structural_tag", text)
