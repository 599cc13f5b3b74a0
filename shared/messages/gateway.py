"""Messages to a gateway about the requests that it supervises. Stale attempts are dropped by their number."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.ids import (
    Attempt,
    Count,
    DetokenizerId,
    EngineId,
    GatewayId,
    Incarnation,
    InstanceId,
    NodeId,
    RequestId,
    TokenId,
)
from shared.messages.dialects import Thinking
from shared.messages.generation import FinishReason

ErrorKind = Literal["invalid_request", "too_large", "overloaded", "unavailable", "poisoned"]
"""poisoned: processes died of the request, or a logits processor failed for it, so that it is not computed again."""

Death = Literal["beside others", "alone"]
"""How a request was there when a process died: among others, each of which may be the cause, or with no other one."""


class PromptsHeld(Struct, frozen=True, array_like=True, tag=True):
    """tokenizer → gateway, every second: I have your long prompts, and tokenize them one after the other. Without it a
    gateway would send them again."""

    tokenizer: InstanceId
    requests: tuple[tuple[RequestId, Attempt], ...]


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
    """The prefill engine that passed the request on; None for a coordinator's placement. It is valid even if it arrives
    before the coordinator's own message that the request went to `handed_by`."""
    passes: Count = 0
    """How often engines have passed this attempt on. Of two such messages the one with more of them is the later one;
    one with `handed_by` counts as 1 at least."""


class RowsMissing(Struct, frozen=True, array_like=True, tag=True):
    """scheduler → gateway: rows of an image of this request are nowhere any more. `RequestFailed` follows, and the next
    attempt needs them made again."""

    request: RequestId


