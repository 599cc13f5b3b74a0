"""`POST /v1/responses`: reads the body as a chat.

Unknown fields are refused by name, as an answer without their effect would not be what the client asked for.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.chat import ChatFields, chat_request
from services.gateway.api.errors import (
    FIELDS,
    RequestError,
    abbreviated,
    decode_body,
    invalid,
    not_allowed,
    unsupported,
)
from services.gateway.api.fields.metadata import check_metadata
from services.gateway.api.fields.reasoning_effort import REASONING_EFFORTS
from services.gateway.api.generation import GenerationRequest, RequestLimits, check_generates, choose_model
from services.gateway.api.responses.input_items import Item, Turns, add_items, is_developers, is_unfinished, numbered
from services.gateway.api.responses.item_references import referred_ids, resolved
from services.gateway.api.responses.tools import chat_tool_choice, chat_tools, offered_tools
from services.gateway.api.responses.written_items import joined, prompt_items
from services.gateway.api.structured_outputs import ResponseFormat, StructuredOutputs
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.messages.model_card import ModelCard
from shared.packing import NOT_DECODED

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""What clients that store nothing ask for, to send the reasoning back: it is in its items anyway, in the clear."""


class ReasoningFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the model is to reason."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text is to be."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the stream is to be."""

    include_obfuscation: bool | None = None


class PromptCacheFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the client would have its prompt cached: prompts are cached anyway."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"
    comparison_response_id: str | None = None
    prewarm: bool | None = None


class ResponsesFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/responses`, with vLLM's additions; null means the default."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamFields | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheFields | None = None
    service_tier: str | None = None
    client_metadata: dict[str, Any] | None = None
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    enable_prefix_caching: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    request_id: str | None = None
    session_id: str | None = None
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None
    background_options: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    watermarking: Any = None


_SHARED = (
    *("model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "stop", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "priority"),
    *("cache_salt", "enable_prefix_caching", "structured_outputs", "vllm_xargs", "stream", "parallel_tool_calls"),
    *("stop_token_ids", "include_reasoning", "request_id", "media_io_kwargs", "mm_processor_kwargs", "watermarking"),
)
"""Fields that a chat has with the same meaning."""
_UNSUPPORTED = {
    "prompt": "a prompt template",
    "context_management": "managing the context",
    "moderation": "moderation",
    "image": "a policy for images",
    "access_programs": "an access program",
    "background_options": "an option of running in the background",
}
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "user", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "previous_response_id"),
)
"""Fields that a response repeats as they are."""
_COUNTED = (
    *("model", "input", "instructions", "previous_response_id", "conversation", "tools", "tool_choice"),
    *("parallel_tool_calls", "reasoning", "text", "truncation", "chat_template_kwargs"),
)
"""Fields that make the prompt, or belong to those that do."""


class ResponseRequest(Struct, frozen=True):
    """A checked request for a response."""

    generation: GenerationRequest
    echoed: dict[str, Any]
    """What the response says of how it was asked for."""
    store: bool | None
    """Whether the client wants it to be stored; None: it does not say."""
    items: bytes
    """All that it goes on from, as it is stored: a JSON array."""
    added: int
    """How many of them, the last ones, the request itself brings."""
    background: bool
    """Whether it is generated without its client."""
    identity: str
    """The response's id, which those of its items have in them."""

    @property
    def conversation(self) -> str | None:
        """The conversation that it goes on from, and adds to."""
        named: dict[str, str] | None = self.echoed["conversation"]
        return None if named is None else named["id"]


class Continuation(NamedTuple):
    """What is stored and gone on from; one of them, or none."""

    response: str | None = None
    conversation: str | None = None


class _PreviousFields(Struct):
    previous_response_id: Any = None
    conversation: Any = None


_decoder = msgspec.json.Decoder(ResponsesFields)
_previous_decoder = msgspec.json.Decoder(_PreviousFields)


def continuation(body: bytes) -> Continuation:
    """Returns what a body goes on from; nothing where the body is not in order."""
    if b'"previous_response_id"' not in body and b'"conversation"' not in body:
        return Continuation()
    try:
        found = _previous_decoder.decode(body)
    except NOT_DECODED:
        return Continuation()
    previous = found.previous_response_id
    return Continuation(previous if isinstance(previous, str) else None, _conversation_id(found.conversation))


def _conversation_id(given: Any) -> str | None:
    match given:
        case str(id) | {"id": str(id)}:
            return id
        case _:
            return None


def job_body(body: bytes) -> str:
    """Returns a checked body without its input, for `again`."""
    fields = FIELDS.decode(body)
    for name in ("input", "previous_response_id", "conversation"):
        fields.pop(name, None)
    return msgspec.json.encode(fields).decode()


def again(body: str, items: bytes) -> bytes:
    """Returns a body that asks for the same once more; `items`: all that it goes on from."""
    fields = FIELDS.decode(body)
    return msgspec.json.encode({**fields, "input": msgspec.Raw(items)})


