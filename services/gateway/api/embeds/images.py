"""Images in a chat's messages, given in the body or by an address; what may be given, and where it may be."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from services.gateway.api.errors import RequestError, abbreviated, invalid, not_allowed, unsupported
from services.gateway.api.generation import ImageSource, RequestLimits
from shared.messages.encoder import MAX_IMAGE_BYTES
from shared.messages.model_card import ModelCard

PART = "image_url"
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
MAX_URL_CHARS = 2048
_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<parameters>[^,]*),", re.IGNORECASE)
_MAX_DATA_CHARS = MAX_IMAGE_BYTES * 4 // 3 + 4
_PORTS = {"http": 80, "https": 443}


def read_image(part: dict[str, Any], path: str, number: int, card: ModelCard, limits: RequestLimits) -> ImageSource:
    """Reads `{"type": "image_url", "image_url": {"url": …}}` at a path of the body. `number`: of the part among those
    that become rows. Raises RequestError 400."""
    if card.images is None:
        reason = f"a part of type '{PART}', which is not text, is not supported: {card.name} takes no images"
        raise RequestError(400, f"{path}.type: {reason}", param=f"{path}.type", code="unsupported_parameter")
    name, image = f"{path}.{PART}", part.get(PART)
    if not isinstance(image, dict) or not isinstance(url := image.get("url"), str):
        raise not_allowed(name, image, '{"url": "…"} is')
    for key in image:
        if key not in ("url", "detail"):
            raise unsupported(f"{name}.{key}", f"{abbreviated(key)} of an image")
    check_detail(image.get("detail"), f"{name}.detail", card.name)
    return _of_url(url, f"{name}.url", number, limits)


def check_detail(detail: Any, name: str, model: str = "the model") -> None:
    """Raises RequestError 400 for a resolution that the client wants: models have one."""
    if detail not in (None, "auto"):
        raise not_allowed(name, detail, f"only 'auto' is: {model} has one resolution")


def foreign_image(field: str, *, url: str | None = None, encoded: str | None = None) -> dict[str, Any]:
    """The part of a chat's message that stands for an image of another API. `field`: the client's name of it;
    `encoded`: its file in base64, where it has no URL."""
    return {"type": PART, "field": field, "url": url, "encoded": encoded}


def read_foreign_image(part: dict[str, Any], number: int, card: ModelCard, limits: RequestLimits) -> ImageSource:
    """As `read_image`, of a `foreign_image`."""
    field, url = part["field"], part["url"]
    if card.images is None:
        reason = f"an image is not supported: {card.name} takes no images"
        raise RequestError(400, f"{field}: {reason}", param=field, code="unsupported_parameter")
    if url is not None:
        return _of_url(url, field, number, limits)
    return ImageSource(number, field, data=_decoded(part["encoded"], field, "base64 of an image's file is"))


def _of_url(url: str, field: str, number: int, limits: RequestLimits) -> ImageSource:
    if url[:5].lower() == "data:":
        return ImageSource(number, field, data=_data(url, field))
    check_url(url, field, limits.image_hosts)
    return ImageSource(number, field, url=url)


def _data(url: str, name: str) -> bytes:
    head = _DATA.match(url[:256])
    if head is None:
        raise not_allowed(name, url, "data:image/png;base64,… is")
    if (kind := head["type"].lower()) not in MEDIA_TYPES:
        raise not_allowed(name, kind, f"of media types {', '.join(MEDIA_TYPES)} are")
    content = url[head.end() :]
    if head["parameters"].lower().endswith(";base64"):
        return _decoded(content, name, "a data URI in base64 is")
    return _decoded(content, name, "a data URI in base64 is", in_percent=True)


def _decoded(content: str, name: str, allowed: str, *, in_percent: bool = False) -> bytes:
    """The file that is written in base64, or `in_percent` signs. Raises RequestError 400."""
    if len(content) > _MAX_DATA_CHARS:
        raise invalid(name, f"{len(content)} characters; images of {MAX_IMAGE_BYTES} bytes at most are allowed")
    try:
        encoded = content.encode("ascii")
        data = unquote_to_bytes(encoded) if in_percent else base64.b64decode(encoded, validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise not_allowed(name, content, allowed) from None
    if not data:
        raise invalid(name, "the image is empty")
    if len(data) > MAX_IMAGE_BYTES:
        raise invalid(name, f"an image of {len(data)} bytes is not allowed; of {MAX_IMAGE_BYTES} at most are")
    return data


def check_url(url: str, name: str, hosts: tuple[str, ...]) -> SplitResult:
    """Returns an address in parts, with the host as it is looked up. `hosts`: those that images may come from, as
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
        raise invalid(name, f"images may not be fetched from {abbreviated(f'{host}:{port}')}; {known}")
    return parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}", fragment="")
