"""The settings of a detokenizer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.detokenizer.core.actions import MAX_STREAMS
from shared.config import ModelServiceConfig


class DetokenizerConfig(ModelServiceConfig, frozen=True, kw_only=True):
    """Every setting of a detokenizer, with its unit and bounds."""

    max_streams: Annotated[
        int,
        Meta(
            ge=1, description="Requests that it may hold; further ones fail and are dispatched to another detokenizer."
        ),
    ] = MAX_STREAMS