def read_responses(
    body: bytes,
    cards: list[ModelCard],
    limits: RequestLimits,
    dialect_of: Callable[[ModelName], OutputDialect] | None,
    history: bytes | None = None,
    referenced: bytes | None = None,
) -> ResponseRequest | list[str]:
    """Reads and checks a body of `/v1/responses`; see `read_chat`. `history`: the items that it goes on from, a JSON
    array; None where it names no response that is stored. `referenced`: those that it refers to, a JSON object by their
    ids; None: they are not known yet, and of a body that refers to any only their ids are returned. Raises
    RequestError."""
    fields = decode_body(body, _decoder)
    card = check_generates(choose_model(fields.model, cards))
    _check(fields)
    if fields.conversation is not None:
        _check_conversation(fields, history)
    if fields.previous_response_id is not None and history is None:
        raise unsupported("previous_response_id", "going on from a stored response where nothing is stored")
    earlier: list[Item] = [] if history is None else prompt_items(history)
    if isinstance(fields.input, list) and (ids := referred_ids(fields.input)):
        if referenced is None:
            return ids
        fields.input = resolved(fields.input, msgspec.json.decode(referenced), earlier)
    dialect = OutputDialect() if dialect_of is None else dialect_of(card.name)
    try:
        chat = _chat_fields(fields, earlier, dialect, limits.efforts)
        generation = chat_request(chat, cards, limits, dialect_of, kind="responses")
    except RequestError as error:
        raise _in_their_words(error) from None
    identity = secrets.token_hex(24)
    added, items = numbered(fields.input, identity), b""
    if fields.store is not False or fields.conversation is not None:
        items = joined(history or b"[]", msgspec.json.encode(added))
    asked = (_echoed(fields), fields.store, items, len(added), bool(fields.background))
    return ResponseRequest(generation, *asked, f"resp_{identity}")


def read_input_tokens(
    body: bytes,
    cards: list[ModelCard],
    limits: RequestLimits,
    dialect_of: Callable[[ModelName], OutputDialect] | None,
    history: bytes | None = None,
    referenced: bytes | None = None,
) -> GenerationRequest | list[str]:
    """Reads a body of `/v1/responses/input_tokens`, which has of the fields of `/v1/responses` those that make the
    prompt: a request with the prompt to be counted, which is not generated; or ids, as `read_responses`. Raises
    RequestError."""
    given = decode_body(body, FIELDS)
    for name in given:
        if name not in _COUNTED:
            raise invalid(abbreviated(name)[1:-1], f"this field is not known; {', '.join(_COUNTED)} are")
    asked = read_responses(body, cards, limits, dialect_of, history, referenced)
    return asked if isinstance(asked, list) else asked.generation


def _check_conversation(fields: ResponsesFields, history: bytes | None) -> None:
    if _conversation_id(fields.conversation) is None:
        raise not_allowed("conversation", fields.conversation, 'the id of a conversation, or {"id": …}, is')
    if fields.previous_response_id is not None:
        raise invalid("conversation", "not allowed together with previous_response_id")
    if history is None:
        raise unsupported("conversation", "a conversation where nothing is stored")


def _check(fields: ResponsesFields) -> None:
    for name, what in _UNSUPPORTED.items():
        if getattr(fields, name) not in (None, False):
            raise unsupported(name, what)
    if fields.service_tier not in (None, "auto", "default"):
        raise not_allowed("service_tier", fields.service_tier, "'auto' or 'default' is")
    if fields.truncation not in (None, "auto", "disabled"):
        raise not_allowed("truncation", fields.truncation, "'auto' or 'disabled' is")
    if fields.max_tool_calls is not None and fields.max_tool_calls < 1:
        raise not_allowed("max_tool_calls", fields.max_tool_calls, "it must be at least 1")
    if fields.stream_options is not None:
        if not fields.stream:
            raise invalid("stream_options", "only allowed when stream is true")
        if fields.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "obfuscation")
    for i, name in enumerate(fields.include or []):
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise not_allowed(f"include[{i}]", name, f"'{LOGPROBS}' or '{ENCRYPTED_REASONING}' is")
    if fields.top_logprobs and LOGPROBS not in (fields.include or []):
        raise invalid("top_logprobs", f"only allowed where include has '{LOGPROBS}'")
    check_metadata(fields.metadata or {})


