"""Has a sound written down window by window: each becomes rows at an encoder, then a request like any other.

Windows depend on nothing of each other but the language, which Whisper's first one says where the client does not.
Several are on their way at a time; what is said comes in their order.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from services.gateway.api.audio.request import AudioRequest
from services.gateway.api.audio.segments import SpokenSegment
from services.gateway.api.audio.words import SpokenWord
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import GenerationResponse, ResponseHeader, ResponseWriter
from services.gateway.audio.audio_decoder import AudioDecoder
from services.gateway.audio.audio_process import DecodedAll, DecodedWindow
from services.gateway.request_table import RequestTable
from shared.messages.encoder import EncodeInput
from shared.messages.generation import PromptEmbeds
from shared.messages.model_card import AudioModel, SoundModel

MAX_AT_ONCE = 4
"""Windows of one sound that are on their way at the same time."""

Pieces = asyncio.Queue[str | None]
"""New text of a window; None: there is no more."""


class WindowTranscript(NamedTuple):
    """What was said in a window."""

    text: str
    segments: tuple[SpokenSegment, ...]
    language: str
    prompt_tokens: int
    output_tokens: int
    words: tuple[SpokenWord, ...] = ()


class _Window:
    """One that is on its way: its text as it comes, and what it came to."""

    def __init__(self, work: Callable[[_Window], asyncio.Task[WindowTranscript | RequestError]]) -> None:
        self.pieces: Pieces = asyncio.Queue()
        self.outcome = work(self)
        self.outcome.add_done_callback(lambda _: self.pieces.put_nowait(None))


class Transcriber(ABC):
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
        self._opened = 0
        self.seconds = 0.0
        """Of the sound, once all of it is decoded."""

    @property
    @abstractmethod
    def _windows(self) -> AudioModel | SoundModel:
        """What says how long a window is."""

    async def _begin(self) -> None:
        """Gets what all windows need. Raises RequestError."""
        return

    def _at_once(self) -> int:
        """Windows that may be on their way at present."""
        return MAX_AT_ONCE

    @abstractmethod
    async def _hear(self, decoded: DecodedWindow, pieces: Pieces) -> WindowTranscript:
        """All of a window's text, which goes to `pieces` as it comes. Raises RequestError."""

    async def heard(self, file: bytes) -> AsyncIterator[str | WindowTranscript]:
        """New text in its order, and behind that of each window all of it. Raises RequestError."""
        await self._begin()
        under_way: list[_Window] = []
        windows = self._decoder.windows(file, self._windows)
        try:
            ended = False
            while not ended or under_way:
                while not ended and len(under_way) < self._at_once():
                    decoded = await anext(windows)
                    if isinstance(decoded, DecodedAll):
                        self.seconds, ended = decoded.seconds, True
                    else:
                        under_way.append(self._start(decoded))
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

    def _start(self, decoded: DecodedWindow) -> _Window:
        return _Window(lambda window: asyncio.create_task(self._outcome(decoded, window.pieces)))

    async def _outcome(self, decoded: DecodedWindow, pieces: Pieces) -> WindowTranscript | RequestError:
        """An error is returned, so that it is raised in the windows' order."""
        try:
            return await self._hear(decoded, pieces)
        except RequestError as error:
            return error

    async def _rows(self, decoded: DecodedWindow) -> PromptEmbeds:
        """Raises RequestError. Behind the first window a crowd at the encoders is waited for."""
        images, generation = self._table.images, self._generation
        question = EncodeInput(decoded.samples, generation.cache_salt, generation.key or self._header.id)
        if decoded.start:
            return await images.awaited("file", question, generation.model.name)
        rows = await images.encoded("file", question, generation.model.name)
        images.open_rows.add(rows, question, generation.model.name)
        return rows

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
