"""What is said between `baton bench peers` and the process in which transformers generates. No torch."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from services.worker.measure.roofline.wire import DeviceChoice, DtypeName

PeerAttention = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"]
"""As transformers calls them; auto: its own choice: a flash attention that is installed, sdpa, or eager."""


class PeerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process's argument: which model, and what will be asked of it."""

    folder: str
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: the weights that our workers make up for the same shape."""
    device: DeviceChoice = "auto"
    dtype: DtypeName = "auto"
    attention: PeerAttention = "auto"
    threads: int | None = None
    prompt_tokens: int
    """Of the longest prompt."""
    output_tokens: int
    """Of the longest answer."""
    requests: int
    """At a time, at the most."""
    settings: dict[str, Any] = {}
    """Fields of transformers' ContinuousBatchingConfig; what is not there it chooses itself."""


class PeerRequest(Struct, frozen=True, array_like=True):
    """A request, a line of standard input."""

    number: int
    tokens: list[int]
    max_tokens: int


class PeerReady(Struct, frozen=True, kw_only=True, tag="ready"):
    """transformers has loaded the model and takes requests from here on."""

    transformers: str
    """Its version."""
    device: str
    dtype: str
    attention: str
    """That it settled on."""
    load_seconds: float
    warm_up_seconds: float
    settings: dict[str, Any]
    """Those of its batching that tell most of its speed."""


class PeerRefused(Struct, frozen=True, tag="refused"):
    """The peer has failed and ends."""

    reason: str


class PeerAnswer(Struct, frozen=True, tag="answered"):
    """A whole answer: its tokens, and when transformers had each (perf_counter, a clock that all processes share)."""

    number: int
    tokens: list[int]
    times: list[float]
    error: str | None = None


PeerMessage = PeerReady | PeerRefused | PeerAnswer
"""A line of standard output."""
