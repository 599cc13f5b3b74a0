"""`/generative_scoring` of vLLM."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.api.response import ResponseWriter
from services.gateway.api.tokens.generative_scores import GenerativeScoreRequest, joined, scores_answer
from services.gateway.http.call import Call
from services.gateway.http.generation import GeneratingEndpoint, new_header
from shared.messages.tokenizer import Prompt, TokenPrompt
from shared.packing import pack

PREFIX = "generative-scoring"
MAX_AT_ONCE = 8
"""Items of one request that are tokenized at the same time."""


class GenerativeScoresEndpoint(GeneratingEndpoint):
    """Answers `/generative_scoring`."""

    async def __call__(self, call: Call) -> None:
        """Scores and responds. Raises RequestError."""
        asked = await self._read(call, "generative_score")
        assert isinstance(asked, GenerativeScoreRequest)
        asked = replace(asked, generation=self._admitted(call, asked.generation))
        generation = replace(asked.generation, prompts=await call.unless_left(self._prompts(asked)))
        header = new_header(generation, PREFIX)._replace(prompt_field="items")
        self._log(call, generation, header)
        response = await self._table.open(generation, header, ResponseWriter(), [])
        if await self._whole(call, response):
            await self._finish(call, call.respond_json(scores_answer(header, response.choices, asked)))

    async def _prompts(self, asked: GenerativeScoreRequest) -> tuple[TokenPrompt, ...]:
        """Each item with the query, in token ids: texts are tokenized by themselves, and then joined."""
        slots, tokenizer, generation = asyncio.Semaphore(MAX_AT_ONCE), self._table.tokenizer, asked.generation

        async def ids(prompt: Prompt) -> list[int] | RequestError:
            """An error is returned, so that which of several is raised depends on no clock."""
            async with slots:
                try:
                    return await tokenizer.prompt_ids(generation, prompt)
                except RequestError as error:
                    return error

        tokens: list[list[int]] = []
        for found in await asyncio.gather(*map(ids, (asked.query, *generation.prompts))):
            if isinstance(found, RequestError):
                raise found
            tokens.append(found)
        query, *items = tokens
        return tuple(TokenPrompt(pack(joined(asked, query, item))) for item in items)
