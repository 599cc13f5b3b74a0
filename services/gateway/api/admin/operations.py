"""The bodies of operators' endpoints, in the shapes of vLLM's."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_ABORTED = 10_000
"""Ids that one request may name."""


class AbortFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/abort_requests`; without one all responses end."""

    request_ids: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=MAX_ABORTED)] = []


class ScaleFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/scale_elastic_ep`."""

    new_data_parallel_size: Annotated[int, Meta(ge=1, le=256)]
    """Engines that there shall be."""
    drain_timeout: Annotated[float, Meta(gt=0, le=3600)] = 120.0
    """Seconds in which they must be ready, and those that are too many gone."""
