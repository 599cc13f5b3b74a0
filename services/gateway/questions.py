"""Asks tokenizers what is no generation: which tokens a text becomes, which text tokens become."""

from __future__ import annotations

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
    Refused,
    TextPrompt,
    TokenizerAnswer,
    TokenizerQuestion,
    TokenPrompt,
)

ANSWER_TIMEOUT = 10.0
"""Seconds that a tokenizer may take."""


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

    async def echoes(self, job: Job) -> list[str]:
        """The texts of a completion's prompts; token ids are asked about."""
        texts = []
        for prompt in job.prompts:
            if isinstance(prompt, TextPrompt):
                texts.append(prompt.text)
            elif isinstance(prompt, TokenPrompt):
                texts.append((await self.decode(job.model, Decode(prompt.tokens))).text)
        return texts

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
