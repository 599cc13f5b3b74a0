"""Asks tokenizers what is no generation: which tokens a text becomes, which text tokens become."""

from __future__ import annotations

from typing import NamedTuple

from services.gateway.api.errors import ApiError
from services.gateway.api.job import Job
from shared import topics
from shared.bus import AnswerError, AnswerTimeout, Bus, NoResponders, PayloadTooLarge
from shared.messages.lifecycle import ModelCard
from shared.messages.tokenizer import (
    Decode,
    Decoded,
    Encode,
    Encoded,
    Prompt,
    Refused,
    TextPrompt,
    TokenizerAnswer,
    TokenizerQuestion,
    TokenPrompt,
)
from shared.tokens import pack, unpack

ANSWER_TIMEOUT = 10.0
"""Seconds that a tokenizer may take."""


class PromptTold(NamedTuple):
    """What a client is told of its prompt."""

    echo: str
    first: str
    """Text of the first token, where log-probabilities are echoed."""
    token_ids: list[int] | None


class Questions:
    """Owns nothing. Every failure is an ApiError for the client who wants to know."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def encode(self, model: ModelCard, question: Encode) -> Encoded:
        answer = await self._ask(model, question)
        if not isinstance(answer, Encoded):
            raise _unanswered("another question's answer came")
        return answer

    async def decode(self, model: ModelCard, question: Decode) -> Decoded:
        answer = await self._ask(model, question)
        if not isinstance(answer, Decoded):
            raise _unanswered("another question's answer came")
        return answer

    async def told(self, job: Job) -> list[PromptTold]:
        """What the answer tells of each prompt. None of it is asked where the client does not want to know."""
        if not (job.echo or job.telling.token_ids):
            return []
        return [await self._told(job, prompt) for prompt in job.prompts]

    async def prompt_ids(self, job: Job, prompt: Prompt) -> list[int]:
        """The prompt's tokens, as the ring will compute them."""
        if isinstance(prompt, TokenPrompt):
            ids = unpack(prompt.tokens)
        else:
            ids = unpack((await self.encode(job.model, Encode(prompt))).tokens)
        return ids if job.truncate_prompt_tokens is None else ids[-job.truncate_prompt_tokens :]

    async def _told(self, job: Job, prompt: Prompt) -> PromptTold:
        scored = job.telling.echo_logprobs is not None
        whole = isinstance(prompt, TextPrompt) and job.truncate_prompt_tokens is None
        ids = await self.prompt_ids(job, prompt) if scored or job.telling.token_ids or not whole else None
        echo = first = ""
        if job.echo:
            echo = prompt.text if isinstance(prompt, TextPrompt) and whole else await self.text(job.model, ids or [])
        if scored and ids:
            first = await self.text(job.model, ids[:1])
        return PromptTold(echo, first, ids)

    async def text(self, model: ModelCard, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return (await self.decode(model, Decode(pack(ids), skip_special_tokens))).text

    async def _ask(self, model: ModelCard, question: TokenizerQuestion) -> Encoded | Decoded:
        topic = topics.tokenizer_questions(model.name)
        try:
            answer: TokenizerAnswer = await self._bus.ask(topic, question, TokenizerAnswer, ANSWER_TIMEOUT)
        except PayloadTooLarge as error:
            raise ApiError(413, str(error), param="body", code="too_large") from None
        except (NoResponders, AnswerTimeout, AnswerError) as error:
            raise _unanswered(type(error).__name__) from None
        if isinstance(answer, Refused):
            raise ApiError(400, answer.message, param=answer.field)
        return answer


def _unanswered(why: str) -> ApiError:
    return ApiError(503, f"no tokenizer answered ({why})", retry_after=1.0)
