"""Messages to a gateway about the requests that it supervises. Stale attempts are dropped by their number."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.ids import Attempt, DetokenizerId, EngineId, Incarnation, RequestId
from shared.messages.dialects import Thinking
from shared.messages.generation import FinishReason

ErrorKind = Literal["invalid_request", "too_large", "overloaded", "unavailable"]


class RequestQueued(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → gateway: every engine is full; the request waits with me."""

    request: RequestId
    attempt: Attempt


class RequestPlaced(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → gateway: the request went to `engine`; text will come from `detokenizer`.

    Also prefill engine → gateway, with `handed_by`: it has drawn a first token and passed the request on.
    """

    request: RequestId
    attempt: Attempt
    engine: EngineId
    detokenizer: DetokenizerId
    handed_by: EngineId | None = None
    """Holds whenever it arrives, even before the coordinator's word that the request went to `handed_by`."""


class RequestRejected(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The request itself cannot be served; trying again elsewhere would not help. Final."""

    request: RequestId
    attempt: Attempt
    kind: ErrorKind
    message: str
    """For the client: the field, the value, what is allowed."""
    field: str | None = None
    retry_after: float | None = None
    """Seconds, for `overloaded` and `unavailable`."""
    code: Literal["context_length_exceeded"] | None = None
    """OpenAI's error code, by which its clients know to shorten their prompt."""


class RequestFailed(Struct, frozen=True, array_like=True, tag=True):
    """A service failed during this attempt; the gateway may dispatch the request again. Final for the attempt."""

    request: RequestId
    attempt: Attempt
    reason: str


class LogprobText(Struct, frozen=True, array_like=True, gc=False):
    """A token as text with its log-probability; `raw` are its bytes (it may be part of a character)."""

    token: str
    raw: bytes
    logprob: float
    token_id: int


class PositionLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """The token at one position, and the most likely tokens there, most likely first."""

    chosen: LogprobText
    top: tuple[LogprobText, ...]
    rank: int | None = None
    """As in `TokenLogprobs`."""


class PromptLogprobsDelta(Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt's tokens; all of them come before the request's first output token."""

    request: RequestId
    attempt: Attempt
    position: int
    """Index in the prompt of the first of them. What came already may come again."""
    logprobs: tuple[PositionLogprobs, ...]


class Delta(Struct, frozen=True, array_like=True, gc=False):
    """New text of one request. `text` may be empty while a character or a possible stop string is incomplete."""

    request: RequestId
    attempt: Attempt
    position: int
    """Output index of the first of `tokens`."""
    tokens: tuple[int, ...]
    """Kept by the gateway: what a later attempt resumes from."""
    text: str
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for end-of-sequence and for length."""
    logprobs: tuple[PositionLogprobs, ...] | None = None


class StreamOpened(Struct, frozen=True, array_like=True):
    """Sent once, before the first delta: what usage reports, and where the text begins."""

    request: RequestId
    attempt: Attempt
    prompt_tokens: int
    cached_tokens: int
    thinking: Thinking | None = None
    """How a chat's prompt ends where it ends with a mark of thoughts."""


class Deltas(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """detokenizer → gateway: everything new for this gateway from one step of one engine.

    `number` counts from 0 per (detokenizer, epoch, gateway): a gap is a loss.
    """

    detokenizer: DetokenizerId
    epoch: Incarnation
    number: int
    opened: tuple[StreamOpened, ...] = ()
    deltas: tuple[Delta, ...] = ()
    scored: tuple[PromptLogprobsDelta, ...] = ()
    """Takes effect between `opened` and `deltas`."""


GatewayMessage = Deltas | RequestPlaced | RequestQueued | RequestRejected | RequestFailed
