"""`POST /v1/completions`: reads the body as a generation request."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.api.embeds.prompt_embeds import embedded_prompts
from services.gateway.api.errors import decode_body, invalid, not_allowed
from services.gateway.api.fields.generation import CommonFields, check_common_fields
from services.gateway.api.generation import GenerationRequest, RequestLimits, check_generates, choose_model
from services.gateway.api.prompts import completion_prompts, token_prompt
from services.gateway.api.sampling import beam_search_params, completion_logprobs_request, generation_request
from services.gateway.api.structured_outputs import read_output_grammar
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import InfillPrompt, Prompt, TextPrompt, TokenPrompt

DEFAULT_MAX_TOKENS = 16


class CompletionFields(CommonFields, kw_only=True):
    """The JSON fields of a completion."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    decoder_prompt: str | list[Any] | None = None


_decoder = msgspec.json.Decoder(CompletionFields)


def _prompts(fields: CompletionFields, card: ModelCard) -> tuple[Prompt, ...]:
    """Those of embeddings first, as vLLM has them."""
    if fields.suffix:
        return _infill_prompts(fields, fields.suffix)
    embedded = () if fields.prompt_embeds in (None, []) else embedded_prompts(fields, card)
    if fields.prompt is None or (embedded and not fields.prompt):
        if not embedded:
            raise invalid("prompt", "this field is required")
        return embedded
    return (
        *embedded,
        *completion_prompts(fields.prompt, card, add_special_tokens=fields.add_special_tokens is not False),
    )


def _infill_prompts(fields: CompletionFields, suffix: str) -> tuple[InfillPrompt, ...]:
    """What stands before the gap that answers fill: each of the prompts."""
    for name, why in _NOT_OF_INFILL.items():
        if getattr(fields, name) not in (None, False, []):
            raise invalid("suffix", f"not allowed together with {name}: {why}")
    given = "" if fields.prompt is None else fields.prompt
    texts = [given] if isinstance(given, str) else given
    if not texts or not all(isinstance(text, str) for text in texts):
        raise not_allowed("prompt", fields.prompt, "a string or strings, together with suffix")
    return tuple(InfillPrompt(text, suffix, fields.add_special_tokens is not False) for text in texts)


_NOT_OF_INFILL = {
    "echo": "the prompt that the model reads is put together of both",
    "prompt_embeds": "they are no text",
    "truncate_prompt_tokens": "what tells the texts apart would be cut",
    "use_beam_search": "beams do not end where the gap does",
}
"""What completions with a suffix cannot have, and why."""
_NOT_OF_ENCODED = {
    "suffix": "its encoder reads prompts as they are",
    "echo": "the prompt is read by an encoder, and its text is no part of the decoder's",
    "prompt_logprobs": "the prompt is read by an encoder, which gives its tokens no probabilities",
    "use_beam_search": "beams are not searched beside an encoder's rows",
    "prompt_embeds": "its encoder reads tokens",
}
"""What completions by a model with an encoder cannot have, and why."""


def _decoder_prompt(fields: CompletionFields, card: ModelCard) -> TextPrompt | TokenPrompt | None:
    """What answers begin with, where the client says. Raises RequestError for what is not of the model's kind."""
    if card.encoder_decoder is None:
        if fields.decoder_prompt is not None:
            raise invalid("decoder_prompt", "not allowed for this model, which has no encoder of prompts")
        return None
    for name, why in _NOT_OF_ENCODED.items():
        if getattr(fields, name) not in (None, False):
            raise invalid(name, f"not allowed for this model: {why}")
    given = fields.decoder_prompt
    if given is None or given in ("", []):
        return None
    if isinstance(given, str):
        return TextPrompt(given, add_special_tokens=False)
    if not all(type(token) is int for token in given):
        raise not_allowed("decoder_prompt", given, "a string or token ids")
    return token_prompt("decoder_prompt", given, card)


def read_completion(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> GenerationRequest:
    """Reads and checks a body. `cards` are the models that are served. Raises RequestError."""
    return completion_request(decode_body(body, _decoder), cards, limits)


def completion_request(
    fields: CompletionFields,
    cards: list[ModelCard],
    limits: RequestLimits,
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
) -> GenerationRequest:
    """The same for a body that was read. Raises RequestError."""
    card = check_generates(choose_model(fields.model, cards))
    only_echo = bool(fields.echo) and fields.max_tokens == 0
    decoder_prompt = _decoder_prompt(fields, card)
    prompts = _prompts(fields, card)
    check_common_fields(fields, len(prompts), limits.max_choices, unchecked="max_tokens" if only_echo else "")
    if fields.stream and fields.return_prompt_text:
        raise invalid("return_prompt_text", "not allowed in a stream of a completion; echo shows the prompt")
    if only_echo and fields.logprob_token_ids is not None:
        raise invalid("logprob_token_ids", "not allowed where nothing is generated")
    echo, with_logprobs = bool(fields.echo), fields.logprobs is not None
    logprobs = completion_logprobs_request(fields, fields.logprobs, echo, card, limits)
    return generation_request(
        fields,
        card,
        limits,
        kind="completion",
        prompts=prompts,
        decoder_prompt=decoder_prompt,
        max_tokens=1 if only_echo else default_max_tokens if fields.max_tokens is None else fields.max_tokens,
        logprobs=logprobs,
        echo_logprobs=logprobs.most_likely if echo and with_logprobs else None,
        echo=echo,
        only_echo=only_echo,
        beam_search=beam_search_params(fields, limits),
        output_grammar=read_output_grammar(fields),
    )
