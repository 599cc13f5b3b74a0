"""`POST /v1/messages` and `/v1/messages/count_tokens`: reads the body as a chat.

Unknown fields are refused by name, as an answer without their effect would not be what the client asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.api.anthropic.context_edits import ContextManagementFields, checked_edits
from services.gateway.api.anthropic.conversation import MessageFields, chat_messages
from services.gateway.api.anthropic.tool_clearing import ToolClearing
from services.gateway.api.anthropic.tools import offered_functions
from services.gateway.api.chat import ChatFields, chat_request
from services.gateway.api.errors import (
    RequestError,
    decode_body,
    invalid,
    not_allowed,
)
from services.gateway.api.generation import GenerationRequest, RequestLimits, check_generates, choose_model
from services.gateway.api.structured_outputs import ResponseFormat
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.messages.model_card import ModelCard

MIN_THINKING = 1
"""Tokens: Anthropic's own models take 1,024 or more."""


class ThinkingFields(Struct, kw_only=True):
    """Whether the model reasons, and for how long."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class FormatFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON schema that the answer is to match."""

    type: str
    schema: dict[str, Any]


class OutputFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's `output_config`."""

    effort: str | None = None
    format: FormatFields | None = None


class MessagesTokensFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/messages/count_tokens`, and the fields of both that make the prompt."""

    model: str | None = None
    messages: list[MessageFields]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagementFields | None = None
    speed: str | None = None
    # vLLM's.
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesFields(MessagesTokensFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # vLLM's.
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: Any = None
    cache_salt: str | None = None
    # Baton's.
    priority: int | None = None


class ClearingPlan(Struct, frozen=True):
    """An edit that clears results of tools, and how many calls it is about."""

    edit: ToolClearing
    calls: int


class _EditedFields(Struct, kw_only=True):
    messages: list[MessageFields]
    context_management: ContextManagementFields | None = None


_decoder = msgspec.json.Decoder(MessagesFields)
_edits_decoder = msgspec.json.Decoder(_EditedFields)
_tokens_decoder = msgspec.json.Decoder(MessagesTokensFields)


def read_messages(
    body: bytes,
    cards: list[ModelCard],
    limits: RequestLimits,
    dialect_of: Callable[[ModelName], OutputDialect] | None,
    *,
    clear_tools: bool = False,
) -> GenerationRequest:
    """Reads and checks a body of `/v1/messages`; see `read_chat`. `clear_tools`: whether an edit that clears results of
    tools is applied. Raises RequestError."""
    fields = decode_body(body, _decoder)
    card = check_generates(choose_model(fields.model, cards))
    if fields.service_tier not in (None, "auto", "standard_only"):
        raise not_allowed("service_tier", fields.service_tier, "'auto' or 'standard_only'")
    chat = _chat_fields(fields, clear_tools)
    chat.max_tokens = fields.max_tokens
    chat.stop, chat.stream = fields.stop_sequences, fields.stream
    chat.temperature, chat.top_p, chat.top_k = fields.temperature, fields.top_p, fields.top_k
    chat.vllm_xargs, chat.kv_transfer_params = fields.vllm_xargs, fields.kv_transfer_params
    chat.priority, chat.cache_salt = fields.priority, fields.cache_salt
    dialect = OutputDialect() if dialect_of is None else dialect_of(card.name)
    thinking = fields.thinking
    if thinking is not None and thinking.type == "enabled":
        if dialect.reasoning is None:
            raise invalid("thinking", f"{card.name} writes no reasoning, or none in a format that is known here")
        chat.thinking_token_budget = thinking.budget_tokens
    chat.include_reasoning = thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
    try:
        return chat_request(chat, cards, limits, dialect_of, kind="messages")
    except RequestError as error:
        raise _in_their_words(error) from None


def read_tool_clearing(body: bytes) -> ClearingPlan | None:
    """Reads of a body of either endpoint the edit that clears results of tools; None where it has none. Raises
    RequestError."""
    fields = decode_body(body, _edits_decoder)
    tools = checked_edits(fields.context_management).tools
    return None if tools is None else ClearingPlan(tools, len(tools.cleared_calls(fields.messages)))


def read_count_tokens(
    body: bytes, cards: list[ModelCard], limits: RequestLimits, *, clear_tools: bool = False
) -> GenerationRequest:
    """Reads a body of `/v1/messages/count_tokens`: a request with the prompt to be counted, which is not generated; see
    `read_messages`. Raises RequestError."""
    fields = decode_body(body, _tokens_decoder)
    check_generates(choose_model(fields.model, cards))
    try:
        return chat_request(_chat_fields(fields, clear_tools), cards, limits, None, kind="messages")
    except RequestError as error:
        raise _in_their_words(error) from None


def _chat_fields(fields: MessagesTokensFields, clear_tools: bool) -> ChatFields:
    """The fields of a chat with the same prompt."""
    if not fields.messages:
        raise invalid("messages", "[] is not allowed; at least one message is needed")
    if fields.speed not in (None, "standard"):
        raise not_allowed("speed", fields.speed, "'standard' is")
    turns = checked_edits(fields.context_management).applied(fields.messages, clear_tools=clear_tools)
    chat = ChatFields(model=fields.model, messages=chat_messages(fields.system, turns))
    last = chat.messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        chat.continue_final_message = True  # a prefill: the answer goes on from it
    tools = offered_functions(fields.tools or [], fields.messages)
    if tools or fields.tools is not None:
        chat.tools = tools
    if fields.tool_choice is not None:
        chat.tool_choice, chat.parallel_tool_calls = _tool_choice(fields.tool_choice)
    _check_thinking(fields.thinking)
    thinks = fields.thinking is not None and fields.thinking.type != "disabled"
    chat.chat_template_kwargs = {"enable_thinking": thinks, **(fields.chat_template_kwargs or {})}
    if (output := fields.output_config) is not None:
        chat.reasoning_effort = output.effort
        if output.format is not None:
            if output.format.type != "json_schema":
                raise not_allowed("output_config.format.type", output.format.type, "'json_schema' is")
            described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": output.format.schema}}
            chat.response_format = msgspec.convert(described, ResponseFormat)
    return chat


def _check_thinking(thinking: ThinkingFields | None) -> None:
    if thinking is None:
        return
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise not_allowed("thinking.type", thinking.type, "'enabled', 'disabled' or 'adaptive'")
    if thinking.display not in (None, "summarized", "omitted"):
        raise not_allowed("thinking.display", thinking.display, "'summarized' or 'omitted'")
    if thinking.type != "enabled":
        if thinking.budget_tokens is not None:
            raise invalid("thinking.budget_tokens", "only allowed where thinking.type is 'enabled'")
    elif thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens", "this field is required where thinking.type is 'enabled'")
    elif thinking.budget_tokens < MIN_THINKING:
        raise not_allowed("thinking.budget_tokens", thinking.budget_tokens, f"at least {MIN_THINKING}")


def _tool_choice(choice: dict[str, Any]) -> tuple[str | dict[str, Any], bool | None]:
    """OpenAI's `tool_choice` and `parallel_tool_calls`."""
    alone = choice.get("disable_parallel_tool_use")
    if alone not in (None, True, False):
        raise not_allowed("tool_choice.disable_parallel_tool_use", alone, "true or false")
    parallel = None if alone is None else not alone
    match choice:
        case {"type": "auto" | "none" as kind}:
            return kind, parallel
        case {"type": "any"}:
            return "required", parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
        case _:
            forms = '{"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": …}'
            raise not_allowed("tool_choice", choice, f"{forms} is")


_THEIRS = (
    (".function.parameters", ".input_schema"),
    (".function.", "."),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
)


def _in_their_words(error: RequestError) -> RequestError:
    """The error with the names that fields have here."""
    message, param = error.message, error.param
    for ours, theirs in _THEIRS:
        message = message.replace(ours, theirs, 1)
        param = None if param is None else param.replace(ours, theirs, 1)
    if param == "stop" or (param or "").startswith("stop["):
        message, param = message.replace("stop", "stop_sequences", 1), (param or "").replace("stop", "stop_sequences")
    return RequestError(
        error.status, message, param=param, code=error.code, retry_after=error.retry_after, elsewhere=error.elsewhere
    )
