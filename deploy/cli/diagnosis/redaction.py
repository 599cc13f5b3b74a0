"""Takes out of logs and settings what is nobody else's business: secrets, and whatever may be text of a request.

What is not known to be harmless goes: a log line keeps its numbers, the events that the code itself writes, and the
names of a few fields; of a traceback the frames stay, and not what the exception said.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from shared.packing import NOT_DECODED

PLACEHOLDER = "(removed)"
MIN_SECRET = 6
"""Characters below which a value is too short to be looked for everywhere."""
SECRET_NAME = re.compile(r"(?i)(^|_)(api_?keys?|keys?|passwords?|token|secrets?|credentials?|url|database|salt)$")
PATH_NAMES = frozenset({"keys_file"})
"""Settings that look like secrets by their names, and only say where something is."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")

HARMLESS_FIELDS = frozenset(
    (
        *("time", "level", "service", "instance", "event", "request", "trace", "attempt", "incarnation"),
        *(
            "engine",
            "gateway",
            "detokenizer",
            "coordinator",
            "child",
            "process",
            "node",
            "host",
            "source",
            "from",
            "to",
        ),
        *(
            "phase",
            "outcome",
            "status",
            "finish",
            "kind",
            "field",
            "unit",
            "tier",
            "stage",
            "layout",
            "operation",
            "call",
        ),
        *("endpoint", "model", "role", "rank", "device", "subject", "message_type", "asker"),
    )
)
"""Fields of log lines whose texts are names and words of Baton's own."""
_NAME = re.compile(r"[\w./:@+<>*=,()-]{0,200}(?: [\w./:@+<>*=,()-]{1,40}){0,3}")
"""What a harmless field may hold: a name, or up to four words."""
_LEVEL = r"[\w. ]+(?: if [\w. ]+ else [\w.]+)?"
_EVENT = re.compile(rf'\blog\.(?:debug|info|warning|error|exception|log)\(\s*(?:{_LEVEL},\s*)?"([^"\\]*)"')
_FRAME = re.compile(r'\s*File "[^"]+", line \d+, in \S+\s*$|Traceback \(most recent call last\):|\s*\^+\s*$')
_ERROR = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Timeout|Unavailable|Failed|Taken))\b.*", re.DOTALL
)


@cache
def own_events() -> frozenset[str]:
    """The events that Baton's code logs, as they are written there: constants, in which nothing of a request can be."""
    packages = Path(__file__).parents[3]
    folders = (packages / name for name in ("deploy", "kvstore", "services", "shared"))
    return frozenset(
        event for folder in folders for path in folder.rglob("*.py") for event in _EVENT.findall(path.read_text())
    )


def redacted_line(text: str) -> str:
    """A line of a service's log, without what may be of a request."""
    try:
        fields = msgspec.json.decode(text)
    except NOT_DECODED:
        return redacted_trace(text)
    if not isinstance(fields, dict):
        return _gone(text)
    return msgspec.json.encode({key: _field(key, value) for key, value in fields.items()}).decode()


def redacted_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What a process says of a hop of a request, as of a log line; of dotted names the last part counts."""
    return {name: _field(name.rpartition(".")[2], value) for name, value in attributes.items()}


def redacted_trace(text: str) -> str:
    """Lines of a traceback: its frames and the exception's class; of anything else how long it was."""
    return "\n".join(_trace_line(line) for line in text.splitlines())


def _trace_line(line: str) -> str:
    if not line.strip() or _FRAME.match(line):
        return line
    error = _ERROR.match(line.strip())
    return f"{error[1]}: {PLACEHOLDER}" if error is not None else _gone(line)


def _field(key: str, value: Any) -> Any:
    if key == "error" and isinstance(value, str):
        return redacted_trace(value)
    if key == "event" and isinstance(value, str):
        return value if value in own_events() else _gone(value)
    if isinstance(value, str):
        return value if key in HARMLESS_FIELDS and _NAME.fullmatch(value) else _gone(value)
    if isinstance(value, list):
        return [_field(key, each) for each in value]
    if isinstance(value, dict):
        return {name: _field(name, each) for name, each in value.items()}
    return value


def _gone(text: str) -> str:
    return f"({len(text)} characters removed)"


# Settings.


def redacted_settings(value: Any, name: str = "") -> Any:
    """Settings and states as plain objects, without what is a secret by its name; of URLs the user and password go."""
    if isinstance(value, Mapping):
        return {key: redacted_settings(each, name if is_secret(name) else str(key)) for key, each in value.items()}
    if is_secret(name):
        return _without_secret(value)
    if isinstance(value, list | tuple):
        return [redacted_settings(each, name) for each in value]
    return _USER_INFO.sub(f"{PLACEHOLDER}@", value) if isinstance(value, str) else value


def is_secret(name: str) -> bool:
    """Whether a setting is a secret, or may have one in it, by its name."""
    return name not in PATH_NAMES and SECRET_NAME.search(name) is not None


def _without_secret(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_secret(each) for each in value]
    if not isinstance(value, str) or not value or value.isdigit():
        return value
    return _USER_INFO.sub(f"{PLACEHOLDER}@", value) if "://" in value else PLACEHOLDER


def secrets_in(value: Any, name: str = "") -> Iterable[str]:
    """Yields the secrets themselves, wherever they are, so that they can be looked for elsewhere."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from secrets_in(each, name if is_secret(name) else str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from secrets_in(each, name)
    elif isinstance(value, str) and value:
        if is_secret(name) and "://" not in value and not value.isdigit():
            yield value
        for found in _USER_INFO.findall(value):
            yield found.removesuffix("@").rpartition(":")[2]


def without(text: str, secrets: Collection[str]) -> str:
    """The text without any of these, wherever it has them."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET:
            text = text.replace(secret, PLACEHOLDER)
    return text
