"""What a detokenizer hears: one message per step and engine, with all tokens of the requests that it holds."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import Attempt, EngineId, GatewayId, Incarnation, ModelName, RequestId
from shared.messages.generation import FinishReason, TokenLogprobs


class OpenStream(Struct, frozen=True, array_like=True, kw_only=True):
    """A request whose tokens will follow: all that turning them into text needs."""

    request: RequestId
    attempt: Attempt
    gateway: GatewayId
    model: ModelName
    context: bytes
    """Packed: the last few prompt tokens, then every output token of earlier attempts."""
    resumed: int
    """How many of `context`'s last tokens are output of earlier attempts."""
    sent_chars: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, because their keys and values were cached."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    trace: str | None = None


class NewTokens(Struct, frozen=True, array_like=True):
    request: RequestId
    attempt: Attempt
    position: int
    """Output index of the first of `tokens`; the receiver expects exactly what it has counted."""
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    """Set on a request's last entry, which may hold no token."""
    stop_token: int | None = None
    """The stop token that ended it (a requested one, not the end-of-sequence token); never part of the text."""
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Abandon(Struct, frozen=True, array_like=True):
    """The engine gave the request up (cancelled or failed): forget it. The gateway is told by the scheduler."""

    request: RequestId
    attempt: Attempt


class TokenBatch(Struct, frozen=True, array_like=True, kw_only=True):
    """scheduler → one detokenizer. `number` counts from 0 per (engine, epoch, detokenizer): a gap is a loss.

    Order of effect: `opened`, `entries`, `abandoned`.
    """

    engine: EngineId
    epoch: Incarnation
    number: int
    opened: tuple[OpenStream, ...] = ()
    entries: tuple[NewTokens, ...] = ()
    abandoned: tuple[Abandon, ...] = ()
