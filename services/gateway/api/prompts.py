"""The request fields that make a prompt: a chat's messages, a completion's texts or token ids, the bodies of
`/tokenize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from services.gateway.api.custom_tools.chat_tools import messages_as_functions, tools_as_functions
from services.gateway.api.errors import (
    abbreviated,
    check_depth,
    check_packable,
    decode_body,
    invalid,
    not_allowed,
    unsupported,
)
from services.gateway.api.fields.generation import check_processor_settings
from services.gateway.api.generation import RequestLimits, check_token_ids, choose_model
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import ChatPrompt, Decode, Encode, Prompt, TextPrompt, TokenPrompt
from shared.packing import pack

CONTENT_REQUIRED = frozenset({"system", "developer", "user", "tool", "function"})
"""Roles whose messages say something; what a template takes in others only it knows."""
MAX_ROLE_CHARS = 64


class ChatTemplateFields(Protocol):
    """The fields that decide how messages become a prompt; those of a chat and of `POST /tokenize`."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


class TokenizeFields(Struct, kw_only=True):
    """The JSON of `POST /tokenize`: either `prompt` or `messages`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None


class DetokenizeFields(Struct, kw_only=True):
    """The JSON of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


InvocationKind = Literal["chat", "completion", "embedding", "classification", "score", "rerank"]
"""The endpoints for which `/invocations` stands."""


class InvocationFields(Struct, kw_only=True):
    """The JSON of `POST /invocations`: that of another endpoint, which these fields tell from the others."""

    model: str | None = None
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    prompt_embeds: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    data_1: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET


_tokenize_decoder = msgspec.json.Decoder(TokenizeFields)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeFields)
_invocation_decoder = msgspec.json.Decoder(InvocationFields)
_INVOCATIONS: dict[str, InvocationKind] = {
    "messages": "chat",
    "prompt": "completion",
    "prompt_embeds": "completion",
    "input": "embedding",
    "text_1": "score",
    "data_1": "score",
    "queries": "score",
    "query": "rerank",
}


def read_invocation(body: bytes, cards: list[ModelCard]) -> InvocationKind:
    """Returns which endpoint the body of `POST /invocations` is for. Of a classifier's `input` its labels are asked
    for; a chat with a model that generates nothing is an input, too. Raises RequestError."""
    fields = decode_body(body, _invocation_decoder)
    given = [name for name in _INVOCATIONS if getattr(fields, name) is not UNSET]
    kinds = {_INVOCATIONS[name] for name in given}
    if len(kinds) != 1:
        what = f"{' and '.join(given)} are not allowed together" if given else "this field is required"
        raise invalid(given[0] if given else "messages", f"{what}; one of {', '.join(_INVOCATIONS)} is")
    (kind,) = kinds
    if kind in ("embedding", "chat"):
        card = choose_model(fields.model, cards)
        if card.pooling is not None and (kind == "embedding" or not card.generates):
            return "classification" if card.pooling.makes == "labels" else "embedding"
    return kind


def read_tokenize(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> tuple[ModelCard, Encode]:
    """Reads the body of `POST /tokenize`. Raises RequestError."""
    fields = decode_body(body, _tokenize_decoder)
    card = choose_model(fields.model, cards)
    strings = bool(fields.return_token_strs)
    check_processor_settings(fields.mm_processor_kwargs)
    if fields.media_io_kwargs:
        raise unsupported("media_io_kwargs", "anything but text")
    if fields.messages is not None:
        fields.messages = messages_as_functions(fields.messages)
        fields.tools, _ = tools_as_functions(fields.tools)
        return card, Encode(chat_prompt(fields.messages, fields, limits), strings)
    if fields.prompt is None:
        raise invalid("prompt", "either prompt or messages is required")
    return card, Encode(TextPrompt(fields.prompt, fields.add_special_tokens is not False), strings)


def read_detokenize(body: bytes, cards: list[ModelCard]) -> tuple[ModelCard, Decode]:
    """Reads the body of `POST /detokenize`. Raises RequestError."""
    fields = decode_body(body, _detokenize_decoder)
    card = choose_model(fields.model, cards)
    check_token_ids("tokens", fields.tokens, card)
    return card, Decode(pack(fields.tokens))


def completion_prompts(
    given: str | list[Any], card: ModelCard, *, add_special_tokens: bool, field: str = "prompt"
) -> tuple[Prompt, ...]:
    """Returns the prompts of a completion, or the inputs of a request for embeddings: one text, several, one list of
    token ids, or several. `field`: the client's name of them. Raises RequestError."""
    if isinstance(given, str):
        return (TextPrompt(given, add_special_tokens),)
    if not given:
        raise invalid(field, "[] is not allowed; a string, token ids, or a list of either")
    if all(isinstance(item, str) for item in given):
        return tuple(TextPrompt(text, add_special_tokens) for text in given)
    if all(type(item) is int for item in given):
        return (token_prompt(field, given, card),)
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in given):
        return tuple(token_prompt(f"{field}[{i}]", ids, card) for i, ids in enumerate(given))
    raise not_allowed(field, given, "a string, token ids, or a list of either")


