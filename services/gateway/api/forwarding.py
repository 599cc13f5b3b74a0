"""What of a request is sent to the overflow provider, and what its answer says of its cost. Pure.

A request is forwarded only if the provider can do with every field what this server would have done. Fields that are
ignored here are left out, everything else goes as the client wrote it, but for the model's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct

from services.gateway.api.chat import ChatFields
from services.gateway.api.completions import CompletionFields
from services.gateway.api.fields.generation import NEUTRAL, WITHOUT_EFFECT
from services.gateway.core.overflow import ModelNames, NotForwardable, ProviderDialect
from shared.messages.generation import StopConditions
from shared.packing import NOT_DECODED

MAX_FORWARDED_BYTES = 2 * 2**20
"""A larger body would be read on the event loop for too long: 8 ns a byte."""
CHARS_PER_TOKEN = 4

_COMMON = frozenset({"model", "stream", "stream_options", "n", "max_tokens", "seed", "stop", "user", "logprobs"}) | {
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
}
OPENAI_FIELDS = {
    "chat": _COMMON
    | {"messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "modalities"}
    | {"max_completion_tokens", "top_logprobs", "reasoning_effort"},
    "completion": _COMMON | {"prompt", "best_of", "echo"},
}
"""OpenAI's fields that have an effect here."""
_LEFT_OUT = (WITHOUT_EFFECT | NEUTRAL.keys() | {"metadata", "request_id", "store"}) - _COMMON
KNOWN_FIELDS = {
    "chat": frozenset(ChatFields.__struct_fields__) - _LEFT_OUT,
    "completion": frozenset(CompletionFields.__struct_fields__) - _LEFT_OUT,
}
BATON_FIELDS = frozenset(
    {"enable_prefix_caching", "early_stopping", "return_metrics", "return_prompt_text", "vllm_xargs"}
)
"""Those that vLLM does not have, or whose values are for what is installed here."""
STREAM_FIELDS: dict[ProviderDialect, frozenset[str]] = {
    "openai": frozenset({"include_usage"}),
    "vllm": frozenset({"include_usage", "continuous_usage_stats"}),
    "baton": frozenset({"include_usage", "continuous_usage_stats"}),
}
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
PATHS = {"chat": "/chat/completions", "completion": "/completions"}


class ForwardedRequest(NamedTuple):
    """One request as the provider gets it."""

    path: str
    """Below the provider's base URL."""
    body: bytes
    model: str
    """Its name here; empty where the client gave none."""
    provider_model: str
    stream: bool
    shows_usage: bool
    """In a stream: whether the client wants the event with the usage, which the provider is always asked for."""
    expected_tokens: int
    """What it may come to: its prompt by the size of the body, and all that it lets each choice generate."""


def read_forwarded(
    body: bytes,
    kind: Literal["chat", "completion"],
    dialect: ProviderDialect,
    models: ModelNames,
    served: Sequence[str],
    own_name: Callable[[str], str] = str,
) -> ForwardedRequest:
    """Returns what the provider gets of a client's body. `served`: the models that are known here; `own_name` says what
    a model that was called by an alias is called itself. Raises NotForwardable."""
    if len(body) > MAX_FORWARDED_BYTES:
        raise NotForwardable(f"body: more than {MAX_FORWARDED_BYTES} bytes")
    given = _decoded(body, dict[str, Raw], "body")
    if kind == "chat" and bytes(given.get("store", b"")) == b"true":
        raise NotForwardable("store: a chat that is to be stored")
    fields = {name: raw for name, raw in given.items() if _forwarded(name, raw, kind, dialect)}
    if dialect == "openai":
        _check_values(fields)
    model = _decoded(fields.get("model", b"null"), str | None, "model")
    if model is None and len(served) == 1:
        model = served[0]
    provider_model = models.at_provider(None if model is None else own_name(model))
    stream = bool(_decoded(fields.get("stream", b"null"), bool | None, "stream"))
    fields["model"] = Raw(msgspec.json.encode(provider_model))
    shows_usage = False
    if stream:
        options = _stream_options(fields.get("stream_options", b"null"), dialect)
        shows_usage = bool(options.get("include_usage"))
        fields["stream_options"] = Raw(msgspec.json.encode(options | {"include_usage": True}))
    return ForwardedRequest(
        path=PATHS[kind],
        body=msgspec.json.encode(fields),
        model=model or "",
        provider_model=provider_model,
        stream=stream,
        shows_usage=shows_usage,
        expected_tokens=math.ceil(len(body) / CHARS_PER_TOKEN) + _expected_output(fields),
    )