class PromptKept(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """scheduler → gateway: what became of the prompt of a request with `Generation.keep`. It comes at about the time of
    the request's end, before or behind it."""

    request: RequestId
    attempt: Attempt
    blocks: Count
    """How many blocks of the prompt, from the first on, are kept for `KEEP_SECONDS`; 0: none."""
    engine: EngineId
    node: NodeId | None = None
    """The node whose KV store has them; None with 0 blocks."""
    tokens: Count = 0
    """In these blocks."""
    ranks: Count = 1
    """Of each stage of the engine."""
    stages: Count = 1


class RequestRejected(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The request itself cannot be served; trying again elsewhere would not help. Final."""

    request: RequestId
    attempt: Attempt
    kind: ErrorKind
    message: str
    """For the client: the field, the value, what is allowed."""
    field: str | None = None
    """The request's field at fault; None if the fault is not one field's."""
    retry_after: float | None = None
    """Seconds, for `overloaded` and `unavailable`."""
    code: Literal["context_length_exceeded"] | None = None
    """OpenAI's error code, by which its clients know to shorten their prompt."""


class RequestFailed(Struct, frozen=True, array_like=True, tag=True):
    """A service failed during this attempt; the gateway may dispatch the request again. Final for the attempt."""

    request: RequestId
    attempt: Attempt
    reason: str
    death: Death | None = None
    """Set where a process died that was computing the request; None for every other failure."""
    reached: Count = 0
    """Output tokens that it had at this death, those included that were being drawn; 0 where that is unknown."""
    caches_doubtful: bool = False
    """Whether cached blocks may be at fault, so that the next attempt is better computed without any."""
    grammar_died: bool = False
    """Whether the process of its grammar died, which may be that grammar's doing."""


class LogprobText(Struct, frozen=True, array_like=True, gc=False):
    """A token as text with its log-probability; `raw` are its bytes (it may be part of a character)."""

    token: str
    raw: bytes
    logprob: float
    token_id: TokenId


class PositionLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """The token at one position, and the most likely tokens there, most likely first."""

    chosen: LogprobText
    top: tuple[LogprobText, ...]
    rank: int | None = None
    """How many tokens are at least as likely, itself included; set for prompt tokens only."""


class PromptLogprobsDelta(Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt's tokens; all of them come before the request's first output token."""

    request: RequestId
    attempt: Attempt
    position: Count
    """Index in the prompt of the token that the first entry of `logprobs` belongs to. The same positions may arrive
    twice."""
    logprobs: tuple[PositionLogprobs, ...]


class PooledDelta(Struct, frozen=True, array_like=True):
    """The vector of a request's prompt; it comes before the request's only delta, which has no tokens."""

    request: RequestId
    attempt: Attempt
    vector: bytes
    """Packed float32, little-endian."""


class Delta(Struct, frozen=True, array_like=True, gc=False):
    """New text of one request. `text` may be empty while a character or a possible stop string is incomplete."""

    request: RequestId
    attempt: Attempt
    position: Count
    """Output index of the first of `tokens`."""
    tokens: tuple[TokenId, ...]
    """The new tokens. The gateway keeps them, so that a later attempt can resume behind them."""
    text: str
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for end-of-sequence and for length."""
    logprobs: tuple[PositionLogprobs, ...] | None = None


class StreamOpened(Struct, frozen=True, array_like=True):
    """Sent once, before the first delta: the token counts for `usage`, and where the text begins."""

    request: RequestId
    attempt: Attempt
    prompt_tokens: Count
    cached_tokens: Count
    thinking: Thinking | None = None
    """Whether a chat's prompt ends inside or behind the model's reasoning; None if it ends with neither mark."""
    engine: EngineId | None = None
    """The engine that opened it: there a gateway ends what it has given up, though it never received the placement.
    None from a detokenizer of an older release."""
    queued: float | None = None
    """Seconds that it waited at the engine for its first step. None from an engine of an older release."""


class Deltas(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """detokenizer → gateway: everything new for this gateway from one step of one engine.

    `number` counts from 0 per (detokenizer, epoch, gateway): a gap is a loss.
    """

    detokenizer: DetokenizerId
    epoch: Incarnation
    number: Count
    opened: tuple[StreamOpened, ...] = ()
    deltas: tuple[Delta, ...] = ()
    scored: tuple[PromptLogprobsDelta, ...] = ()
    """Prompt log-probabilities; they take effect after `opened` and before `deltas`."""
    pooled: tuple[PooledDelta, ...] = ()
    """Vectors of prompts; they take effect after `opened` and before `deltas`."""


class KeyUsage(Struct, frozen=True, array_like=True, kw_only=True):
    """What one API key has used at one gateway."""

    key: str
    """The key's name."""
    requests: int
    """Requests since the gateway started."""
    tokens: int
    """Tokens since it started: those used, and those set aside for open requests."""
    open: int
    """Open requests."""
    requests_left: float | None = None
    """What the gateway takes to be left of the key's requests per minute; None where there is no limit."""
    tokens_left: float | None = None


class UsageReport(Struct, frozen=True, array_like=True, kw_only=True):
    """gateway → every gateway, itself included: what API keys with limits have used there. Numbers are totals, so that
    a later report makes good for a lost one."""

    gateway: GatewayId
    incarnation: Incarnation
    keys: tuple[KeyUsage, ...] = ()
    """Those whose use has changed, and once a second all that are in use."""


class ReadMetrics(Struct, frozen=True, array_like=True, tag=True):
    """gateway → another gateway: what does your process measure? Answered by a `MetricsPage`."""

    openmetrics: bool = False
    """Whether in the OpenMetrics format, which has exemplars; a release that does not know it answers with text."""


class MetricsPage(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `ReadMetrics`: the metrics of one process in Prometheus' text format, or in OpenMetrics', whose pages
    end with `# EOF`."""

    text: bytes


MAX_STREAM_CHOICES = 16
"""Sequences of a resumable stream: the id of each of its events has the position of every one."""


class StreamOpening(Struct, frozen=True, array_like=True, kw_only=True):
    """All that a gateway needs to take a resumable stream over from another one, but its output."""

    stream: str
    """The response's id; it cannot be guessed."""
    key: str
    """Name of the API key that opened it, and that alone may resume it; empty where there are no keys."""
    kind: Literal["chat", "completion"]
    body: bytes
    """The request, as the client sent it."""
    choices: Annotated[int, Meta(ge=1, le=MAX_STREAM_CHOICES)]
    """Sequences that it generates."""
    seed: Count
    """Drawn for choices without a seed of the client's."""
    arrival: float
    """Unix seconds when the first gateway took the request."""


class KeepStream(Struct, frozen=True, array_like=True, tag=True):
    """gateway → another gateway: keep a copy of this stream of mine; its output follows in `StreamsGrown`."""

    owner: GatewayId
    incarnation: Incarnation
    opening: StreamOpening


class StreamsGrown(Struct, frozen=True, array_like=True, tag=True):
    """gateway → the one that keeps copies of its streams: their new output. What does not continue a copy is dropped,
    so that the copy stays behind; nothing is lost, as the rest can be generated again."""

    owner: GatewayId
    opened: tuple[StreamOpened, ...]
    deltas: tuple[Delta, ...]


class ForgetStream(Struct, frozen=True, array_like=True, tag=True):
    """gateway → the one that keeps a copy: nobody can resume this stream any more."""

    owner: GatewayId
    stream: str


class TakeStream(Struct, frozen=True, array_like=True, tag=True):
    """gateway → another gateway: a client of mine resumes this stream. Answered by a `StreamCopy`, with which its
    present owner gives it up, or by `StreamUnknown`."""

    taker: GatewayId
    incarnation: Incarnation
    stream: str
    key: str


class StreamCopy(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `TakeStream`: all that is known of the stream, with at most one delta for each choice."""

    opening: StreamOpening
    opened: tuple[StreamOpened, ...]
    deltas: tuple[Delta, ...]
    owned: bool
    """Whether the sender owned the stream until now, so that nobody knows more of it."""


class StreamUnknown(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `TakeStream`: there is no such stream here, or not for that key."""


class AbortRequests(Struct, frozen=True, array_like=True, tag=True):
    """gateway → another gateway: an operator ends these responses. Answered by `RequestsAborted`."""

    responses: tuple[str, ...] | None
    """Their ids, as clients see them; None: all that are open."""


class RequestsAborted(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `AbortRequests`: those that were open here."""

    responses: tuple[str, ...]


class ReadSpans(Struct, frozen=True, array_like=True, tag=True):
    """gateway, operator → any process: what have you done for this request? Answered by a `SpansFound`."""

    name: str
    """The id of the trace; gateways know its request by its response's id, too, or by the client's own."""


class SpanFound(Struct, frozen=True, array_like=True, kw_only=True):
    """Something that a process has done for a request, or is doing."""

    name: str
    begun: float
    """In Unix seconds."""
    ended: float | None
    """None: it is under way."""
    attributes: dict[str, str | int | float | bool]


MAX_SPANS_FOUND = 256
"""Spans of one process in an answer: a request has some for each sequence and attempt."""


class SpansFound(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `ReadSpans`."""

    trace_id: str | None
    """None: it knows of no such request."""
    spans: tuple[SpanFound, ...] = ()
    """The newest, at most `MAX_SPANS_FOUND`."""


class ReadOverview(Struct, frozen=True, array_like=True, tag=True):
    """gateway → another gateway, each second while somebody looks at the console: which responses are open, and how
    long have clients waited? Answered by a `GatewayOverview`."""

    max_responses: Annotated[int, Meta(ge=0, le=1000)]


class ResponseOverview(Struct, frozen=True, array_like=True, kw_only=True):
    """What operators see of an open response; nothing of its texts."""

    id: str
    model: str
    kind: str
    started: float
    """In Unix seconds."""
    state: Literal["queued", "running"]
    """queued: some sequence of it has no engine."""
    engines: tuple[EngineId, ...]
    sequences: int
    prompt_tokens: int
    tokens: int
    attempts: int


class EndedResponse(Struct, frozen=True, array_like=True, kw_only=True):
    """A response that ended a while ago; nothing of its texts."""

    id: str
    model: str
    started: float
    """In Unix seconds."""
    ended: float
    outcome: str
    prompt_tokens: int
    tokens: int


LatencyName = Literal["ttft", "itl", "tpot", "e2e"]


class LatencyCounts(Struct, frozen=True, array_like=True):
    """A histogram of one latency of one model, or of one API key, since the gateway's start."""

    model: str
    """Its name; that of a key where it is `by` one."""
    name: LatencyName
    bounds: tuple[float, ...]
    """Upper bounds of the buckets in seconds; one more bucket is above all of them."""
    counts: tuple[int, ...]
    """Of each bucket alone."""
    total: float
    """Seconds of all observations."""
    by: Literal["model", "key"] = "model"


class GatewayOverview(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `ReadOverview`."""

    responses: tuple[ResponseOverview, ...]
    """Those that are open for longest."""
    open_responses: int
    latencies: tuple[LatencyCounts, ...]
    ended: tuple[EndedResponse, ...] = ()
    """Those that ended last, the newest first."""


GatewayRequest = ReadMetrics | TakeStream | AbortRequests | ReadOverview
"""What gateways ask each other."""
GatewayReply = MetricsPage | StreamCopy | StreamUnknown | RequestsAborted | GatewayOverview
"""And what they answer."""
RequestMessage = Deltas | PromptsHeld | RequestPlaced | RequestQueued | RequestRejected | RequestFailed
"""Of other services, about a request; `PromptKept` decides nothing about it."""
StreamMessage = KeepStream | StreamsGrown | ForgetStream
"""Of other gateways, about their resumable streams."""
GatewayMessage = RequestMessage | StreamMessage | PromptKept | RowsMissing
