"""Reads the JSON that operators send."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from shared.bus import EndpointError
from shared.packing import NOT_DECODED

R = TypeVar("R")


def parse(body: bytes, type_: type[R]) -> R:
    """The request in `body`; an empty one has no fields. Raises EndpointError 400."""
    try:
        return msgspec.json.decode(body.strip() or b"{}", type=type_)
    except NOT_DECODED as error:
        names = ", ".join(field.name for field in msgspec.structs.fields(type_))  # type: ignore[arg-type]
        raise EndpointError(400, f"{error}; a JSON object is expected, its fields may be {names}") from None
