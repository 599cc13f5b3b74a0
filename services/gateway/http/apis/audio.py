"""`/v1/audio/transcriptions` and `/v1/audio/translations`, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
from msgspec.structs import replace

from services.gateway.api.audio.answer import Transcript, answer_body, delta_event, done_event
from services.gateway.api.audio.request import (
    MAX_FILE_BYTES,
    MAX_PROMPT_BYTES,
    AudioRequest,
    Fields,
    Task,
    read_audio_request,
)
from services.gateway.api.errors import RequestError, invalid
from services.gateway.api.generation import GenerationRequest, choose_alias, choose_lora, choose_model
from services.gateway.api.response import ResponseHeader
from services.gateway.audio.audio_decoder import AudioDecoder
from services.gateway.audio.chat_transcriber import ChatTranscriber
from services.gateway.audio.transcriber import Transcriber, WindowTranscript
from services.gateway.audio.whisper_transcriber import WhisperTranscriber
from services.gateway.http.access import AccessControl
from services.gateway.http.apis.multipart import FORM_BYTES, FileBegin, FormField, FormReader, unknown_field
from services.gateway.http.call import Call
from services.gateway.http.generation import EVENT_STREAM, STREAM_HEADERS, StreamSettings
from services.gateway.http.streaming import DONE, KEEP_ALIVE, error_frame
from services.gateway.request_table import RequestTable
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.model_card import AudioModel
from shared.messages.tokenizer import TokenPrompt

log = logging.getLogger(__name__)

FILE = "file"


class AudioEndpoint:
    """Answers what is said in a file. Each call's state is in its `Transcriber`."""

    def __init__(
        self, task: Task, table: RequestTable, access: AccessControl, settings: StreamSettings, decoder: AudioDecoder
    ) -> None:
        self._task: Task = task
        self._table, self._access, self._settings, self._decoder = table, access, settings, decoder

    async def __call__(self, call: Call) -> None:
        """Reads, hears and responds. Raises RequestError as long as no response was started."""
        self._decoder.check_installed()
        with self._table.arriving():
            file, request, name = await self._read(call)
        generation = self._admitted(call, request, name)
        header = ResponseHeader("transcription", f"audio-{secrets.token_hex(12)}", int(time.time()), name or "")
        call.name_request(header.id)
        extra = {"request": header.id, "client_request": call.client_id, "endpoint": header.kind}
        log.info("request", extra={**extra, "model": generation.served_name, "choices": 1, "stream": request.stream})
        transcriber = self._transcriber(request, generation, header)
        answer = self._stream if request.stream else self._respond
        try:
            await call.unless_left(answer(call, request, transcriber, transcriber.heard(file)))
        except RequestError:
            if not call.connection.is_closing():
                call.record.outcome = "failed"
                raise
            call.record.outcome = "client left"  # which is no error, and nobody would read one
        else:
            call.record.outcome = "finished"

    def _transcriber(
        self, request: AudioRequest, generation: GenerationRequest, header: ResponseHeader
    ) -> WhisperTranscriber | ChatTranscriber:
        given = self._table, self._decoder, request, generation, header
        if isinstance(request.audio, AudioModel):
            return WhisperTranscriber(request.audio, *given)
        assert request.model.sounds is not None, "it was checked"
        return ChatTranscriber(request.model.sounds, request.audio, *given)

    async def _read(self, call: Call) -> tuple[bytes, AudioRequest, str | None]:
        """The file, what is asked of it, and the model's name as the client gave it. Raises RequestError."""
        form, fields, file = FormReader(call.headers.get(b"content-type", b""), MAX_PROMPT_BYTES), Fields(), bytearray()
        given = False
        async for event in form.events(call.pieces(MAX_FILE_BYTES + FORM_BYTES, held=True)):
            match event:
                case FormField(name="file"):
                    raise invalid(FILE, "a file with a name is expected")
                case FormField():
                    fields.setdefault(event.name, []).append(event.value)
                case FileBegin():
                    if event.name != FILE:
                        raise unknown_field(event.name)
                    if given:
                        raise invalid(FILE, "this field is there twice")
                    given = True
                case _:
                    file += event
        if not given:
            raise invalid(FILE, "this field is required")
        if len(file) > MAX_FILE_BYTES:
            raise RequestError(413, f"{FILE}: larger than the {MAX_FILE_BYTES} bytes that are allowed", param=FILE)
        name = next(iter(fields.get("model", ())), None)
        model = choose_model(name, self._table.cluster.models())
        return bytes(file), read_audio_request(fields, self._task, model), name

    def _admitted(self, call: Call, request: AudioRequest, name: str | None) -> GenerationRequest:
        """What each window asks for, as the call's key may ask; room for one is taken. Raises RequestError."""
        generation = GenerationRequest(
            kind="transcription",
            model=request.model,
            prompts=(TokenPrompt(b""),),
            n=1,
            seed=request.seed,
            sampling=SamplingOptions(seed=0, temperature=request.temperature),
            stopping=StopConditions(),
            stream=None,
            alias=choose_alias(name, request.model),
            lora=choose_lora(name, request.model),
        )
        call.record.model = generation.served_name
        generation = replace(self._access.bound(generation, call.key), trace=call.trace)
        self._table.admit(1, request.model.name)
        self._access.reserve(call, generation, self._table.free)
        return generation

    async def _respond(
        self, call: Call, request: AudioRequest, transcriber: Transcriber, heard: AsyncIterator[str | WindowTranscript]
    ) -> None:
        windows = [each async for each in heard if isinstance(each, WindowTranscript)]
        _count(call, windows)
        body, kind = answer_body(request, _together(windows, transcriber.seconds))
        async with asyncio.timeout(self._settings.read_timeout):
            await call.respond(body, content_type=kind)

    async def _stream(
        self, call: Call, request: AudioRequest, transcriber: Transcriber, heard: AsyncIterator[str | WindowTranscript]
    ) -> None:
        """Server-sent events, the last one with the whole text. An error behind the first one is an event, too."""
        windows, started, waiting = list[WindowTranscript](), False, asyncio.ensure_future(anext(heard, None))
        try:
            while True:
                done, _ = await asyncio.wait([waiting], timeout=self._settings.keep_alive if started else None)
                if not done:
                    self._write(call, KEEP_ALIVE)
                    continue
                if (event := waiting.result()) is None:
                    break
                waiting = asyncio.ensure_future(anext(heard, None))
                if isinstance(event, WindowTranscript):
                    windows.append(event)
                    continue
                if not started:
                    await call.start(200, EVENT_STREAM, STREAM_HEADERS)
                self._write(call, _frame(delta_event(event if started else event.lstrip())))
                started = True
        except RequestError as error:
            if not started:
                raise
            self._write(call, error_frame(error))
        else:
            if not started:
                await call.start(200, EVENT_STREAM, STREAM_HEADERS)
            self._write(call, _frame(done_event(_together(windows, transcriber.seconds))) + DONE)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            _count(call, windows)
        async with asyncio.timeout(self._settings.read_timeout):
            await call.end()

    def _write(self, call: Call, frame: bytes) -> None:
        """Ends the call of a client that does not read."""
        call.connection.write_chunk(frame)
        if call.connection.unread() > self._settings.unread_limit:
            call.connection.abort()


def _frame(event: dict[str, object]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


def _together(windows: list[WindowTranscript], seconds: float) -> Transcript:
    text = "".join(each.text for each in windows).strip()
    segments = tuple(segment for each in windows for segment in each.segments)
    words = tuple(word for each in windows for word in each.words)
    return Transcript(seconds, windows[0].language if windows else "en", text, segments, words)


def _count(call: Call, windows: list[WindowTranscript]) -> None:
    call.record.prompt_tokens = sum(each.prompt_tokens for each in windows)
    call.record.output_tokens = sum(each.output_tokens for each in windows)
