"""Has a sound written down window by window: each becomes rows at an encoder, then a request like any other.

Windows depend on nothing of each other but the language, which the first one says where the client does not. Several
are on their way at a time; what is said comes in their order.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from services.gateway.api.audio.request import AudioRequest
from services.gateway.api.audio.segments import SpokenSegment, WindowTimes, segments_of
from services.gateway.api.audio.words import SpokenWord, words_of
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import ChoiceState, GenerationResponse, ResponseHeader, ResponseWriter
from services.gateway.audio.audio_decoder import AudioDecoder
from services.gateway.audio.audio_process import DecodedAll, DecodedWindow
from services.gateway.request_table import RequestTable
from shared.messages.encoder import EncodeInput, WrittenTokens
from shared.messages.gateway import Delta, PositionLogprobs
from shared.messages.generation import PromptEmbeds, SamplingOptions, StopConditions
from shared.messages.tokenizer import Encode, EncodeReply, TextPrompt, TokenPrompt
from shared.models.audio_models import SAMPLE_BYTES, TRANSCRIPTION_ARG
from shared.packing import pack, unpack

MAX_AT_ONCE = 4
"""Windows of one sound that are on their way at the same time."""

_TIME = re.compile(r"<\|\d+\.\d\d\|>")
"""What models may write though they are not asked for it."""


class HeardWindow(NamedTuple):
    """What was said in a window."""

    text: str
    segments: tuple[SpokenSegment, ...]
    language: str
    prompt_tokens: int
    output_tokens: int
    words: tuple[SpokenWord, ...] = ()


class _Probe(NamedTuple):
    """What the first token behind the beginning says of a window."""

    language: str | None
    no_speech: float


class _Pieces(ResponseWriter):
    """Hands on new text, beside what its base class collects."""

    def __init__(self, pieces: asyncio.Queue[str | None]) -> None:
        self._pieces = pieces

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `ResponseWriter.write`."""
        if text := _TIME.sub("", delta.text):
            self._pieces.put_nowait(text)
        return super().write(choice, delta, now)


class _Window:
    """One that is on its way: its text as it comes, and what it came to."""

    def __init__(self, work: Callable[[_Window], asyncio.Task[HeardWindow | RequestError]]) -> None:
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self.outcome = work(self)
        self.outcome.add_done_callback(lambda _: self.pieces.put_nowait(None))


