"""`POST /v1/messages` and `/v1/messages/count_tokens`: reads the body as a chat.

Unknown fields are refused by name, as an answer without their effect would not be what the client asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.api.chat import ChatFields, chat_request
from services.gateway.api.embeds.images import MEDIA_TYPES, foreign_image
from services.gateway.api.embeds.images import PART as IMAGE
from services.gateway.api.errors import (
    RequestError,
    abbreviated,
    decode_body,
    hosted_tool,
    invalid,
    not_allowed,
    unsupported,
)
from services.gateway.api.generation import GenerationRequest, RequestLimits, check_generates, choose_model
from services.gateway.api.prompts import chat_prompt
from services.gateway.api.structured_outputs import ResponseFormat
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import Encode

MIN_THINKING = 1
"""Tokens: Anthropic's own models take 1,024 or more."""


class MessageFields(Struct, kw_only=True):
    """One turn of the conversation."""

    role: str
    content: str | list[dict[str, Any]]


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


_decoder = msgspec.json.Decoder(MessagesFields)
_tokens_decoder = msgspec.json.Decoder(MessagesTokensFields)


def read_messages(
    body: bytes, cards: list[ModelCard], limits: RequestLimits, dialect_of: Callable[[ModelName], OutputDialect] | None
) -> GenerationRequest:
    """Reads and checks a body of `/v1/messages`; see `read_chat`. Raises RequestError."""
    fields = decode_body(body, _decoder)
    card = check_generates(choose_model(fields.model, cards))
    if fields.service_tier not in (None, "auto", "standard_only"):
        raise not_allowed("service_tier", fields.service_tier, "'auto' or 'standard_only'")
    chat = _chat_fields(fields)
    chat.max_tokens = fields.max_tokens
    chat.stop, chat.stream = fields.stop_sequences, fields.stream
    chat.temperature, chat.top_p, chat.top_k = fields.temperature, fields.top_p, fields.top_k
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


def read_count_tokens(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> tuple[ModelCard, Encode]:
    """Reads a body of `/v1/messages/count_tokens`. Raises RequestError."""
    fields = decode_body(body, _tokens_decoder)
    card = check_generates(choose_model(fields.model, cards))
    chat = _chat_fields(fields)
    return card, Encode(chat_prompt(chat.messages, chat, limits, _uncounted), False)


def _uncounted(part: dict[str, Any], path: str) -> dict[str, str]:
    raise unsupported(part["field"], "counting the tokens of an image, which only an encoder knows,")


def _chat_fields(fields: MessagesTokensFields) -> ChatFields:
    """The fields of a chat with the same prompt."""
    if not fields.messages:
        raise invalid("messages", "[] is not allowed; at least one message is needed")
    messages = [] if fields.system is None else [{"role": "system", "content": _system(fields.system)}]
    for i, message in enumerate(fields.messages):
        messages += _messages(message, f"messages[{i}]")
    chat = ChatFields(model=fields.model, messages=messages)
    if fields.tools is not None:
        chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools)]
    if fields.tool_choice is not None:
        chat.tool_choice, chat.parallel_tool_calls = _tool_choice(fields.tool_choice)
    _check_thinking(fields.thinking)
    chat.chat_template_kwargs = {"enable_thinking": fields.thinking is not None and fields.thinking.type != "disabled"}
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


def _system(given: str | list[dict[str, Any]]) -> str:
    if isinstance(given, str):
        return given
    return "\n".join(_text(block, f"system[{i}]") for i, block in enumerate(given))


def _messages(message: MessageFields, path: str) -> Iterator[dict[str, Any]]:
    """A turn as messages of a chat: results of tools are messages of their own there, before what the user says."""
    if message.role not in ("user", "assistant"):
        raise not_allowed(f"{path}.role", message.role, "'user' or 'assistant'; a system prompt goes into system")
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    if not message.content:
        raise invalid(f"{path}.content", "[] is not allowed; a text or at least one block is needed")
    blocks = [(block, f"{path}.content[{i}]") for i, block in enumerate(message.content)]
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    parts = list[dict[str, Any]]()
    for block, where in blocks:
        match block.get("type"):
            case "tool_result":
                yield _tool_result(block, where)
            case "image":
                parts.append(_image(block, where))
            case _:
                parts.append({"type": "text", "text": _text(block, where)})
    if any(part["type"] == IMAGE for part in parts):
        yield {"role": "user", "content": parts}
    elif parts:
        yield {"role": "user", "content": "\n".join(part["text"] for part in parts)}


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block, where in blocks:
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                raise unsupported(f"{where}.type", "reasoning that is not in the clear")
            case {"type": "tool_use", "id": str(name_of_call), "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": name_of_call, "type": "function", "function": function})
            case {"type": "tool_use"}:
                raise not_allowed(where, block, '{"type": "tool_use", "id": "…", "name": "…", "input": {…}} is')
            case _:
                texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    match block:
        case {"tool_use_id": str(call), "content": str(content)}:
            pass
        case {"tool_use_id": str(call), "content": [*parts]}:
            content = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
        case {"tool_use_id": str(call), "content": None}:
            content = ""
        case {"tool_use_id": str(call)} if "content" not in block:
            content = ""
        case _:
            raise not_allowed(where, block, '{"type": "tool_result", "tool_use_id": "…", "content": "…"} is')
    if block.get("is_error"):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": call, "content": content}


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            if kind not in MEDIA_TYPES:
                raise not_allowed(f"{where}.source.media_type", kind, f"{', '.join(MEDIA_TYPES)} are")
            return foreign_image(f"{where}.source.data", encoded=data)
        case {"type": "url", "url": str(url)}:
            return foreign_image(f"{where}.source.url", url=url)
        case {"type": "file"}:
            raise unsupported(f"{where}.source.type", "an image that is a file of the server's")
        case source:
            forms = '{"type": "base64", "media_type": "image/png", "data": "…"} or {"type": "url", "url": "…"} is'
            raise not_allowed(f"{where}.source", source, forms)


def _text(block: Any, where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise not_allowed(where, block, '{"type": "text", "text": "…"} is')
        case {"type": str(kind)}:
            raise unsupported(f"{where}.type", f"a block of type {abbreviated(kind)} here")
        case _:
            raise not_allowed(where, block, "a block with a type is")


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise hosted_tool(f"{path}.type", str(tool["type"]))
    if "input_schema" not in tool:
        raise invalid(f"{path}.input_schema", "this field is required")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


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
