"""Images and videos beside a prompt of text, as vLLM's `multi_modal_data` has them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.offline.errors import InvalidRequest

KINDS = {"image": "image/png", "video": "video/mp4"}
"""Those that are taken, and what files without a name are said to be: who decodes them looks for himself."""
_VIDEO_SUFFIXES = {".webm": "video/webm"}
_ALLOWED = {
    "image": "a PIL.Image, the bytes of a file, a Path, or a URL",
    "video": "the bytes of a file, a Path, or a URL",
}
_AS_IT_IS = "{{ prompt }}"
"""A chat template: a prompt of text already has what stands for its images, and is not to be changed."""


def chat_of(prompt: object, data: object, field: str) -> dict[str, Any]:
    """The fields of a chat that is this prompt with these media, in the order in which it shows them. Raises
    InvalidRequest."""
    if not isinstance(prompt, str):
        raise InvalidRequest(f"{field}: multi_modal_data is allowed beside a prompt of text only", field)
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"{field}.multi_modal_data: {{'image': …, 'video': …}} is allowed", field)
    parts = []
    for kind, given in data.items():
        name = f"{field}.multi_modal_data.{kind}"
        if kind not in KINDS:
            raise InvalidRequest(f"{name} is not allowed; {' and '.join(KINDS)} are", field)
        several = given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]
        parts += [_part(kind, each, name) for each in several]
    return {
        "messages": [{"role": "user", "content": parts}],
        "chat_template": _AS_IT_IS,
        "chat_template_kwargs": {"prompt": prompt},
        "add_special_tokens": True,
    }


def _part(kind: str, given: Any, name: str) -> dict[str, Any]:
    match given:
        case str():
            url = given
        case bytes():
            url = _data_uri(given, KINDS[kind])
        case Path():
            url = _data_uri(given.read_bytes(), _VIDEO_SUFFIXES.get(given.suffix.lower(), KINDS[kind]))
        case _ if kind == "image" and hasattr(given, "save"):
            file = io.BytesIO()
            (given if given.mode in ("RGB", "RGBA", "L") else given.convert("RGB")).save(file, "PNG")
            url = _data_uri(file.getvalue(), KINDS[kind])
        case _:
            raise InvalidRequest(f"{name}: a {type(given).__name__} is not allowed; {_ALLOWED[kind]} is", name)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _data_uri(file: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"
