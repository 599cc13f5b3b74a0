"""Runs beam searches as vLLM does: a step generates one token for every beam, each by a separate request.

The supervisor retries what fails within a step; engines have what beams share in their prefix caches.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from msgspec.structs import replace

from services.gateway.api.errors import RequestError, aborted
from services.gateway.api.generation import TEXT_ONLY, GenerationRequest
from services.gateway.api.response import ChoiceState, GenerationResponse, ResponseHeader, ResponseWriter
from services.gateway.core.beam_search import BeamSearch, Hypothesis
from services.gateway.metrics import ModelMeters
from services.gateway.request_table import RequestTable
from services.gateway.tokenizer_client import TokenizerClient
from shared.messages.gateway import LogprobText, PositionLogprobs
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.tokenizer import TokenPrompt
from shared.packing import pack

CONTEXT_TOKENS = 8
"""Prompt tokens before an output that are decoded with it: the text of its first token may depend on them."""


class PromptSearch(NamedTuple):
    """The search of one prompt."""

    prompt: list[int]
    beams: BeamSearch
    steps: list[list[PositionLogprobs]]
    """For each step, the candidates of each beam that ran then."""


async def open_searches(tokenizer: TokenizerClient, generation: GenerationRequest) -> list[PromptSearch]:
    """Returns a search for each prompt. Raises RequestError where a prompt is refused, or leaves no room for its
    output."""
    return [_open_search(generation, await tokenizer.prompt_ids(generation, prompt)) for prompt in generation.prompts]


def _open_search(generation: GenerationRequest, prompt: list[int]) -> PromptSearch:
    assert generation.beam_search is not None
    context = generation.model.max_model_len
    wanted = generation.stopping.within(len(prompt), context).max_tokens
    max_tokens = context - len(prompt) if wanted is None else wanted
    if len(prompt) + max(1, max_tokens) > context:
        raise RequestError(
            400,
            f"This model's maximum context length is {context} tokens; {len(prompt)} in the prompt "
            f"and {max(1, max_tokens)} to generate are not allowed.",
            param=("messages" if generation.kind == "chat" else "prompt") if len(prompt) >= context else "max_tokens",
            code="context_length_exceeded",
        )
    beams = BeamSearch(
        width=generation.n,
        max_tokens=max_tokens,
        ends=() if generation.stopping.ignore_eos else generation.model.eos_token_ids,
        length_penalty=generation.beam_search.length_penalty,
        early_stopping=generation.beam_search.early_stopping,
    )
    return PromptSearch(prompt, beams, [])


class BeamSearchRunner:
    """Runs the searches of one HTTP request in lockstep, and fills in the choices of its response."""

    def __init__(
        self,
        table: RequestTable,
        generation: GenerationRequest,
        response: GenerationResponse,
        searches: list[PromptSearch],
    ) -> None:
        self._table, self._generation, self._response = table, generation, response
        self._searches = searches
        self._deadline = time.monotonic() + table.timeout
        self._steps = 0
        self._cached_tokens: dict[int, int] = {}
        """For each prompt, the tokens that its first step found in the cache."""

    async def run(self) -> None:
        """Returns when the response has ended: finished, failed, or left by its client."""
        try:
            while active := [search for search in self._searches if not search.beams.over]:
                if not await self._step(active):
                    return
            await self._fill_choices()
        except RequestError as error:
            self._response.fail(error)
        else:
            self._response.complete_all(time.monotonic())

    async def _step(self, active: list[PromptSearch]) -> bool:
        """Extends every beam by one token. Returns False where the response has ended meanwhile."""
        self._steps += 1
        beams = [(search, beam) for search in active for beam in search.beams.running]
        prompts = tuple(TokenPrompt(pack(search.prompt + list(beam.tokens))) for search, beam in beams)
        header = self._response.header
        candidates = await self._candidates(
            self._one_token(prompts, active), header._replace(id=f"{header.id}-step-{self._steps}")
        )
        if candidates is None:
            return False
        for search in active:
            count = len(search.beams.running)
            own, candidates = candidates[:count], candidates[count:]
            search.steps.append(own)
            search.beams.advance([[(text.token_id, text.logprob) for text in position.top] for position in own])
        return True

    def _one_token(self, prompts: tuple[TokenPrompt, ...], active: list[PromptSearch]) -> GenerationRequest:
        wanted = max(active[0].beams.candidates, self._generation.sampling.logprobs or 0)
        candidates = min(wanted, self._generation.model.vocab_size)
        return replace(
            self._generation,
            prompts=prompts,
            n=1,
            seed=0,
            sampling=SamplingOptions(seed=0, temperature=0.0, logprobs=candidates),
            stopping=StopConditions(max_tokens=1, ignore_eos=True),
            echo=False,
            response_options=TEXT_ONLY,
            truncate_prompt_tokens=None,
            beam_search=None,
        )

    async def _candidates(self, generation: GenerationRequest, header: ResponseHeader) -> list[PositionLogprobs] | None:
        """The candidates of each of the request's prompts; None where the response has ended meanwhile."""
        step = await self._table.open(generation, header, ResponseWriter(), [], ModelMeters())
        try:
            await asyncio.wait(
                (step.ended, self._response.ended),
                timeout=max(0.0, self._deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            await self._table.cancel(step)
        self._response.attempts += step.attempts - 1
        if self._response.ended.done():
            return None
        if any(choice.finish == "abort" for choice in step.choices):
            raise aborted()
        if step.error is not None:
            raise step.error
        if not step.ended.done():
            raise RequestError(503, f"the search took more than {self._table.timeout:g} s", retry_after=1.0)
        if self._steps == 1:
            self._cached_tokens = {choice.index: choice.cached_tokens for choice in step.choices}
        return [choice.logprobs[0] for choice in step.choices]

    async def _fill_choices(self) -> None:
        for number, search in enumerate(self._searches):
            own = [choice for choice in self._response.choices if choice.prompt == number]
            for choice, hypothesis in zip(own, search.beams.ended, strict=False):
                await self._fill(choice, search, hypothesis)
                choice.cached_tokens = self._cached_tokens[number]
        # A vocabulary of a few tokens, or an early end, may give fewer hypotheses than choices.
        self._response.choices = [choice for choice in self._response.choices if choice.finish is not None]

    async def _fill(self, choice: ChoiceState, search: PromptSearch, found: Hypothesis) -> None:
        generation, tokens = self._generation, list(found.beam.tokens)
        choice.prompt_tokens, choice.tokens = len(search.prompt), len(tokens)
        choice.finish, choice.token_ids = found.finish, tokens
        choice.prompt_ids = search.prompt if generation.response_options.token_ids else None
        if generation.response_options.prompt_text:
            choice.prompt_text = await self._table.tokenizer.text(generation.model, search.prompt)
        if generation.sampling.logprobs is not None:
            choice.logprobs = list(_logprobs(search, found, generation.sampling.logprobs))
        visible = tokens if found.finish == "length" or generation.stopping.include_stop else tokens[:-1]
        choice.texts = [await self._text(search.prompt, visible)]

    async def _text(self, prompt: list[int], tokens: list[int]) -> str:
        decode, context = self._table.tokenizer.text, prompt[-CONTEXT_TOKENS:]
        skip = self._generation.skip_special_tokens
        before = await decode(self._generation.model, context, skip_special_tokens=skip)
        return (await decode(self._generation.model, context + tokens, skip_special_tokens=skip))[len(before) :]


def _logprobs(search: PromptSearch, found: Hypothesis, most_likely: int) -> list[PositionLogprobs]:
    return [
        PositionLogprobs(_chosen(step[beam], token), step[beam].top[:most_likely])
        for step, beam, token in zip(search.steps, found.beam.trail, found.beam.tokens, strict=False)
    ]


def _chosen(position: PositionLogprobs, token: int) -> LogprobText:
    return next(text for text in position.top if text.token_id == token)
