"""Has an encoder read prompts of models whose decoders write the answers (BART, T5), before they are dispatched."""

from __future__ import annotations

import asyncio
import secrets

from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest
from services.gateway.images.image_rows import MAX_AT_ONCE, ImageRowsClient
from services.gateway.tokenizer_client import TokenizerClient
from shared.messages.encoder import EncodeInput
from shared.messages.model_card import EncoderDecoderModel
from shared.messages.tokenizer import Encode, EncodeReply, Prompt, TokenPrompt
from shared.packing import pack, unpack

FIELD = "prompt"


async def read_by_encoder(
    images: ImageRowsClient, tokenizer: TokenizerClient, generation: GenerationRequest
) -> GenerationRequest:
    """The request with what its answers begin with in place of its prompts, and rows of these beside it; of models
    without such an encoder as it is. Raises RequestError: 400 for a prompt that is too long, 503 where no encoder
    answers."""
    model = generation.model.encoder_decoder
    if model is None:
        return generation
    begin = await _begin(tokenizer, generation, model)
    slots, turn = asyncio.Semaphore(MAX_AT_ONCE), generation.key or secrets.token_hex(8)

    async def outcome(prompt: Prompt) -> TokenPrompt | RequestError:
        """An error is returned, so that which of several is raised depends on no clock."""
        try:
            async with slots:
                ids = await tokenizer.prompt_ids(generation, prompt)
                _check_length(ids, model)
                question = EncodeInput(pack(ids), generation.cache_salt, turn)
                return TokenPrompt(begin, await images.awaited(FIELD, question, generation.model.name))
        except RequestError as error:
            return error

    prompts: list[TokenPrompt] = []
    for found in await asyncio.gather(*map(outcome, generation.prompts)):  # a group that is cancelled leaves a cycle
        if isinstance(found, RequestError):
            raise found
        prompts.append(found)
    return replace(generation, prompts=tuple(prompts), truncate_prompt_tokens=None, decoder_prompt=None)


async def _begin(tokenizer: TokenizerClient, generation: GenerationRequest, model: EncoderDecoderModel) -> bytes:
    """What answers are drawn behind, packed. As in `transformers`, token ids of the client's have the first token of
    all answers in front of them, unless they begin with it, and no other."""
    match generation.decoder_prompt:
        case None:
            return pack(model.decoder_prompt)
        case TokenPrompt(tokens=given):
            ids = unpack(given)
            return given if ids[0] == model.start else pack([model.start, *ids])
        case text:
            ids = unpack((await tokenizer.ask(generation.model, Encode(text), EncodeReply)).tokens)
            return pack([*model.decoder_prompt, *ids])


def _check_length(ids: list[int], model: EncoderDecoderModel) -> None:
    if not ids:
        raise RequestError(400, f"{FIELD}: at least one token is needed", param=FIELD)
    if len(ids) > model.rows:
        raise RequestError(
            400,
            f"{FIELD}: {len(ids)} tokens are not allowed; the model's encoder takes {model.rows}, and "
            "truncate_prompt_tokens leaves some out",
            param=FIELD,
            code="context_length_exceeded",
        )
