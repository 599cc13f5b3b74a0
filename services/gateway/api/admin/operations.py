"""The bodies of operators' endpoints, in the shapes of vLLM's."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.ids import ModelName

MAX_ABORTED = 10_000
"""Ids that one request may name."""
InstanceName = Annotated[str, Meta(min_length=1, max_length=64)]


class AbortFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/abort_requests`; without one all responses end."""

    request_ids: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=MAX_ABORTED)] = []


class DrainFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/admin/drain`."""

    instance: InstanceName
    """Or a pool of engines: engines, prefill, decode."""
    force: bool = False
    """Also the last of its kind, without which nothing is served."""


class UndrainFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/admin/undrain`."""

    instance: InstanceName


class ScalePoolFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/admin/scale`."""

    service: Literal["tokenizer", "encoder", "detokenizer", "gateway", "coordinator", "engines", "prefill", "decode"]
    count: Annotated[int, Meta(ge=0, le=256)]
    """Instances that there shall be."""
    host: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """In a stack of several; None: the first."""
    model: ModelName | None = None
    """Whose tokenizers, encoders or engines, in a stack that serves several models."""
    data_parallel_size: Annotated[int, Meta(ge=1, le=256)] | None = None
    """With engines that share experts: engines of each group from now on; None: as many as before."""


class StrikeFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/admin/strike`."""

    instance: InstanceName
    fault: Literal["kill", "pause"]
    """kill: at once, as by `kill -9`. pause: it stands still for a while."""
    seconds: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    """How long a process that is paused stands still."""
    host: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """Where it runs, in a stack of several hosts; None: on the first."""


class ScaleFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/scale_elastic_ep`."""

    new_data_parallel_size: Annotated[int, Meta(ge=1, le=256)]
    """Engines that there shall be."""
    drain_timeout: Annotated[float, Meta(gt=0, le=3600)] = 120.0
    """Seconds in which they must be ready, and those that are too many gone."""


class PauseFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of SGLang's `/pause_generation`."""

    mode: str = "abort"
    """abort: what is open ends. in_place: it stops where it is."""


class ContinueFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of SGLang's `/continue_generation`."""


class MemoryFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of SGLang's `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Annotated[list[str], Meta(max_length=8)] | None = None
    """Parts of an engine's memory; None: all, and no others are allowed."""
