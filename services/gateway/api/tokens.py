"""`POST /tokenize` and `POST /detokenize`: the bodies, checked, as questions for a tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.api.chat import chat_prompt
from services.gateway.api.errors import invalid
from services.gateway.api.fields import check_token_ids, choose_model
from services.gateway.api.job import Limits
from services.gateway.api.reading import read
from shared.messages.lifecycle import ModelCard
from shared.messages.tokenizer import Decode, Encode, TextPrompt
from shared.tokens import pack


class TokenizeFields(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeFields)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeFields)


def read_tokenize(body: bytes, cards: list[ModelCard], limits: Limits) -> tuple[ModelCard, Encode]:
    """Raises ApiError."""
    fields = read(body, _tokenize_decoder)
    card = choose_model(fields.model, cards)
    strings = bool(fields.return_token_strs)
    if fields.messages is not None:
        return card, Encode(chat_prompt(fields.messages, fields, limits), strings)
    if fields.prompt is None:
        raise invalid("prompt", "either prompt or messages is required")
    return card, Encode(TextPrompt(fields.prompt, fields.add_special_tokens is not False), strings)


def read_detokenize(body: bytes, cards: list[ModelCard]) -> tuple[ModelCard, Decode]:
    """Raises ApiError."""
    fields = read(body, _detokenize_decoder)
    card = choose_model(fields.model, cards)
    check_token_ids("tokens", fields.tokens, card)
    return card, Decode(pack(fields.tokens))