class Transcriber:
    """Owns the windows of one request that are on their way. Used once."""

    def __init__(
        self,
        table: RequestTable,
        decoder: AudioDecoder,
        request: AudioRequest,
        generation: GenerationRequest,
        header: ResponseHeader,
    ) -> None:
        """`generation`: a request of one prompt, as its key may make it; each window's is like it."""
        self._table, self._decoder, self._request = table, decoder, request
        self._generation, self._header = generation, header
        self._language = request.language or (None if request.audio.languages else "en")
        self._opened = 0
        self.seconds = 0.0
        """Of the sound, once all of it is decoded."""

    async def heard(self, file: bytes) -> AsyncIterator[str | HeardWindow]:
        """New text in its order, and behind that of each window all of it. Raises RequestError."""
        said = await self._said_before()
        under_way: list[_Window] = []
        windows = self._decoder.windows(file, self._request.audio)
        try:
            ended = False
            while not ended or under_way:
                while not ended and len(under_way) < (MAX_AT_ONCE if self._language else 1):
                    decoded = await anext(windows)
                    if isinstance(decoded, DecodedAll):
                        self.seconds, ended = decoded.seconds, True
                    else:
                        under_way.append(self._start(decoded, said))
                if under_way:
                    window = under_way[0]
                    while (piece := await window.pieces.get()) is not None:
                        yield piece
                    outcome = await window.outcome
                    del under_way[0]
                    if isinstance(outcome, RequestError):
                        raise outcome
                    yield outcome
        finally:
            for window in under_way:
                window.outcome.cancel()
            await asyncio.gather(*(window.outcome for window in under_way), return_exceptions=True)
            await windows.aclose()

    def _start(self, decoded: DecodedWindow, said: list[int]) -> _Window:
        return _Window(lambda window: asyncio.create_task(self._outcome(decoded, said, window.pieces)))

    async def _outcome(
        self, decoded: DecodedWindow, said: list[int], pieces: asyncio.Queue[str | None]
    ) -> HeardWindow | RequestError:
        """An error is returned, so that it is raised in the windows' order."""
        try:
            return await self._hear(decoded, said, pieces)
        except RequestError as error:
            return error

    async def _hear(self, decoded: DecodedWindow, said: list[int], pieces: asyncio.Queue[str | None]) -> HeardWindow:
        request, audio = self._request, self._request.audio
        rows = await self._rows(decoded)
        no_speech = 0.0
        if self._language is None or request.format == "verbose_json":
            probe = await self._probe(rows)
            self._language, no_speech = self._language or probe.language, probe.no_speech
        language = self._language or "en"
        words = [audio.begin]
        if audio.languages:
            words += [dict(audio.languages)[language], *(token for task, token in audio.tasks if task == request.task)]
        words += [] if request.timed else [audio.no_timestamps]
        how = msgspec.json.encode({TRANSCRIPTION_ARG: "timestamps" if request.timed else "text"})
        sampling = replace(self._generation.sampling, extra_args=how, logprobs=0 if request.timed else None)
        response = await self._answered(
            replace(self._generation, prompts=(_prompt(said + words, rows),), sampling=sampling), _Pieces(pieces)
        )
        choice = response.choices[0]
        times = WindowTimes(decoded.start, len(decoded.samples) / SAMPLE_BYTES / audio.sample_rate)
        segments = (
            tuple(segments_of(choice.logprobs, audio, times, no_speech, request.temperature)) if request.timed else ()
        )
        text = "".join(each.text for each in segments) if request.timed else _TIME.sub("", "".join(choice.texts))
        spoken: tuple[SpokenWord, ...] = ()
        if "word" in request.granularities:
            ends = await self._token_ends(decoded, said + words, choice.logprobs)
            spoken = tuple(words_of(choice.logprobs, ends, audio, times, language))
        return HeardWindow(text, segments, language, choice.prompt_tokens, choice.tokens, spoken)

    async def _token_ends(
        self, decoded: DecodedWindow, prompt: list[int], drawn: Sequence[PositionLogprobs]
    ) -> tuple[float, ...]:
        """When each token but an end was said, in seconds of the window. An encoder says it, who has the model's heads
        (ADR 110). Raises RequestError."""
        answer = [each.chosen.token_id for each in drawn if each.chosen.token_id != self._request.audio.end]
        written, generation = WrittenTokens(pack(prompt + answer), len(prompt)), self._generation
        turn = generation.key or self._header.id
        question = EncodeInput(decoded.samples, generation.cache_salt, turn, written=written)
        return await self._table.images.times("file", question, generation.model.name)

    async def _rows(self, decoded: DecodedWindow) -> PromptEmbeds:
        """Raises RequestError. Behind the first window a crowd at the encoders is waited for."""
        images, generation = self._table.images, self._generation
        question = EncodeInput(decoded.samples, generation.cache_salt, generation.key or self._header.id)
        if decoded.start:
            return await images.awaited("file", question, generation.model.name)
        rows = await images.encoded("file", question, generation.model.name)
        images.open_rows.add(rows, question, generation.model.name)
        return rows

    async def _probe(self, rows: PromptEmbeds) -> _Probe:
        """As `transformers` and OpenAI find the language: the likeliest of their tokens behind the beginning."""
        audio = self._request.audio
        sampling = SamplingOptions(
            seed=0,
            temperature=0.0,
            allowed_token_ids=tuple(token for _, token in audio.languages) or None,
            logprobs=0,
            logprob_token_ids=(audio.no_speech,),
        )
        stopping = StopConditions(max_tokens=1, ignore_eos=True)
        generation = replace(
            self._generation, prompts=(_prompt([audio.begin], rows),), sampling=sampling, stopping=stopping
        )
        response = await self._answered(generation, ResponseWriter())
        (first,) = response.choices[0].logprobs
        codes = {token: code for code, token in audio.languages}
        return _Probe(codes.get(first.chosen.token_id), math.exp(first.top[0].logprob))

    async def _answered(self, generation: GenerationRequest, writer: ResponseWriter) -> GenerationResponse:
        """A response that has ended. Raises its error."""
        self._opened += 1
        header = self._header._replace(id=f"{self._header.id}-{self._opened}")
        response = await self._table.open(generation, header, writer, [])
        outcome = "client left"
        try:
            outcome = await response.ended
        finally:
            await self._table.close(response, outcome)  # type: ignore[arg-type]
        if response.error is not None:
            raise response.error
        if outcome != "finished":
            raise RequestError(410, "the request was ended", code="aborted")
        return response

    async def _said_before(self) -> list[int]:
        """The tokens of the client's prompt, as many of the last ones as the model's half of its positions takes."""
        request, previous = self._request, self._request.audio.previous
        if not request.prompt or previous is None:
            return []
        most = request.model.max_model_len // 2 - 1
        asked = Encode(TextPrompt(f" {request.prompt}", add_special_tokens=False), truncate_prompt_tokens=most)
        return [previous, *unpack((await self._table.tokenizer.ask(request.model, asked, EncodeReply)).tokens)]


def _prompt(tokens: list[int], rows: PromptEmbeds) -> TokenPrompt:
    return TokenPrompt(pack(tokens), rows)
