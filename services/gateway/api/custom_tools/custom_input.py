"""The one text that a custom tool takes: as a schema for the model, and read again from what it writes."""

from __future__ import annotations

import json
import re
from typing import Any

from services.gateway.api.errors import not_allowed, unsupported

CUSTOM_PARAMETER = "input"


def custom_parameters(form: Any, path: str, *, nested: bool = False) -> dict[str, Any]:
    """Returns `parameters` and `strict` of the function that stands for a custom tool. `form`: its `format`, where the
    client has it at `path`. `nested`: whether a grammar is in a field of its own, as in chats. Raises RequestError
    400."""
    text: dict[str, Any] = {"type": "string"}
    grammar, where = form, path
    if nested and isinstance(form, dict) and form.get("type") == "grammar":
        grammar, where = form.get("grammar"), f"{path}.grammar"
    match form, grammar:
        case ((None | {"type": "text"}), _):
            strict = False
        case {"type": "grammar"}, {"syntax": "regex", "definition": str(pattern)}:
            text["pattern"], strict = f"^(?:{pattern})$", True
        case {"type": "grammar"}, {"syntax": "lark"}:
            raise unsupported(f"{where}.syntax", "a grammar of Lark's for the input of a tool")
        case _:
            described = '"syntax": "regex", "definition": "…"'
            described = f'"grammar": {{{described}}}' if nested else described
            raise not_allowed(path, form, f'{{"type": "text"}} or {{"type": "grammar", {described}}} is')
    schema = {
        "type": "object",
        "properties": {CUSTOM_PARAMETER: text},
        "required": [CUSTOM_PARAMETER],
        "additionalProperties": False,
    }
    return {"parameters": schema, "strict": strict}


def custom_arguments(text: str) -> str:
    """Returns the arguments of the chat's call for the input of a custom tool."""
    return json.dumps({CUSTOM_PARAMETER: text}, ensure_ascii=False)


_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_PARAMETER}"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\(?:[^u]|u[0-9a-fA-F]{4}|u(?![0-9a-fA-F]{0,3}\Z)))*')
"""The part of a string's rest in which no escape is cut."""
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
"""One of JSON's, or a backslash that begins none: nothing keeps a model from writing "\\d+"."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


class CustomInput:
    """Owns what has arrived of a custom call's arguments, and is not read as its input yet."""

    def __init__(self) -> None:
        self._unread = ""
        self._begun = self._ended = False

    def feed(self, arguments: str) -> str:
        """Returns what is known of the input beyond what was returned before, wherever the arguments are cut."""
        self._unread += arguments
        if not self._begun:
            if (begin := _BEGIN.match(self._unread)) is None:
                return ""
            self._begun, self._unread = True, self._unread[begin.end() :]
        if self._ended:
            return ""
        whole = _WHOLE.match(self._unread)
        assert whole is not None
        text = whole[0]
        self._ended = self._unread[len(text) : len(text) + 1] == '"'
        if not self._ended and (half := _HALF_PAIR.search(text)) is not None:
            text = text[: half.start()]
        self._unread = self._unread[len(text) :]
        text = _ESCAPE.sub(lambda escape: escape[0] if escape[1] else r"\\", text)
        return _SURROGATE.sub("\ufffd", json.loads(f'"{text}"', strict=False))

    def rest(self) -> str:
        """Returns what is left at the end: all of it where the arguments are not what was asked for."""
        return "" if self._begun else self._unread
