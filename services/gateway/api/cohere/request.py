"""`POST /v2/chat`: reads the body as a chat, as version 2 of Cohere's API has it.

Unknown fields are refused by name, as an answer without their effect would not be what the client asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from services.gateway.api.chat import ChatFields, chat_request
from services.gateway.api.embeds.images import foreign_image, read_detail
from services.gateway.api.errors import (
    RequestError,
    abbreviated,
    decode_body,
    invalid,
    not_allowed,
    renamed,
    unsupported,
)
from services.gateway.api.generation import GenerationRequest, RequestLimits, check_generates, choose_model
from services.gateway.api.structured_outputs import ResponseFormat
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.messages.model_card import ModelCard

Message = dict[str, Any]


class CohereThinkingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons, and for how long."""

    type: Literal["enabled", "disabled"]
    token_budget: int | None = None


class CohereFormatFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the answer is to match."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    """Its name in version 1, which LangChain sends to version 2, too."""


class CitationFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether documents are cited: models do not, in a form that is known here."""

    mode: str | None = None


class CohereChatFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v2/chat`; null means the default."""

    model: str
    messages: list[Message]
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: list[str | dict[str, Any]] | None = None
    citation_options: CitationFields | None = None
    response_format: CohereFormatFields | None = None
    safety_mode: str | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: int | None = None
    p: float | None = None
    logprobs: bool | None = None
    thinking: CohereThinkingFields | None = None
    priority: int | None = None
    # vLLM's.
    chat_template_kwargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(CohereChatFields)
_SHARED = (
    *("model", "stream", "max_tokens", "temperature", "seed", "frequency_penalty", "presence_penalty"),
    *("logprobs", "priority"),
)
_THEIRS = {
    "thinking_token_budget": "thinking.token_budget",
    "response_format.json_schema.schema": "response_format.json_schema",
    "stop": "stop_sequences",
    "top_k": "k",
    "top_p": "p",
}


def read_cohere_chat(
    body: bytes,
    cards: list[ModelCard],
    limits: RequestLimits,
    dialect_of: Callable[[ModelName], OutputDialect] | None,
) -> GenerationRequest:
    """Reads and checks a body; see `read_chat`. Raises RequestError."""
    fields = decode_body(body, _decoder)
    card = check_generates(choose_model(fields.model, cards))
    dialect = OutputDialect() if dialect_of is None else dialect_of(card.name)
    _check(fields)
    if not fields.messages:
        raise invalid("messages", "[] is not allowed; at least one message is needed")
    chat = ChatFields(messages=[_message(each, f"messages[{i}]") for i, each in enumerate(fields.messages)])
    for name in _SHARED:
        setattr(chat, name, getattr(fields, name))
    chat.stop, chat.top_k, chat.top_p = fields.stop_sequences, fields.k, fields.p
    chat.tools = None if fields.tools is None else [_tool(each, fields) for each in fields.tools]
    if fields.tool_choice is not None:
        chat.tool_choice = "required" if fields.tool_choice == "REQUIRED" else "none"
    chat.documents = _documents(fields.documents, card, dialect)
    chat.response_format = _response_format(fields.response_format)
    _think(chat, fields.thinking, card, dialect)
    if fields.chat_template_kwargs is not None:
        chat.chat_template_kwargs = {**(chat.chat_template_kwargs or {}), **fields.chat_template_kwargs}
    try:
        return chat_request(chat, cards, limits, dialect_of, kind="cohere")
    except RequestError as error:
        raise renamed(error, _THEIRS) from None


def _check(fields: CohereChatFields) -> None:
    citations = fields.citation_options and fields.citation_options.mode
    if citations not in (None, "OFF", "DISABLED"):
        rule = "the mode 'OFF' or 'DISABLED' is: no citations are made here"
        raise not_allowed("citation_options", {"mode": citations}, rule)
    if fields.safety_mode not in (None, "OFF", "NONE"):
        raise not_allowed("safety_mode", fields.safety_mode, "'OFF' is: no instruction is put into the prompt here")
    if fields.strict_tools is not None and not fields.tools:
        raise invalid("strict_tools", "not allowed without tools")


def _think(chat: ChatFields, asked: CohereThinkingFields | None, card: ModelCard, dialect: OutputDialect) -> None:
    if asked is None:
        return
    thinks = asked.type == "enabled"
    if asked.token_budget is not None and not thinks:
        raise invalid("thinking.token_budget", "only allowed where thinking.type is 'enabled'")
    if thinks and dialect.reasoning is None:
        raise invalid("thinking", f"{card.name} writes no reasoning, or none in a format that is known here")
    chat.thinking_token_budget = asked.token_budget
    chat.chat_template_kwargs = {"enable_thinking": thinks}
    chat.include_reasoning = thinks


def _documents(
    given: list[str | dict[str, Any]] | None, card: ModelCard, dialect: OutputDialect
) -> list[dict[str, Any]] | None:
    """The documents as chat templates know them: the fields of each in one object."""
    if not given:
        return None
    if not dialect.documents:
        raise invalid("documents", f"the chat template of {card.name} shows none; put them into a message")
    return [_document(each, f"documents[{i}]") for i, each in enumerate(given)]


def _document(given: str | dict[str, Any], where: str) -> dict[str, Any]:
    match given:
        case str(text):
            return {"text": text}
        case {"data": dict()} if given.keys() <= {"data", "id"}:
            data: dict[str, Any] = given["data"]
            return data if given.get("id") is None else {**data, "id": given["id"]}
        case _:
            raise not_allowed(where, given, 'a text or {"data": {…}, "id": "…"} is')


def _response_format(given: CohereFormatFields | None) -> ResponseFormat | None:
    if given is None:
        return None
    name = "json_schema" if given.schema is None else "schema"
    schema = getattr(given, name)
    if given.json_schema is not None and given.schema is not None:
        raise invalid("response_format.schema", "not allowed beside json_schema, which is the same")
    if given.type == "text":
        if schema is not None:
            raise invalid(f"response_format.{name}", "only allowed where type is 'json_object'")
        return None
    if schema is None:
        return ResponseFormat(type="json_object")
    described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return msgspec.convert(described, ResponseFormat)


def _tool(tool: dict[str, Any], fields: CohereChatFields) -> dict[str, Any]:
    function = tool.get("function")
    if fields.strict_tools is None or not isinstance(function, dict):
        return tool
    return {**tool, "function": {**function, "strict": fields.strict_tools}}


def _message(message: Message, where: str) -> Message:
    """A message of a chat."""
    content = message.get("content")
    match message.get("role"):
        case "user" | "system" as role:
            return {"role": role, "content": _content(content, f"{where}.content")}
        case "tool":
            call = message.get("tool_call_id")
            if not isinstance(call, str):
                raise not_allowed(f"{where}.tool_call_id", call, "the id of a call is")
            return {"role": "tool", "tool_call_id": call, "content": _result(content, f"{where}.content")}
        case "assistant":
            return _assistant(message, where)
        case other:
            raise not_allowed(f"{where}.role", other, "'user', 'assistant', 'system' or 'tool' is")


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(_parts(content, where))]


def _part(part: Any, where: str) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url), **rest}} if rest.keys() <= {"detail"}:
            max_side = read_detail(rest.get("detail"), f"{where}.image_url.detail")
            return foreign_image(f"{where}.image_url.url", url=url, max_side=max_side)
        case {"type": str(kind)} if kind not in ("text", "image_url"):
            raise unsupported(f"{where}.type", f"a part of type {abbreviated(kind)} here")
        case _:
            form = '{"type": "text", "text": "…"} or {"type": "image_url", "image_url": {"url": "…"}} is'
            raise not_allowed(where, part, form)


def _assistant(message: Message, where: str) -> Message:
    """What the model said: its plan of calls is a text before them."""
    texts, thoughts = list[str](), list[str]()
    if (plan := message.get("tool_plan")) is not None:
        if not isinstance(plan, str):
            raise not_allowed(f"{where}.tool_plan", plan, "a text is")
        texts.append(plan)
    content = message.get("content")
    if isinstance(content, str):
        texts.append(content)
    elif content is not None:
        for i, part in enumerate(_parts(content, f"{where}.content")):
            match part:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case {"type": "thinking", "thinking": str(text)}:
                    thoughts.append(text)
                case _:
                    form = '{"type": "text", "text": "…"} or {"type": "thinking", "thinking": "…"} is'
                    raise not_allowed(f"{where}.content[{i}]", part, form)
    said: Message = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if message.get("tool_calls"):
        said["tool_calls"] = message["tool_calls"]
    return said


def _result(content: Any, where: str) -> str:
    """What a tool has said: texts, and documents as JSON."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for i, part in enumerate(_parts(content, where)):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "document", "document": dict(document)}:
                texts.append(msgspec.json.encode(_document(document, f"{where}[{i}].document")).decode())
            case _:
                form = '{"type": "text", "text": "…"} or {"type": "document", "document": {"data": {…}}} is'
                raise not_allowed(f"{where}[{i}]", part, form)
    return "\n".join(texts)


def _parts(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise not_allowed(where, content, "a text or a list of parts is")
    return content
