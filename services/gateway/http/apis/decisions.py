"""OpenAI's `/v1/decisions`."""

from __future__ import annotations

import asyncio
import secrets
import time
from itertools import chain

from msgspec.structs import replace

from services.gateway.api.decisions.answer import decisions_answer
from services.gateway.api.decisions.request import DecisionRequest
from services.gateway.api.errors import invalid
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import ResponseHeader, ResponseWriter
from services.gateway.http.call import Call
from services.gateway.http.generation import GeneratingEndpoint
from shared.messages.tokenizer import TextPrompt

PREFIX = "decision"
END_TOKENS = 8
"""Of a prompt, with which letters are tokenized: what a letter's token is depends on what it follows."""
MAX_AT_ONCE = 8
"""Letters of one request that are tokenized at the same time."""


class DecisionsEndpoint(GeneratingEndpoint):
    """Answers `/v1/decisions`."""

    async def __call__(self, call: Call) -> None:
        """Answers all questions and responds. Raises RequestError."""
        asked = await self._read(call, "decision")
        assert isinstance(asked, DecisionRequest)
        generation = self._admitted(call, asked.generation)
        letters = await self._letters(generation, asked.letters)
        sampling = replace(generation.sampling, logprob_token_ids=tuple(chain.from_iterable(letters)))
        generation = replace(generation, sampling=sampling)
        own = generation.request_id
        identity, shown = f"{PREFIX}-{secrets.token_hex(12)}", "" if own is None else f"{PREFIX}-{own}"
        header = ResponseHeader("decision", identity, int(time.time()), generation.served_name, shown_id=shown)
        self._log(call, generation, header)
        response = await self._table.open(generation, header, ResponseWriter(), [])
        if await self._whole(call, response):
            body = decisions_answer(header, response.choices, asked.questions, letters)
            await self._finish(call, call.respond_json(body))

    async def _letters(self, generation: GenerationRequest, letters: str) -> tuple[tuple[int, ...], ...]:
        """The tokens that each letter is behind a prompt, alone and with a space before it, as answers begin in some
        templates; all prompts end in the same way. Raises RequestError."""
        tokenizer, slots = self._table.tokenizer, asyncio.Semaphore(MAX_AT_ONCE)
        whole = await tokenizer.prompt_ids(generation, generation.prompts[0])
        end = await tokenizer.text(generation.model, whole[-END_TOKENS:])

        async def ids(text: str) -> list[int]:
            async with slots:
                return await tokenizer.prompt_ids(generation, TextPrompt(text, add_special_tokens=False))

        written = [space + letter for letter in letters for space in ("", " ")]
        before, *found = await asyncio.gather(ids(end), *(ids(end + text) for text in written))
        tokens = [each[-1] if each[:-1] == before else None for each in found]
        of_letters = [
            {token for token in pair if token is not None} for pair in zip(tokens[::2], tokens[1::2], strict=True)
        ]
        if not all(of_letters) or len(set().union(*of_letters)) < sum(map(len, of_letters)):
            raise invalid("model", f"its tokenizer has no token for each of the letters A to {letters[-1]} of options")
        return tuple(tuple(sorted(each)) for each in of_letters)
