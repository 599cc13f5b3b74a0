"""`metadata`: what a client notes on a response, a conversation or a stored chat."""

from __future__ import annotations

from services.gateway.api.errors import invalid, not_allowed

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
"""Characters. OpenAI's limits."""


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises RequestError 400 for more, or for longer texts, than allowed."""
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"{len(metadata)} pairs are not allowed; at most {MAX_METADATA}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            rule = f"keys have at most {MAX_METADATA_KEY} characters, values at most {MAX_METADATA_VALUE}"
            raise not_allowed("metadata", {key: value}, rule)
