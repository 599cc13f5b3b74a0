"""Messages to a detokenizer: one per step and engine, with all tokens of the requests that it holds."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import Attempt, Count, EngineId, GatewayId, Incarnation, ModelName, RequestId, TokenId
from shared.messages.dialects import Thinking
from shared.messages.generation import FinishReason, TokenLogprobs


class OpenStream(Struct, frozen=True, array_like=True, kw_only=True):
    """A request whose tokens will follow, with everything needed to turn them into text."""

    request: RequestId
    attempt: Attempt
    gateway: GatewayId
    model: ModelName
    context: bytes
    """Packed: the last few prompt tokens, then every output token of earlier attempts."""
    resumed: Count
    """How many of the last tokens of `context` are output of earlier attempts."""
    sent_chars: Count
    """Characters of output text that the client already has."""
    prompt_tokens: Count
    cached_tokens: Count
    """Prompt tokens that were not computed, because their keys and values were cached."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    keep_markup: bool = False
    """The marks of tool calls and reasoning are part of the text even if `skip_special_tokens` is set."""
    thinking: Thinking | None = None
    """Passed on to the gateway in `StreamOpened.thinking`."""
    trace: str | None = None
    """See `Generation.trace`."""
    queued: float | None = None
    """Passed on to the gateway in `StreamOpened.queued`."""


class NewTokens(Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one request from one step, in the order in which they were drawn."""

    request: RequestId
    attempt: Attempt
    position: Count
    """Output index of the first of `tokens`, counted from the first attempt on (the first entry of a resumed
    stream has `position == resumed`); the receiver expects exactly what it has counted."""
    tokens: tuple[TokenId, ...]
    """Every token that was drawn and kept, the one that stopped the sequence included: positions, usage and
    log-probabilities count it."""
    finish: FinishReason | None = None
    """Set on a request's last entry. `length`: all of `tokens` (there may be none) are text. `stop`: `tokens`
    is not empty and its last is a stop token (end of sequence, or one of `stop_token_ids`), which is no part of
    the text unless `include_stop` (it is then a token like any other: `skip_special_tokens` may hide it).
    Stop strings are found by the detokenizer and never appear here."""
    stop_token: TokenId | None = None
    """`tokens[-1]` once more where it was one of the request's `stop_token_ids`: the client's `stop_reason`.
    None for the end-of-sequence token and for `length`."""
    logprobs: tuple[TokenLogprobs, ...] | None = None


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens. They are sent again if they were computed again (after a preemption)."""

    request: RequestId
    attempt: Attempt
    position: Count
    """Index in the prompt of the token that the first entry of `logprobs` belongs to."""
    logprobs: tuple[TokenLogprobs, ...]


class PooledPrompt(Struct, frozen=True, array_like=True):
    """The vector of a prompt. The request's last entry, which has no tokens, comes with it or later."""

    request: RequestId
    attempt: Attempt
    vector: bytes
    """Packed float32, little-endian."""


class AbandonStream(Struct, frozen=True, array_like=True):
    """The engine gave the request up (cancelled or failed): forget it. The scheduler informs the gateway."""

    request: RequestId
    attempt: Attempt


class StreamMoved(Struct, frozen=True, array_like=True):
    """The engine has handed the request over: its next tokens come from `engine`, at the position that follows."""

    request: RequestId
    attempt: Attempt
    engine: EngineId


class TokenBatch(Struct, frozen=True, array_like=True, kw_only=True):
    """scheduler → one detokenizer. `number` counts from 0 per (engine, epoch, detokenizer): a gap is a loss.

    Order of effect: `opened`, `scored`, `pooled`, `entries`, `moved`, `abandoned`.
    """

    engine: EngineId
    epoch: Incarnation
    number: Count
    opened: tuple[OpenStream, ...] = ()
    entries: tuple[NewTokens, ...] = ()
    abandoned: tuple[AbandonStream, ...] = ()
    moved: tuple[StreamMoved, ...] = ()
    scored: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()
