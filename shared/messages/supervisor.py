"""What the local supervisor hears: how many of a service there shall be. Asked by a coordinator's admin endpoint."""

from __future__ import annotations

from msgspec import Struct


class Scale(Struct, frozen=True, array_like=True, tag=True):
    """Answered by `Scaled` once the processes are started or told to drain."""

    service: str
    """gateway, tokenizer, detokenizer, coordinator, or a pool: engines, prefill, decode."""
    count: int


class Scaled(Struct, frozen=True, array_like=True, tag=True):
    started: tuple[str, ...]
    stopping: tuple[str, ...]


class ScaleRefused(Struct, frozen=True, array_like=True, tag=True):
    message: str


ScaleAnswer = Scaled | ScaleRefused