def _forwarded(name: str, raw: Raw, kind: Literal["chat", "completion"], dialect: ProviderDialect) -> bool:
    """Whether a field goes along; one that is ignored here, or null, does not. Raises NotForwardable."""
    if name not in KNOWN_FIELDS[kind] or bytes(raw) == b"null":
        return False
    if name in OPENAI_FIELDS[kind] or dialect == "baton":
        return True
    if dialect == "openai" or name in BATON_FIELDS:
        raise NotForwardable(f"{name}: the provider does not have this field")
    return True


def _check_values(fields: Mapping[str, Raw]) -> None:
    """Raises NotForwardable for token ids, which mean other tokens to another model, and for vLLM's formats."""
    if "response_format" in fields:
        wanted = _decoded(fields["response_format"], dict[str, Any], "response_format").get("type")
        if wanted not in RESPONSE_FORMATS:
            raise NotForwardable("response_format.type: the provider does not have this one")
    if "logit_bias" in fields:
        raise NotForwardable("logit_bias: token ids say something else to another model")
    if "prompt" in fields:
        try:
            msgspec.json.decode(fields["prompt"], type=str | list[str])
        except NOT_DECODED:
            raise NotForwardable("prompt: token ids say something else to another model") from None


def _stream_options(raw: Raw | bytes, dialect: ProviderDialect) -> dict[str, Any]:
    """Raises NotForwardable, so for a stream that is to be resumable."""
    options: dict[str, Any] = _decoded(raw, dict[str, Any] | None, "stream_options") or {}
    if options.pop("resumable", None):
        raise NotForwardable("stream_options.resumable: only this server resumes its streams")
    known = {name: value for name, value in options.items() if name in STREAM_FIELDS["baton"] and value is not None}
    for name, value in known.items():
        if name not in STREAM_FIELDS[dialect] and value:
            raise NotForwardable(f"stream_options.{name}: the provider does not have this field")
    return {name: value for name, value in known.items() if name in STREAM_FIELDS[dialect]}


def _expected_output(fields: Mapping[str, Raw]) -> int:
    limits = (fields.get(name) for name in ("max_completion_tokens", "max_tokens"))
    given = next((_decoded(raw, int, "max_tokens") for raw in limits if raw is not None), None)
    choices: int = _decoded(fields.get("n", b"1"), int, "n")
    return max(1, choices) * max(1, StopConditions(max_tokens=given).expected_tokens)


def _decoded(raw: Raw | bytes, wanted: Any, field: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=wanted)
    except NOT_DECODED:
        raise NotForwardable(f"{field}: not valid") from None


# ---- answers


class ProviderUsage(Struct, frozen=True):
    """OpenAI's `usage` of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total(self) -> int:
        """All tokens that the answer has cost."""
        return max(0, self.prompt_tokens) + max(0, self.completion_tokens)


NO_USAGE = ProviderUsage()


class _AnswerFields(Struct):
    choices: list[Raw] | None = None
    usage: ProviderUsage | None = None
    error: Any = None


_answers = msgspec.json.Decoder(_AnswerFields)
_EVENT_END = re.compile(rb"\r?\n\r?\n")
MAX_EVENT_BYTES = 2**20
"""Of an event that has not ended; a longer one is passed on in pieces, and its usage is not read."""


def usage_of_body(body: bytes) -> ProviderUsage:
    """Returns what a body says that it has cost; nothing where it does not say."""
    try:
        return _answers.decode(body).usage or NO_USAGE
    except NOT_DECODED:
        return NO_USAGE


class ForwardedStream:
    """Owns the part of a stream that is no whole event yet, and the usage that it has told.

    Events are passed on unchanged. The one with nothing but the usage is left out for a client that did not want it.
    """

    def __init__(self, *, shows_usage: bool) -> None:
        self._shows_usage = shows_usage
        self._rest = b""
        self.usage = NO_USAGE
        self.begun = False
        """Whether an event with data has come; comments that keep the connection alive say nothing."""
        self.failed = False
        """Whether the first event was an error."""

    def feed(self, data: bytes) -> bytes:
        """Returns what the client is to get now."""
        self._rest += data
        passed: list[bytes] = []
        at = 0
        for end in _EVENT_END.finditer(self._rest):
            event = self._rest[at : end.end()]
            at = end.end()
            if self._passes(event):
                passed.append(event)
        self._rest = self._rest[at:]
        if len(self._rest) > MAX_EVENT_BYTES:
            passed.append(self.rest())
        return b"".join(passed)

    def rest(self) -> bytes:
        """Returns what came behind the last whole event."""
        rest, self._rest = self._rest, b""
        return rest

    def _passes(self, event: bytes) -> bool:
        if not event.startswith(b"data:"):
            return True
        first, self.begun = not self.begun, True
        if not first and b'"usage"' not in event:
            return True
        try:
            fields = _answers.decode(event[5:].strip())
        except NOT_DECODED:
            return True
        if first and fields.error is not None:
            self.failed = True
        if fields.usage is None:
            return True
        self.usage = fields.usage
        return self._shows_usage or fields.choices != []
