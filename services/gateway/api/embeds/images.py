"""Images, videos and sounds in a chat's messages: what may be given, in the body or at an address, and which."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from services.gateway.api.errors import RequestError, abbreviated, invalid, not_allowed, unsupported
from services.gateway.api.generation import RequestLimits
from services.gateway.api.media.source import IMAGE, SOUND, VIDEO, MediaKind, MediaSource
from shared.messages.model_card import ModelCard

MAX_URL_CHARS = 2048
LOW_DETAIL_SIDE = 512
"""Pixels of the longer side of an image that is asked for with `detail` `low`, as OpenAI has it."""
_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<parameters>[^,]*),", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}
_ALSO_CALLED = {"image/jpg": "image/jpeg"}
_FIELDS = {IMAGE: ("url", "detail"), VIDEO: ("url",), SOUND: ("url",)}


def read_media(
    kind: MediaKind, part: dict[str, Any], path: str, number: int, card: ModelCard, limits: RequestLimits
) -> MediaSource:
    """Reads `{"type": "image_url", "image_url": {"url": …}}`, or the same of a video, at a path of the body. `number`:
    of the part among those that become rows. Raises RequestError 400."""
    if {IMAGE: card.images, VIDEO: card.shown_videos, SOUND: card.sounds}[kind] is None:
        what = (
            f"a part of type '{part['type']}', which is not text, is not supported: {card.name} takes no {kind.noun}s"
        )
        raise RequestError(400, f"{path}.type: {what}", param=f"{path}.type", code="unsupported_parameter")
    name, given = f"{path}.{part['type']}", part.get(part["type"])
    if part["type"] == SOUND.part:
        return _sound(given, name, number)
    if not isinstance(given, dict) or not isinstance(url := given.get("url"), str):
        raise not_allowed(name, given, '{"url": "…"} is')
    for key in given:
        if key not in _FIELDS[kind]:
            raise unsupported(f"{name}.{key}", f"{abbreviated(key)} of {kind.a_noun}")
    max_side = read_detail(given.get("detail"), f"{name}.detail")
    return _of_url(kind, url, f"{name}.url", number, limits)._replace(max_side=max_side)


def _sound(given: Any, name: str, number: int) -> MediaSource:
    """Reads `{"data": …, "format": "wav"}`, as OpenAI has it."""
    match given:
        case {"data": str(data), "format": str(form)} if len(given) == 2:
            if form not in SOUND.media_types:
                raise not_allowed(f"{name}.format", form, f"{', '.join(SOUND.media_types)} are")
        case _:
            raise not_allowed(name, given, '{"data": "…", "format": "wav"} is')
    decoded = _decoded(SOUND, data, f"{name}.data", "base64 of a sound's file is")
    return MediaSource(number, f"{name}.data", data=decoded, kind=SOUND)


def read_detail(detail: Any, name: str) -> int | None:
    """Returns how long the longer side of an image may be, in pixels; None: as long as it is, which `auto` and `high`
    ask for. Raises RequestError 400."""
    if detail not in (None, "auto", "low", "high"):
        raise not_allowed(name, detail, "'auto', 'low' and 'high' are")
    return LOW_DETAIL_SIDE if detail == "low" else None


def foreign_image(
    field: str, *, url: str | None = None, encoded: str | None = None, max_side: int | None = None
) -> dict[str, Any]:
    """The part of a chat's message that stands for an image of another API. `field`: the client's name of it;
    `encoded`: its file in base64, where it has no URL; `max_side`: as `MediaSource` has it."""
    return {"type": IMAGE.part, "field": field, "url": url, "encoded": encoded, "max_side": max_side}


def read_foreign_image(part: dict[str, Any], number: int, card: ModelCard, limits: RequestLimits) -> MediaSource:
    """As `read_media`, of a `foreign_image`."""
    field, url = part["field"], part["url"]
    if card.images is None:
        reason = f"an image is not supported: {card.name} takes no images"
        raise RequestError(400, f"{field}: {reason}", param=field, code="unsupported_parameter")
    if url is not None:
        return _of_url(IMAGE, url, field, number, limits)._replace(max_side=part["max_side"])
    data = _decoded(IMAGE, part["encoded"], field, "base64 of an image's file is")
    return MediaSource(number, field, data=data)


def _of_url(kind: MediaKind, url: str, field: str, number: int, limits: RequestLimits) -> MediaSource:
    if url[:5].lower() == "data:":
        return MediaSource(number, field, data=_data(kind, url, field), kind=kind)
    check_url(url, field, limits.image_hosts, kind)
    return MediaSource(number, field, url=url, kind=kind)


def _data(kind: MediaKind, url: str, name: str) -> bytes:
    head = _DATA.match(url[:256])
    if head is None:
        raise not_allowed(name, url, f"data:{'audio/wav' if kind == SOUND else kind.media_types[0]};base64,… is")
    given = head["type"].lower()
    if kind == SOUND and not given.startswith("audio/"):  # one format has many names there
        raise not_allowed(name, given, "of media types audio/… are")
    if kind != SOUND and _ALSO_CALLED.get(given, given) not in kind.media_types:
        raise not_allowed(name, given, f"of media types {', '.join(kind.media_types)} are")
    content, in_base64 = url[head.end() :], head["parameters"].lower().endswith(";base64")
    return _decoded(kind, content, name, "a data URI in base64 is", in_percent=not in_base64)


def _decoded(kind: MediaKind, content: str, name: str, allowed: str, *, in_percent: bool = False) -> bytes:
    """The file that is written in base64, or `in_percent` signs. Raises RequestError 400."""
    if len(content) > kind.max_bytes * 4 // 3 + 4:
        raise invalid(name, f"{len(content)} characters; {kind.noun}s of {kind.max_bytes} bytes at most are allowed")
    try:
        encoded = content.encode("ascii")
        data = unquote_to_bytes(encoded) if in_percent else base64.b64decode(encoded, validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise not_allowed(name, content, allowed) from None
    if not data:
        raise invalid(name, f"the {kind.noun} is empty")
    if len(data) > kind.max_bytes:
        raise invalid(name, f"{kind.a_noun} of {len(data)} bytes is not allowed; of {kind.max_bytes} at most are")
    return data


def check_url(url: str, name: str, hosts: tuple[str, ...], kind: MediaKind = IMAGE) -> SplitResult:
    """Returns an address in parts, with the host as it is looked up. `hosts`: those that files may come from, as
    `HOST` or `HOST:PORT`. Raises RequestError 400."""
    if len(url) > MAX_URL_CHARS:
        raise invalid(name, f"{len(url)} characters; addresses of {MAX_URL_CHARS} at most are allowed")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip(".").lower(), parts.port
    except ValueError:
        raise not_allowed(name, url, "an http or https URL, or a data URI, is") from None
    if parts.scheme not in _PORTS or not host or not url.isascii() or not url.isprintable():
        raise not_allowed(name, url, "an http or https URL, or a data URI, is")
    if "@" in parts.netloc:
        raise not_allowed(name, url, "without a user and a password it is")
    port = _PORTS[parts.scheme] if port is None else port
    allowed = {entry.lower() for entry in hosts}
    if f"{host}:{port}" not in allowed and not (host in allowed and port == _PORTS[parts.scheme]):
        known = f"allowed are {', '.join(sorted(allowed))}" if allowed else "no host is allowed (gateway.image_hosts)"
        raise invalid(name, f"{kind.noun}s may not be fetched from {abbreviated(f'{host}:{port}')}; {known}")
    return parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}", fragment="")