def token_prompt(name: str, ids: list[int], card: ModelCard) -> TokenPrompt:
    """Returns a prompt of token ids. `name`: the client's of them. Raises RequestError."""
    if not ids:
        raise invalid(name, "[] is not allowed; at least one token is needed")
    check_token_ids(name, ids, card)
    return TokenPrompt(pack(ids))


PartReader = Callable[[dict[str, Any], str], dict[str, str]]
"""Reads a part that is no text, at a path of the body; returns the part that stands for it. Raises RequestError."""


def chat_prompt(
    given: list[dict[str, Any]], fields: ChatTemplateFields, limits: RequestLimits, embeds: PartReader | None = None
) -> ChatPrompt:
    """Returns the messages as the tokenizer's chat template takes them. `embeds`: reads images, videos and parts of
    type prompt_embeds, None: they are refused. Raises RequestError."""
    if not given:
        raise invalid("messages", "[] is not allowed; at least one message is needed")
    go_on = bool(fields.continue_final_message)
    add_prompt = not go_on if fields.add_generation_prompt is None else fields.add_generation_prompt
    if go_on and add_prompt:
        raise invalid("continue_final_message", "not allowed together with add_generation_prompt")
    if fields.chat_template is not None and not limits.allow_request_template:
        raise invalid("chat_template", "not taken from clients, unless gateway.allow_request_template is set")
    check_depth("messages", given, max_values=None)  # forwarded as bytes
    if fields.tools:
        check_depth("tools", fields.tools)
    if fields.chat_template_kwargs:
        check_packable("chat_template_kwargs", fields.chat_template_kwargs)
    messages = [_message(message, f"messages[{i}]", embeds) for i, message in enumerate(given)]
    return ChatPrompt(
        messages=msgspec.json.encode(messages),
        tools=msgspec.json.encode(fields.tools) if fields.tools else None,
        add_generation_prompt=add_prompt,
        continue_final_message=go_on,
        template=fields.chat_template,
        template_kwargs=fields.chat_template_kwargs or {},
        add_special_tokens=bool(fields.add_special_tokens),
    )


def _message(message: dict[str, Any], path: str, embeds: PartReader | None) -> dict[str, Any]:
    """One message: a role, which the chat template may refuse, and content that is text."""
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise not_allowed(f"{path}.role", role, f"a string of 1 to {MAX_ROLE_CHARS} characters is")
    content = message.get("content")
    match content:
        case None if role not in CONTENT_REQUIRED:
            pass
        case str():
            pass
        case list():
            parts = [_part(part, f"{path}.content[{i}]", embeds) for i, part in enumerate(content)]
            message = {**message, "content": parts}
        case _:
            raise not_allowed(f"{path}.content", content, "a string or a list of text parts")
    if (calls := message.get("tool_calls")) is not None:
        _check_calls(calls, f"{path}.tool_calls")
    return message


def _check_calls(calls: Any, path: str) -> None:
    """Checks a message's `tool_calls`. Their arguments need not be JSON: a model wrote them."""
    if not isinstance(calls, list):
        raise not_allowed(path, calls, "a list of calls is")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        match function:
            case {"name": str(), "arguments": str() | dict() | None} | {"name": str()}:
                pass
            case _:
                raise not_allowed(f"{path}[{i}].function", function, "name and arguments are")


def _part(part: Any, path: str, embeds: PartReader | None) -> dict[str, Any]:
    match part:
        case {"type": "prompt_embeds" | "image_url" | "video_url" | "input_audio" | "audio_url"} if embeds is not None:
            return embeds(part, path)
        case {"type": "text", "text": str()}:
            kept: dict[str, Any] = part  # its other fields are the chat template's
            return kept
        case str(text) | {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": str(kind)} if kind not in ("text", "refusal"):
            raise unsupported(f"{path}.type", f"a part of type {abbreviated(kind)}, which is not text,")
        case _:
            raise not_allowed(path, part, '{"type": "text", "text": "…"} is')
