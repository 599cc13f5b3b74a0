"""What a request to generate comes to: for each choice its state, and the message that has it generated, on its way to
a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.api.anthropic.blocks import MessageBlocks
from services.gateway.api.chat import AssistantMessage, repeatable_ids
from services.gateway.api.cohere.answer import CohereMessage
from services.gateway.api.generation import ChoiceRequest, GenerationKind, GenerationRequest
from services.gateway.api.logprobs import EncodedEcho, by_id, by_text
from services.gateway.api.ollama.answer import OllamaMessage
from services.gateway.api.response import ChoiceState, ParsedMessage
from services.gateway.api.responses.output_items import OutputItems
from services.gateway.core.open_request import LARGE_BYTES
from services.gateway.parsing.output_parser import ParserOptions
from services.gateway.tokenizer_client import PromptDetails
from shared import topics
from shared.bus import Bus, PayloadTooLarge
from shared.ids import FIRST_ATTEMPT, GatewayId, RequestId
from shared.messages.gateway import RequestRejected
from shared.messages.tokenizer import Tokenize, embeds_of, prompt_bytes
from shared.telemetry.logs import record_trace

_MESSAGES: dict[GenerationKind, Callable[[ParserOptions | None], ParsedMessage]] = {
    "cohere": CohereMessage,
    "messages": MessageBlocks,
    "ollama": OllamaMessage,
    "responses": OutputItems,
}
"""Of the APIs that always parse their outputs."""


def choice_state(
    generation: GenerationRequest, choice: ChoiceRequest, details: list[PromptDetails], resumable: RequestId | None
) -> ChoiceState:
    """Returns the state of a choice to which nothing has been sent. `details`: see `RequestTable.open`. `resumable`:
    set where its tool calls are to have the same ids again."""
    prompt = choice.position // generation.n
    echo = generation.echoed_messages[prompt] if generation.echoed_messages else ""
    state = ChoiceState(choice.position, prompt, echo=echo, only_echo=generation.only_echo)
    if generation.model.encoder_decoder is not None:
        state.encoder_tokens = sum(each.count for each in embeds_of(choice.prompt))
    if shape := _MESSAGES.get(generation.kind):
        state.message = shape(generation.parser_options)
    elif generation.parser_options is not None:
        mistral = generation.parser_options.dialect.tools == "mistral"
        new_id = None if resumable is None else repeatable_ids(resumable, mistral)
        state.message = AssistantMessage(generation.parser_options, new_id)
    if details:
        text, state.prompt_ids = details[prompt].text, details[prompt].token_ids
        state.prompt_text = text
        if generation.echo:
            state.echo = text
        options = generation.response_options
        if options.echo_logprobs is not None:
            state.echo_first_token = details[prompt].first_token
            if generation.stream is not None:
                state.encoded_echo = EncodedEcho(by_id if options.tokens_as_ids else by_text, options.echo_logprobs)
    return state


def first_dispatch(
    generation: GenerationRequest,
    choice: ChoiceRequest,
    request: RequestId,
    gateway: GatewayId,
    arrival: float,
    max_model_len: int,
) -> Tokenize:
    """Returns the first dispatch of a choice."""
    grammar, parser = generation.output_grammar, generation.parser_options
    marks = None if parser is None else parser.dialect.marks
    record_trace(request, generation.trace)
    return Tokenize(
        request=request,
        attempt=FIRST_ATTEMPT,
        gateway=gateway,
        model=generation.model.name,
        prompt=choice.prompt,
        sampling=choice.sampling,
        stopping=generation.stopping,
        skip_special_tokens=generation.skip_special_tokens,
        priority=generation.priority,
        arrival=arrival,
        cache_salt=generation.cache_salt,
        key=generation.key,
        weight=generation.weight,
        prefix_caching=generation.prefix_caching,
        pooling=generation.pooling,
        lora=None if generation.lora is None else generation.lora.id,
        grammar=grammar.grammar if grammar is not None else None,
        bad_words=generation.bad_words,
        truncate_prompt_tokens=generation.truncate_prompt_tokens,
        truncation_side=generation.truncation_side,
        max_model_len=max_model_len,
        keep_markup=parser is not None,
        thinking_end="" if marks is None else marks.end,
        trace=generation.trace,
        keep=generation.kv_transfer.keep,
        kept=generation.kv_transfer.kept,
        stream_interval=generation.stream_interval,
        hears_held=True,
    )


async def send_attempt(bus: Bus, tokenize: Tokenize) -> RequestRejected | None:
    """Sends an attempt to any tokenizer. Returns the answer to one that the bus does not take."""
    try:
        await bus.publish(topics.tokenize(tokenize.model), tokenize, confirm=True)
    except PayloadTooLarge as error:
        return RequestRejected(
            request=tokenize.request,
            attempt=tokenize.attempt,
            kind="too_large",
            message=f"the prompt makes {error.size} bytes, the bus takes {error.limit} at most",
            field="prompt",
        )
    if prompt_bytes(tokenize.prompt) > LARGE_BYTES:  # it was copied several times: streams have their turn
        await asyncio.sleep(0)
    return None
