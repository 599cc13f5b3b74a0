"""What a process says that decodes a client's file, or the client's error where it says nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from services.gateway.api.errors import invalid
from shared.machine.helper_process import HelperDied, HelperSlow

_T = TypeVar("_T")


async def next_reply(
    replies: AsyncGenerator[bytes],
    decoder: msgspec.msgpack.Decoder[_T],
    field: str,
    *,
    noun: str,
    part: str,
    timeout: float,
) -> _T:
    """The next of `helper_replies`. `noun`: what the file is; `part`: what of it a reply has; `timeout`: seconds that
    one may take. Raises RequestError 400 for the client's `field` where none comes."""
    try:
        return decoder.decode(await anext(replies))
    except HelperSlow:
        raise invalid(field, f"decoding {part} of the {noun} takes more than {timeout:g} s") from None
    except (HelperDied, msgspec.MsgspecError):
        raise invalid(field, f"the {noun} could not be decoded: the process that did died of it") from None
