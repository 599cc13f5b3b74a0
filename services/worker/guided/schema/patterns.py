"""Regular expressions within schemas: which of them mean the same when the whole string must match. Pure."""

from __future__ import annotations

import re

from services.worker.guided.schema.keywords import Schema, count_of, refuse

_OPAQUE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)

FORMATS = frozenset(
    {
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
    }
)
"""Those that are enforced; others are notes, as the specification has it by default. (Of the compiler's own, those of
JSON pointers let characters through that no JSON string holds.)"""


def string_form(schema: Schema, path: str) -> Schema:
    """A string's keywords as the compiler takes them. Raises GrammarRefused."""
    least, most = count_of(schema, "minLength") or 0, count_of(schema, "maxLength")
    if "pattern" in schema:
        if least or most is not None:
            raise refuse(f"{path}.pattern", "not supported together with minLength or maxLength; say it in the pattern")
        return {"type": "string", "pattern": checked_pattern(schema["pattern"], f"{path}.pattern")}
    if least or most is not None:
        # The compiler's own lengths let control characters through, which no JSON string holds.
        return {"type": "string", "pattern": f"^.{{{least},{'' if most is None else most}}}$"}
    if schema.get("format") in FORMATS:
        return {"type": "string", "format": schema["format"]}
    return {"type": "string"}


def checked_pattern(pattern: str, path: str) -> str:
    """The pattern, if strings that match it as a whole are strings that it is found in. Raises GrammarRefused."""
    plain = _OPAQUE.sub("x", pattern)
    for place, character in enumerate(plain):
        if character == "^" and plain[:place].strip("(|?:") and plain[place - 1] != "|":
            raise refuse(path, "^ is supported at the beginning only")
        if character == "$" and plain[place + 1 :].strip(")|") and plain[place + 1] != "|":
            raise refuse(path, "$ is supported at the end only")
    return pattern
