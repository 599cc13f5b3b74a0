"""Has a model of Whisper's kind write down a window: its decoder reads the window's rows beside its own tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from services.gateway.api.audio.segments import WindowTimes, segments_of
from services.gateway.api.audio.words import SpokenWord, words_of
from services.gateway.api.response import ChoiceState, ResponseWriter
from services.gateway.audio.audio_process import DecodedWindow
from services.gateway.audio.transcriber import Pieces, Transcriber, WindowTranscript
from shared.messages.encoder import EncodeInput, WrittenTokens
from shared.messages.gateway import Delta, PositionLogprobs
from shared.messages.generation import PromptEmbeds, SamplingOptions, StopConditions
from shared.messages.model_card import AudioModel
from shared.messages.tokenizer import Encode, EncodeReply, TextPrompt, TokenPrompt
from shared.models.audio_models import SAMPLE_BYTES, TRANSCRIPTION_ARG
from shared.packing import pack, unpack

_TIME = re.compile(r"<\|\d+\.\d\d\|>")
"""What models may write though they are not asked for it."""


class _Probe(NamedTuple):
    """What the first token behind the beginning says of a window."""

    language: str | None
    no_speech: float


class _TimelessPieces(ResponseWriter):
    """Hands on new text, beside what its base class collects."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `ResponseWriter.write`."""
        if text := _TIME.sub("", delta.text):
            self._pieces.put_nowait(text)
        return super().write(choice, delta, now)


class WhisperTranscriber(Transcriber):
    """Transcribes one request by a model of Whisper's kind. Used once."""

    def __init__(self, audio: AudioModel, *given: Any) -> None:
        """`given`: see Transcriber."""
        super().__init__(*given)
        self._audio, self._said = audio, list[int]()
        self._language = self._request.language or (None if audio.languages else "en")

    @property
    def _windows(self) -> AudioModel:
        return self._audio

    async def _begin(self) -> None:
        self._said = await self._said_before()

    def _at_once(self) -> int:
        return super()._at_once() if self._language else 1

    async def _hear(self, decoded: DecodedWindow, pieces: Pieces) -> WindowTranscript:
        request, audio, said = self._request, self._windows, self._said
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
            replace(self._generation, prompts=(_prompt(said + words, rows),), sampling=sampling),
            _TimelessPieces(pieces),
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
        return WindowTranscript(text, segments, language, choice.prompt_tokens, choice.tokens, spoken)

    async def _token_ends(
        self, decoded: DecodedWindow, prompt: list[int], drawn: Sequence[PositionLogprobs]
    ) -> tuple[float, ...]:
        """When each token but an end was said, in seconds of the window. An encoder says it, who has the model's heads
        (ADR 110). Raises RequestError."""
        answer = [each.chosen.token_id for each in drawn if each.chosen.token_id != self._windows.end]
        written, generation = WrittenTokens(pack(prompt + answer), len(prompt)), self._generation
        turn = generation.key or self._header.id
        question = EncodeInput(decoded.samples, generation.cache_salt, turn, written=written)
        return await self._table.images.times("file", question, generation.model.name)

    async def _probe(self, rows: PromptEmbeds) -> _Probe:
        """As `transformers` and OpenAI find the language: the likeliest of their tokens behind the beginning."""
        audio = self._windows
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

    async def _said_before(self) -> list[int]:
        """The tokens of the client's prompt, as many of the last ones as the model's half of its positions takes."""
        request, previous = self._request, self._windows.previous
        if not request.prompt or previous is None:
            return []
        most = request.model.max_model_len // 2 - 1
        asked = Encode(TextPrompt(f" {request.prompt}", add_special_tokens=False), truncate_prompt_tokens=most)
        return [previous, *unpack((await self._table.tokenizer.ask(request.model, asked, EncodeReply)).tokens)]


def _prompt(tokens: list[int], rows: PromptEmbeds) -> TokenPrompt:
    return TokenPrompt(pack(tokens), rows)
