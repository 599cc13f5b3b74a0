"""What is asked about an input: whether something is true, which of several it is, how much.

Each question becomes a text that ends with its options, a letter before each; how likely the model takes each letter to
be its answer's first token is how likely the option is.
"""

from __future__ import annotations

import string
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.errors import check_depth, invalid, not_allowed, unsupported

LETTERS = string.ascii_uppercase
"""Of the options, in their order. A capital letter is one token for most tokenizers."""
MAX_LEVELS = 10
REPLY = "Answer with the letter of one option and nothing else."


class Named(Struct, kw_only=True, forbid_unknown_fields=True):
    """What all questions have."""

    instructions: str | list[dict[str, Any]]
    name: str | None = None


class Predicate(Named, tag_field="type", tag="predicate"):
    """Whether what the instructions say is true."""


class Choice(Struct, forbid_unknown_fields=True):
    """One of several answers."""

    value: str | bool
    description: str = ""


class ChoiceQuestion(Named, tag_field="type", tag="choice", kw_only=True):
    """Which of several answers is right."""

    choices: list[Choice]


class Level(Struct, forbid_unknown_fields=True):
    """One level of a scale."""

    label: str
    description: str = ""


class ScoreQuestion(Named, tag_field="type", tag="score", kw_only=True):
    """Where on a scale the input is."""

    levels: list[Level]


Question = Predicate | ChoiceQuestion | ScoreQuestion


class _Option(NamedTuple):
    text: str
    description: str = ""


def check_question(question: Question, where: str) -> None:
    """Raises RequestError for too few or too many options, and for two that are the same."""
    match question:
        case ChoiceQuestion(choices=choices):
            _check_count(len(choices), len(LETTERS), f"{where}.choices")
            values = [(type(each.value), each.value) for each in choices]
            for i, value in enumerate(values):
                if value in values[:i]:
                    raise not_allowed(f"{where}.choices[{i}].value", value[1], "each value may be there once")
        case ScoreQuestion(levels=levels):
            _check_count(len(levels), MAX_LEVELS, f"{where}.levels")


def options(question: Question) -> int:
    """How many there are."""
    return len(_options(question))


def question_text(question: Question, where: str) -> str:
    """What the model reads of it, behind the input. Raises RequestError for instructions that are no text."""
    lines = [f"Question: {_instructions(question.instructions, f'{where}.instructions')}"]
    for letter, option in zip(LETTERS, _options(question), strict=False):
        lines.append(f"{letter}: {option.text}" + (f" - {option.description}" if option.description else ""))
    return "\n".join([*lines, REPLY])


def json_text(part: dict[str, Any], where: str) -> str:
    """The text of a part of type `input_json`. Raises RequestError."""
    data = part.get("data")
    if not isinstance(data, dict | list):
        raise not_allowed(f"{where}.data", data, "an object or an array of objects is")
    check_depth(f"{where}.data", data)
    return msgspec.json.encode(data).decode()


def _options(question: Question) -> list[_Option]:
    match question:
        case ChoiceQuestion(choices=choices):
            return [_Option(msgspec.json.encode(each.value).decode(), each.description) for each in choices]
        case ScoreQuestion(levels=levels):
            return [_Option(each.label, each.description) for each in levels]
        case Predicate():
            return [_Option("false"), _Option("true")]


def _check_count(given: int, most: int, where: str) -> None:
    if not 2 <= given <= most:
        raise invalid(where, f"{given} are not allowed; 2 to {most} are")


def _instructions(given: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(given, str):
        return given
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(given))


def _part(part: dict[str, Any], where: str) -> str:
    kind: Literal["input_text", "input_json"] | Any = part.get("type")
    if kind == "input_json":
        return json_text(part, where)
    if kind == "input_image":
        raise unsupported(f"{where}.type", "an image in a question")
    if kind != "input_text" or not isinstance(text := part.get("text"), str):
        raise not_allowed(where, part, '{"type": "input_text", "text": "…"} or {"type": "input_json", "data": …} is')
    return text
