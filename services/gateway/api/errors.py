"""Errors in the form of OpenAI's API, and strict decoding of JSON bodies into them.

Every error names the field, its value, and what is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct, structs

from shared.messages.gateway import ErrorKind
from shared.packing import NOT_DECODED

STATUS: dict[ErrorKind, int] = {
    "invalid_request": 400,
    "too_large": 413,
    "overloaded": 429,
    "poisoned": 500,
    "unavailable": 503,
}

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class RequestError(Exception):
    """Ends a request with an HTTP status and an error body. `param` names the field at fault, `retry_after` is in
    seconds. `elsewhere`: the request is in order, and another cluster could serve it now."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        elsewhere: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.elsewhere = retry_after, elsewhere

    def body(self) -> bytes:
        """The JSON of OpenAI's error object."""
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, str | None]:
        """The fields of OpenAI's error object."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        return _TYPES.get(self.status, "invalid_request_error")


def invalid(param: str, message: str) -> RequestError:
    """Makes a 400 for the field `param`."""
    return RequestError(400, f"{param}: {message}", param=param)


def not_allowed(param: str, value: object, rule: str) -> RequestError:
    """Makes a 400 for a value of the field `param`; `rule` says what is allowed."""
    return invalid(param, f"{abbreviated(value)} is not allowed; {rule}")


def unsupported(param: str, what: str) -> RequestError:
    """Makes a 400 for a value that the API defines and this server does not support."""
    return RequestError(400, f"{param}: {what} is not supported", param=param, code="unsupported_parameter")


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with the names that fields have in another API; `names`: ours and theirs."""
    if error.param is None:
        return error
    found = next((name for name in sorted(names, key=len, reverse=True) if error.param.startswith(name)), None)
    if found is None:
        return error
    message, param = error.message.replace(found, names[found], 1), names[found] + error.param[len(found) :]
    return RequestError(error.status, message, param=param, code=error.code, retry_after=error.retry_after)


def hosted_tool(param: str, kind: str) -> RequestError:
    """Makes a 400 for a tool that a server would run: the gateway calls nobody's servers for its clients."""
    instead = ": call the MCP server in the client, and give its tools as functions" if kind == "mcp" else ""
    text = f"{param}: a tool of type {abbreviated(kind)}, which a server would run, is not supported{instead}"
    return RequestError(400, text, param=param, code="unsupported_parameter")


def aborted() -> RequestError:
    """Makes a 410 for a request that an operator has ended, where there is nothing to answer with."""
    return RequestError(410, "the request was aborted by an operator", code="aborted")


def abbreviated(value: object, limit: int = 80) -> str:
    """Formats a client's value for an error message, at most `limit` characters of it."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


T = TypeVar("T")

_raw_items = msgspec.json.Decoder(list[msgspec.Raw])
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""A body's values by their names, none of them decoded; names that are not known are there, too."""
MAX_DEPTH = 64
"""Levels of nested arrays and objects in a field that is forwarded unchanged."""
MAX_VALUES = 65_536
"""Values within such a field."""
MAX_NAME = 100
"""Characters of a name that the client made up, in an error."""
MAX_SHOWN = 4096
"""Bytes of a value that is decoded to be shown in an error; of a larger one its JSON's begin is."""


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Returns the body as the decoder's type. Raises RequestError 400."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            if (fault := _fault(msgspec.json.decode(body, type=msgspec.Raw), decoder.type, "")) is None:
                raise
            raise fault from None
    except NOT_DECODED as error:
        raise _malformed(body, error) from None


def check_depth(field: str, value: Any, max_values: int | None = MAX_VALUES) -> None:
    """Raises RequestError 400 for a value nested so deeply that a later encoder might fail on it, or of so many values
    that whoever takes it on would be held up."""
    level, depth, count = [value], 0, 0
    while level:
        if depth > MAX_DEPTH:
            raise invalid(field, f"nested too deeply; at most {MAX_DEPTH} levels are allowed")
        if max_values is not None and count > max_values:
            raise invalid(field, f"too many values; at most {max_values} are allowed")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        count += len(below)
        level, depth = below, depth + 1


def check_packable(field: str, value: Any) -> None:
    """Like `check_depth`, for a value that is sent on as MessagePack: its integers have 64 bits. Raises RequestError
    400."""
    check_depth(field, value)
    _check_integers(field, value)


def _check_integers(path: str, value: Any) -> None:
    match value:
        case int() if not -(2**63) <= value < 2**64:
            raise not_allowed(path, value, "integers must be at least -2^63 and at most 2^64 - 1")
        case dict():
            for key, item in value.items():
                _check_integers(f"{path}.{key[:80]}", item)
        case list():
            for i, item in enumerate(value):
                _check_integers(f"{path}[{i}]", item)