def _chat_fields(
    fields: ResponsesFields, earlier: list[Item], dialect: OutputDialect, efforts: Mapping[str, str]
) -> ChatFields:
    """The fields of a chat that comes to the same."""
    items: list[Item] = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
    if not items:
        raise invalid("input", "[] is not allowed; a text or at least one item is needed")
    chat = ChatFields(messages=_conversation(fields.instructions, earlier, items))
    if fields.tools is not None:
        chat_tools(fields.tools)  # checked by the client's places first
    if tools := offered_tools(fields.tools or [], [*earlier, *items]):
        fields.tools, chat.tools = tools, chat_tools(tools)
    else:
        fields.tools = None
    for name in _SHARED:
        setattr(chat, name, getattr(fields, name))
    if is_unfinished(items[-1]):
        chat.continue_final_message, chat.add_generation_prompt = True, False
    chat.max_tokens = fields.max_output_tokens
    chat.logprobs, chat.top_logprobs = LOGPROBS in (fields.include or []), fields.top_logprobs
    chat.truncate_prompt_tokens = -1 if fields.truncation == "auto" else None
    chat.tool_choice = chat_tool_choice(fields.tool_choice, fields.tools or [])
    if fields.text is not None:
        chat.response_format = _response_format(fields.text)
    told = _reasoning(fields.reasoning, dialect, efforts)
    chat.chat_template_kwargs = {**told, **(fields.chat_template_kwargs or {})}
    return chat


def _conversation(instructions: str | None, earlier: list[Item], items: list[Item]) -> list[dict[str, Any]]:
    """The messages of the items that are stored and of those behind them, whose places are those in the request. What
    developers say belongs to the instructions, as in vLLM: most chat templates take one system prompt, at the
    beginning."""
    turns = Turns()
    add_items(earlier, "previous_response_id", turns)
    add_items(items, "input", turns)
    told = [] if instructions is None else [instructions]
    told += [message["content"] for message in turns.messages if is_developers(message)]
    system = [{"role": "system", "content": "\n\n".join(told)}] if told else []
    return system + [message for message in turns.messages if not is_developers(message)]


def _response_format(text: TextFields) -> ResponseFormat | None:
    if text.verbosity not in (None, "medium"):
        raise not_allowed("text.verbosity", text.verbosity, "'medium' is, as a model has no other")
    match text.format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return ResponseFormat(type="json_object")
        case {"type": "json_schema", "schema": schema}:
            described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            return msgspec.convert(described, ResponseFormat)
        case {"type": "json_schema"}:
            raise invalid("text.format.schema", "this field is required where type is 'json_schema'")
    raise not_allowed("text.format.type", text.format.get("type"), "'text', 'json_object' or 'json_schema' is")


def _reasoning(reasoning: ReasoningFields | None, dialect: OutputDialect, efforts: Mapping[str, str]) -> dict[str, Any]:
    """What the chat template is told about how to reason; `efforts`: see `RequestLimits.efforts`."""
    if reasoning is None:
        return {}
    for name in ("summary", "generate_summary"):  # `auto`: the best one that there is, and there is none
        if getattr(reasoning, name) not in (None, "auto"):
            raise unsupported(f"reasoning.{name}", "a summary (the reasoning itself is shown)")
    if reasoning.context not in (None, "auto"):
        raise not_allowed("reasoning.context", reasoning.context, "'auto' is: the chat template decides")
    if reasoning.mode not in (None, "standard"):
        raise not_allowed("reasoning.mode", reasoning.mode, "'standard' is")
    effort, switchable = reasoning.effort, "enable_thinking" in dialect.controls
    if effort is None:
        return {}
    if effort not in REASONING_EFFORTS:
        raise not_allowed("reasoning.effort", effort, f"one of {', '.join(REASONING_EFFORTS)} is")
    effort = efforts.get(effort, effort)
    if effort == "none" and switchable:
        return {"enable_thinking": False}
    if "reasoning_effort" in dialect.controls:
        return {"reasoning_effort": effort}
    if switchable:  # as in a chat: it reasons, as much as it will
        return {"enable_thinking": True}
    if effort == "none" and dialect.reasoning is None:
        return {}
    allowed = "'none' is" if dialect.reasoning is None else "leave it out"
    raise not_allowed("reasoning.effort", effort, f"the model's chat template takes none; {allowed}")


def _echoed(fields: ResponsesFields) -> dict[str, Any]:
    reasoning, text, cached = fields.reasoning, fields.text, fields.prompt_cache_options
    shown = ("mode", "ttl", "comparison_response_id")  # `prewarm` is of requests alone
    return {
        **{name: getattr(fields, name) for name in _ECHOED},
        "prompt_cache_options": None if cached is None else {name: getattr(cached, name) for name in shown},
        "background": bool(fields.background),
        "conversation": None if fields.conversation is None else {"id": _conversation_id(fields.conversation)},
        "store": False,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {
            "format": (text and text.format) or {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
    }


_THEIRS = (
    (".function.", "."),
    ("tool_choice.allowed_tools.", "tool_choice."),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("truncate_prompt_tokens", "truncation"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
)


def _in_their_words(error: RequestError) -> RequestError:
    """The error with the names that fields have here."""
    message, param = error.message, error.param
    for ours, theirs in _THEIRS:
        message = message.replace(ours, theirs, 1)
        param = None if param is None else param.replace(ours, theirs, 1)
    return RequestError(
        error.status, message, param=param, code=error.code, retry_after=error.retry_after, elsewhere=error.elsewhere
    )
