"""OpenAI's `/v1/decisions`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import chain

from msgspec.structs import replace

from services.gateway.api.decisions.answer import decisions_answer
from services.gateway.api.decisions.request import DecisionRequest
from services.gateway.api.errors import invalid
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import ResponseWriter
from services.gateway.http.access import AccessControl
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call
from services.gateway.http.generation import GeneratingEndpoint, StreamSettings, new_header
from services.gateway.request_table import RequestTable
from services.gateway.resumable_streams import ResumableStreams
from services.gateway.tokenizer_client import TokenizerClient
from shared.ids import ModelName
from shared.messages.tokenizer import TextPrompt

PREFIX = "decision"
END_TOKENS = 8
"""Of a prompt, with which letters are tokenized: what a letter's token is depends on what it follows."""
MAX_AT_ONCE = 8
"""Letters of one request that are tokenized at the same time."""
MAX_ENDS = 64
"""Ends of prompts of which letters' tokens are kept: a chat template has one, or few."""

LetterIds = tuple[tuple[int, ...], ...]
"""Token ids of each letter, in their order; none where the letter takes several tokens."""


class LetterTokens:
    """Owns which tokens letters are, of the ends of prompts that were asked for last."""

    def __init__(self, tokenizer: TokenizerClient) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[tuple[ModelName, int, tuple[int, ...]], dict[str, tuple[int, ...]]] = OrderedDict()
        """By the model, when it was loaded, and the end: another one may have the name of a model that is gone."""

    async def behind(self, generation: GenerationRequest, letters: str) -> LetterIds:
        """The tokens that each letter is behind the first prompt, alone and with a space before it, as answers begin in
        some templates; all prompts end in the same way. Raises RequestError."""
        model = generation.model
        end = tuple((await self._tokenizer.prompt_ids(generation, generation.prompts[0]))[-END_TOKENS:])
        kept = self._kept.setdefault((model.name, model.created, end), {})
        self._kept.move_to_end((model.name, model.created, end))
        if len(self._kept) > MAX_ENDS:
            self._kept.popitem(last=False)
        if missing := [letter for letter in letters if letter not in kept]:
            kept |= await self._tokenized(generation, end, missing)
        return tuple(kept[letter] for letter in letters)

    async def _tokenized(
        self, generation: GenerationRequest, end: tuple[int, ...], letters: list[str]
    ) -> dict[str, tuple[int, ...]]:
        slots, tokenizer = asyncio.Semaphore(MAX_AT_ONCE), self._tokenizer
        shown = await tokenizer.text(generation.model, list(end))

        async def ids(text: str) -> list[int]:
            async with slots:
                return await tokenizer.prompt_ids(generation, TextPrompt(text, add_special_tokens=False))

        written = [space + letter for letter in letters for space in ("", " ")]
        before, *found = await asyncio.gather(ids(shown), *(ids(shown + text) for text in written))
        tokens = [each[-1] if each[:-1] == before else None for each in found]
        pairs = zip(tokens[::2], tokens[1::2], strict=True)
        of_letters = ({token for token in pair if token is not None} for pair in pairs)
        return {letter: tuple(sorted(each)) for letter, each in zip(letters, of_letters, strict=True)}


class DecisionsEndpoint(GeneratingEndpoint):
    """Answers `/v1/decisions`."""

    def __init__(
        self,
        table: RequestTable,
        parser: BodyParser,
        access: AccessControl,
        streams: ResumableStreams,
        settings: StreamSettings,
    ) -> None:
        super().__init__(table, parser, access, streams, settings)
        self._tokens = LetterTokens(table.tokenizer)

    async def __call__(self, call: Call) -> None:
        """Answers all questions and responds. Raises RequestError."""
        asked = await self._read(call, "decision")
        assert isinstance(asked, DecisionRequest)
        generation = self._admitted(call, asked.generation)
        letters = await call.unless_left(self._tokens.behind(generation, asked.letters))
        if not all(letters) or len(set(chain.from_iterable(letters))) < sum(map(len, letters)):
            last = asked.letters[-1]
            raise invalid("model", f"its tokenizer has no token for each of the letters A to {last} of options")
        sampling = replace(generation.sampling, logprob_token_ids=tuple(chain.from_iterable(letters)))
        generation = replace(generation, sampling=sampling)
        header = new_header(generation, PREFIX)
        self._log(call, generation, header)
        response = await self._table.open(generation, header, ResponseWriter(), [])
        if await self._whole(call, response):
            body = decisions_answer(header, response.choices, asked.questions, letters)
            await self._finish(call, call.respond_json(body))