def _fault(given: msgspec.Raw, kind: Any, path: str) -> RequestError | None:
    """What is wrong with a value that has to be of a type, found by taking it apart: the decoder says where it is in
    words alone, which another release may choose anew. None: nothing is. Nothing large is made objects of, which would
    take half a minute of 16 MiB. Raises NOT_DECODED."""
    try:
        msgspec.json.decode(given, type=kind)
    except msgspec.ValidationError as error:
        if (inside := _fault_inside(given, kind, path)) is not None:
            return inside
        text = str(error)[:1].lower() + str(error)[1:]
        return _mistyped(path, given, text) if path else invalid("body", text)
    return None


def _fault_inside(given: msgspec.Raw, kind: Any, path: str) -> RequestError | None:
    kinds, begin = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,), bytes(memoryview(given)[:1])
    inner = f"{path}." if path else ""
    if begin == b"[":
        of = next((get_args(each)[0] for each in kinds if get_origin(each) is list), Any)
        items = [] if of is Any else _raw_items.decode(given)
        return _fault_among(((f"{path}[{i}]", item) for i, item in enumerate(items)), of)
    if begin != b"{":
        return None
    if of := next((get_args(each)[1] for each in kinds if get_origin(each) is dict), None):
        return None if of is Any else _fault_among(((path, item) for item in FIELDS.decode(given).values()), of)
    tagged = {each.__struct_config__.tag: each for each in kinds if isinstance(each, type) and issubclass(each, Struct)}
    if len(tagged) > 1:
        name, fields = next(iter(tagged.values())).__struct_config__.tag_field or "", FIELDS.decode(given)
        if name not in fields:
            return invalid(f"{inner}{name}", "this field is required")
        if (found := tagged.get(_text(fields[name]))) is None:
            return _mistyped(f"{inner}{name}", fields[name], f"{', '.join(map(repr, tagged))} are")
        return _fault_of_fields(fields, found, inner)
    return next((_fault_of_fields(FIELDS.decode(given), each, inner) for each in tagged.values()), None)


def _fault_among(items: Iterable[tuple[str, msgspec.Raw]], kind: Any) -> RequestError | None:
    """The first of the values, each with its path, that is not of the type."""
    decoder = msgspec.json.Decoder(kind)
    for path, item in items:
        try:
            decoder.decode(item)
        except msgspec.ValidationError:
            return _fault(item, kind, path)
    return None


def _fault_of_fields(items: dict[str, msgspec.Raw], kind: type[Struct], prefix: str) -> RequestError | None:
    fields, config = {field.encode_name: field for field in structs.fields(kind)}, kind.__struct_config__
    for name, item in items.items():
        if name not in fields and config.forbid_unknown_fields and name != config.tag_field:
            param = prefix + (name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…")
            return RequestError(400, f"{param}: this field is not known", param=param, code="unsupported_parameter")
        if name in fields and (fault := _fault(item, fields[name].type, prefix + name)):
            return fault
    missing = next((name for name, field in fields.items() if field.required and name not in items), None)
    return None if missing is None else invalid(prefix + missing, "this field is required")


def _mistyped(path: str, given: msgspec.Raw, rule: str) -> RequestError:
    if len(given) <= MAX_SHOWN:
        return not_allowed(path, msgspec.json.decode(given), rule)
    begin = bytes(memoryview(given)[:MAX_NAME]).decode(errors="replace")
    return invalid(path, f"{begin}… is not allowed; {rule}")


def _text(given: msgspec.Raw) -> str | None:
    try:
        return msgspec.json.decode(given, type=str)
    except msgspec.ValidationError:
        return None


def most_values(body: bytes) -> int:
    """The most values that there are in a body."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _malformed(body: bytes, error: Exception) -> RequestError:
    """Explains JSON that the strict decoder refuses: the standard library's lenient one may find the field at fault,
    where there are not so many values that it would take long."""
    try:
        lenient = json.loads(body) if most_values(body) <= MAX_VALUES else None
    except (ValueError, RecursionError):
        return invalid("body", f"not valid JSON ({str(error)[:120]})")
    path = _invalid_path(lenient, "", 0)
    if path is None:
        return invalid("body", f"not valid JSON ({str(error)[:120]})")
    return invalid(path or "body", "NaN, Infinity and lone surrogates are not allowed in JSON")


def _invalid_path(value: Any, path: str, depth: int) -> str | None:
    """The path of the first value that strict JSON in UTF-8 cannot contain."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, str):
        return None if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value) else path
    if isinstance(value, list):
        items: Any = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        if any(_invalid_path(key, path, depth + 1) is not None for key in value):
            return path
        items = ((f"{path}.{key[:MAX_NAME]}".lstrip("."), item) for key, item in value.items())
    else:
        return None
    return next((found for where, item in items if (found := _invalid_path(item, where, depth + 1)) is not None), None)
