"""The values of `reasoning_effort`, and what an operator has them mean to a chat template that knows others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from services.gateway.api.errors import abbreviated
from shared.packing import NOT_DECODED
from shared.settings import UpOption

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ReasoningEffortMap = Annotated[
    str,
    Meta(
        description="What values of `reasoning_effort` are to a chat template that knows others: a JSON object such as "
        '{"xhigh": "max"}. Values that it does not name stay as they are.'
    ),
    UpOption("Model"),
]
"""vLLM's `--reasoning-effort-map`."""


def read_effort_map(text: str) -> Mapping[str, str]:
    """Raises ValueError for what is none."""
    try:
        efforts = msgspec.json.decode(text, type=dict[str, str])
    except NOT_DECODED:
        allowed = f"{abbreviated(text)} is not allowed; a JSON object of efforts and texts is"
        raise ValueError(f"reasoning_effort_map: {allowed}") from None
    for effort in efforts:
        if effort not in REASONING_EFFORTS:
            allowed = f"{abbreviated(effort)} is not allowed; {', '.join(REASONING_EFFORTS)} are"
            raise ValueError(f"reasoning_effort_map: {allowed}")
    return efforts
