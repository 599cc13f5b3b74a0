"""Beam searches on the ring, as vLLM runs them: a step is one token of every beam, each a request of its own.

What goes wrong with a step is mended by the supervision of its requests; what the beams share is cached by the engines.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from msgspec.structs import replace

from services.gateway.answers.choice import ChoiceState
from services.gateway.answers.exchange import Exchange
from services.gateway.answers.heading import Heading
from services.gateway.answers.outlets import Whole
from services.gateway.api.errors import ApiError
from services.gateway.api.job import TEXT_ONLY, Job
from services.gateway.core.beam import BeamSearch, Hypothesis
from services.gateway.desk import Desk
from services.gateway.questions import Questions
from shared.messages.gateway import LogprobText, PositionLogprobs
from shared.messages.generation import SamplingParams, StopParams
from shared.messages.tokenizer import TokenPrompt
from shared.tokens import pack

CONTEXT_TOKENS = 8
"""Prompt tokens that an output is decoded behind: its first token may be spelled by what stands before it."""


class Search(NamedTuple):
    """One prompt's."""

    prompt: list[int]
    beams: BeamSearch
    told: list[list[PositionLogprobs]]
    """For each step, what each beam that ran then might have gone on with."""


async def open_searches(questions: Questions, job: Job) -> list[Search]:
    """Raises ApiError where a prompt is at fault, or too long for what is to follow it."""
    return [_opened(job, await questions.prompt_ids(job, prompt)) for prompt in job.prompts]


def _opened(job: Job, prompt: list[int]) -> Search:
    assert job.beams is not None
    context, wanted = job.model.max_model_len, job.stopping.max_tokens
    most = context - len(prompt) if wanted is None else wanted
    if len(prompt) + max(1, most) > context:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens; {len(prompt)} in the prompt "
            f"and {max(1, most)} to generate are not allowed.",
            param=("messages" if job.kind == "chat" else "prompt") if len(prompt) >= context else "max_tokens",
            code="context_length_exceeded",
        )
    ends = () if job.stopping.ignore_eos else job.model.eos_token_ids
    beams = BeamSearch(
        width=job.n,
        most_tokens=most,
        ends=ends,
        length_penalty=job.beams.length_penalty,
        early_stopping=job.beams.early_stopping,
    )
    return Search(prompt, beams, [])


class Searching:
    """Runs the searches of one HTTP request in lockstep, and fills its exchange in."""

    def __init__(self, desk: Desk, job: Job, exchange: Exchange, searches: list[Search], trace: str | None) -> None:
        self._desk, self._job, self._exchange, self._trace = desk, job, exchange, trace
        self._searches = searches
        self._deadline = time.monotonic() + desk.patience
        self._steps = 0
        self._cached: dict[int, int] = {}
        """By prompt, what its first step did not have to compute."""

    async def run(self) -> None:
        """Until the exchange has ended: finished, failed, or left by its client."""
        try:
            while active := [search for search in self._searches if not search.beams.over]:
                if not await self._step(active):
                    return
            await self._fill_in()
        except ApiError as error:
            self._exchange.fail(error)
        else:
            self._exchange.complete(time.monotonic())

    async def _step(self, active: list[Search]) -> bool:
        """One token more for every beam. False where the exchange has ended meanwhile."""
        self._steps += 1
        beams = [(search, beam) for search in active for beam in search.beams.running]
        prompts = tuple(TokenPrompt(pack(search.prompt + list(beam.tokens))) for search, beam in beams)
        heading = self._exchange.heading
        step = heading._replace(id=f"{heading.id}-step-{self._steps}")
        told = await self._told(self._one_token(prompts, active), step)
        if told is None:
            return False
        for search in active:
            count = len(search.beams.running)
            own, told = told[:count], told[count:]
            search.told.append(own)
            search.beams.advance([[(text.token_id, text.logprob) for text in position.top] for position in own])
        return True

    def _one_token(self, prompts: tuple[TokenPrompt, ...], active: list[Search]) -> Job:
        wanted = max(active[0].beams.candidates, self._job.sampling.logprobs or 0)
        candidates = min(wanted, self._job.model.vocab_size)
        return replace(
            self._job,
            prompts=prompts,
            n=1,
            seed=0,
            sampling=SamplingParams(seed=0, temperature=0.0, logprobs=candidates),
            stopping=StopParams(max_tokens=1, ignore_eos=True),
            echo=False,
            telling=TEXT_ONLY,
            truncate_prompt_tokens=None,
            beams=None,
        )

    async def _told(self, job: Job, heading: Heading) -> list[PositionLogprobs] | None:
        """The candidates of each of the job's prompts; None where the exchange has ended meanwhile."""
        step = await self._desk.open_part(job, heading, Whole(), self._trace)
        try:
            await asyncio.wait(
                (step.ended, self._exchange.ended),
                timeout=max(0.0, self._deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            await self._desk.leave(step)
        self._exchange.attempts += step.attempts - 1
        if self._exchange.ended.done():
            return None
        if step.error is not None:
            raise step.error
        if not step.ended.done():
            raise ApiError(503, f"the search took more than {self._desk.patience:g} s", retry_after=1.0)
        self._note_cached(step.choices)
        return [choice.logprobs[0] for choice in step.choices]

    def _note_cached(self, choices: list[ChoiceState]) -> None:
        if self._steps == 1:
            self._cached = {choice.index: choice.cached_tokens for choice in choices}

    async def _fill_in(self) -> None:
        for number, search in enumerate(self._searches):
            own = [choice for choice in self._exchange.choices if choice.prompt == number]
            for choice, hypothesis in zip(own, search.beams.ended, strict=False):
                await self._fill(choice, search, hypothesis)
                choice.cached_tokens = self._cached[number]
        # A vocabulary of a few tokens, or a search ended early, may have fewer.
        self._exchange.choices = [choice for choice in self._exchange.choices if choice.finish is not None]

    async def _fill(self, choice: ChoiceState, search: Search, found: Hypothesis) -> None:
        job, tokens = self._job, list(found.beam.tokens)
        choice.prompt_tokens, choice.tokens = len(search.prompt), len(tokens)
        choice.finish, choice.token_ids = found.finish, tokens
        choice.prompt_ids = search.prompt if job.telling.token_ids else None
        if job.sampling.logprobs is not None:
            choice.logprobs = list(_logprobs(search, found, job.sampling.logprobs))
        shown = tokens if found.finish == "length" or job.stopping.include_stop else tokens[:-1]
        choice.pieces = [await self._text(search.prompt, shown)]

    async def _text(self, prompt: list[int], tokens: list[int]) -> str:
        ask, context = self._desk.questions.text, prompt[-CONTEXT_TOKENS:]
        skip = self._job.skip_special_tokens
        before = await ask(self._job.model, context, skip_special_tokens=skip)
        return (await ask(self._job.model, context + tokens, skip_special_tokens=skip))[len(before) :]


def _logprobs(search: Search, found: Hypothesis, most_likely: int) -> list[PositionLogprobs]:
    return [
        PositionLogprobs(_chosen(told[place], token), told[place].top[:most_likely])
        for told, place, token in zip(search.told, found.beam.trail, found.beam.tokens, strict=False)
    ]


def _chosen(position: PositionLogprobs, token: int) -> LogprobText:
    return next(text for text in position.top if text.token_id == token)
