"""Asks a tokenizer service which tokens a text becomes, and which text tokens become."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from services.gateway.api.errors import STATUS, RequestError
from services.gateway.api.generation import GenerationRequest
from shared import topics
from shared.bus import Bus, BusError, NoResponders, PayloadTooLarge, ReplyError, ReplyTimeout, ReplyTooLarge
from shared.ids import FIRST_ATTEMPT, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import (
    Decode,
    DecodeReply,
    Encode,
    EncodeReply,
    Prompt,
    TextPrompt,
    TokenizerInfo,
    TokenizerRefusal,
    TokenizerReply,
    TokenizerRequest,
    TokenPrompt,
)
from shared.packing import pack, unpack

Reply = TypeVar("Reply", EncodeReply, DecodeReply, TokenizerInfo)

ANSWER_TIMEOUT = 10.0
"""Seconds that a tokenizer may take."""
UNPACKED_BYTES = 2**16
"""Of token ids that become numbers at once: 2 ms."""


class PromptDetails(NamedTuple):
    """What a response contains of a prompt."""

    text: str
    """As its token ids are decoded, where the text is to be shown or echoed."""
    first_token: str
    """Text of its first token, where log-probabilities are echoed."""
    token_ids: list[int] | None


class TokenizerClient:
    """Sends questions to any tokenizer of a model. Every failure is an RequestError: 400 for a prompt that the
    tokenizer refuses, 413 for one too large for the bus, and for an answer that is, 429 where too many long ones wait,
    503 without an answer. A question that is cancelled, or waits too long, is called off at the tokenizer, too."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def ask(self, model: ModelCard, question: TokenizerRequest, expected: type[Reply]) -> Reply:
        """Returns the reply, which is of the `expected` type. Raises RequestError."""
        topic, name = topics.tokenizer_requests(model.name), RequestId(f"ask-{secrets.token_hex(12)}")
        if isinstance(question, Encode):
            question = replace(question, request=name, string_slices=True)
        elif isinstance(question, Decode):
            question = replace(question, request=name)
        try:
            answer: TokenizerReply = await self._bus.request(topic, question, TokenizerReply, ANSWER_TIMEOUT)
        except (asyncio.CancelledError, ReplyTimeout) as given_up:
            with contextlib.suppress(BusError):
                await self._bus.publish(topics.withdrawals(), Withdraw(name, FIRST_ATTEMPT))
            if isinstance(given_up, ReplyTimeout):
                raise _unanswered(given_up) from None
            raise
        except (PayloadTooLarge, ReplyTooLarge) as error:
            raise RequestError(413, str(error), param="body", code="too_large") from None
        except (NoResponders, ReplyError) as error:
            raise _unanswered(error) from None
        if isinstance(answer, TokenizerRefusal):
            overloaded = answer.kind == "overloaded"
            raise RequestError(
                STATUS[answer.kind],
                answer.message,
                param=answer.field,
                retry_after=1.0 if overloaded else None,
                elsewhere=overloaded,
            )
        if not isinstance(answer, expected):
            raise RequestError(503, "no tokenizer answered (another question's answer came)", retry_after=1.0)
        return answer

    async def prompt_details(self, generation: GenerationRequest) -> list[PromptDetails]:
        """Returns what the response contains of each prompt, or nothing where the client does not want any of it."""
        model, options = generation.model, generation.response_options
        if not (generation.echo or options.token_ids or options.prompt_text):
            return []
        scored = options.echo_logprobs is not None
        details = []
        for prompt in generation.prompts:
            whole = isinstance(prompt, TextPrompt) and generation.truncate_prompt_tokens is None
            ids, text, first = None, prompt.text if isinstance(prompt, TextPrompt) else "", ""
            if scored or options.token_ids or not whole:
                ids = await self.prompt_ids(generation, prompt)
            if (generation.echo or options.prompt_text) and not whole:
                text = await self.text(model, ids or [])
            if scored and ids:
                first = await self.text(model, ids[:1])
            details.append(PromptDetails(text, first, ids))
        return details

    async def prompt_ids(self, generation: GenerationRequest, prompt: Prompt) -> list[int]:
        """Returns a prompt's token ids, as an engine will compute them."""
        keep, side = generation.truncate_prompt_tokens, generation.truncation_side
        if isinstance(prompt, TokenPrompt) and keep is None:
            return await unpack_in_turns(prompt.tokens)
        question = Encode(prompt, truncate_prompt_tokens=keep, truncation_side=side)
        return await unpack_in_turns((await self.ask(generation.model, question, EncodeReply)).tokens)

    async def text(self, model: ModelCard, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids."""
        return (await self.ask(model, Decode(pack(ids), skip_special_tokens), DecodeReply)).text


async def unpack_in_turns(packed: bytes) -> list[int]:
    """Returns packed token ids; others have their turn between many of them."""
    ids = unpack(packed[:UNPACKED_BYTES])
    for start in range(UNPACKED_BYTES, len(packed), UNPACKED_BYTES):
        await asyncio.sleep(0)
        ids += unpack(packed[start : start + UNPACKED_BYTES])
    return ids


def _unanswered(error: BusError) -> RequestError:
    return RequestError(503, f"no tokenizer answered ({type(error).__name__})", retry_after=1.0, elsewhere=True)
