"""What changed between two JSON documents, as a JSON merge patch (RFC 7386): small where little changes, and applied by
a dozen lines in a browser."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]


def merge_patch(before: JsonObject, after: JsonObject) -> JsonObject:
    """Returns the patch that makes `after` of `before`; empty where they are equal. Neither may hold None as a value,
    which a merge patch cannot say: there it means that a field goes."""
    patch: JsonObject = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        former = before.get(name)
        if isinstance(value, dict) and isinstance(former, dict):
            if changed := merge_patch(former, value):
                patch[name] = changed
        elif value != former or name not in before:
            patch[name] = value
    return patch


def without_none(value: Any) -> Any:
    """Returns a document without fields that are None, floats rounded as people read them."""
    match value:
        case dict():
            return {name: without_none(each) for name, each in value.items() if each is not None}
        case list() | tuple():
            return [without_none(each) for each in value]
        case float():
            return round(value, 4)
        case _:
            return value
