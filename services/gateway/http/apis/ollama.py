"""`/api/chat`, `/api/generate` and what Ollama's clients ask beside them."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec

from services.gateway.api.errors import RequestError, abbreviated
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.ollama.answer import (
    AnswerShape,
    OllamaMessage,
    answer,
    ending,
    error_body,
    model_details,
    model_entry,
)
from services.gateway.api.ollama.request import LATEST, ModelNameOnly, read_show
from services.gateway.api.response import ChoiceState, ResponseWriter
from services.gateway.http.access import AccessControl, check_model
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call, ClientConnection
from services.gateway.http.generation import GeneratingEndpoint, StreamSettings, new_header
from services.gateway.http.streaming import EventWriter
from services.gateway.request_table import RequestTable
from services.gateway.resumable_streams import ResumableStreams
from shared.ids import ModelName
from shared.messages.gateway import Delta
from shared.messages.model_card import ModelCard

LINES = b"application/x-ndjson"


_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*")


class LineWriter(EventWriter):
    """Writes an answer as lines of JSON. There is no line that means nothing, so a silent stream shows no life."""

    keep_alive_frame = b""

    def __init__(
        self, shape: AnswerShape, model: str, connection: ClientConnection, *, unread_limit: int, now: float
    ) -> None:
        super().__init__(connection, keep_alive=float("inf"), unread_limit=unread_limit, now=now)
        self._shape, self._model = shape, model
        self.began = now
        """When the response did, by its clock."""
        self._now = now

    def write(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        """See `EventWriter.write`."""
        self._now = now
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        return super().write(choice, delta, now)

    def frames(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Returns a line of new output; none where nothing is decided yet."""
        assert choice.message is not None
        said = choice.message.feed(delta.text, delta.finish)
        return [_line(answer(self._shape, self._model, said, choice))] if said else []

    def last_frames(self, choices: list[ChoiceState]) -> list[bytes]:
        """Returns the line that says how it ended."""
        [choice] = choices
        last = answer(self._shape, self._model, {}, choice)
        return [_line(last | ending(choice, self.began, self._now))]

    def error_frames(self, error: RequestError) -> bytes:
        """Returns the error as a line."""
        return error_body(error) + b"\n"


class OllamaEndpoint(GeneratingEndpoint):
    """Answers `/api/chat` or `/api/generate`."""

    def __init__(
        self,
        shape: AnswerShape,
        table: RequestTable,
        parser: BodyParser,
        access: AccessControl,
        streams: ResumableStreams,
        settings: StreamSettings,
    ) -> None:
        super().__init__(table, parser, access, streams, settings)
        self._shape: AnswerShape = shape

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError as long as no response was started."""
        asked = await self._read(call, "ollama_chat" if self._shape == "chat" else "ollama_generate")
        if isinstance(asked, ModelNameOnly):
            check_model(asked.names, call.key)
            loaded = answer(self._shape, asked.name, {})
            await call.respond_json(loaded | {"done": True, "done_reason": "load"})
            return
        generation: GenerationRequest = self._admitted(call, asked)
        generation = await self._filled(call, generation)
        details = await call.unless_left(self._table.tokenizer.prompt_details(generation))
        header = new_header(generation, "ollama")
        self._log(call, generation, header)
        if generation.stream is None:
            response = await self._table.open(generation, header, ResponseWriter(), details)
            if await self._whole(call, response):
                [choice] = response.choices
                assert isinstance(choice.message, OllamaMessage)
                body = answer(self._shape, header.model, choice.message.body(), choice)
                body |= ending(choice, response.started_at, choice.last_token_at or response.started_at)
                await self._finish(call, call.respond_json(body))
            return
        writer = LineWriter(
            self._shape, header.model, call.connection, unread_limit=self._settings.unread_limit, now=time.monotonic()
        )
        response = await self._table.open(generation, header, writer, details)
        writer.began = response.started_at
        await self._streamed(call, response, writer, LINES)


class OllamaInfo:
    """Answers what Ollama's clients ask about models."""

    def __init__(self, table: RequestTable, version: str) -> None:
        self._table, self._version = table, version

    async def tags(self, call: Call) -> None:
        """`/api/tags`: the models that the client may use."""
        await call.respond_json({"models": [model_entry(card, name) for card, name in self._models(call)]})

    async def running(self, call: Call) -> None:
        """`/api/ps`: all of them, as they are loaded as long as they are served."""
        far = "9999-12-31T23:59:59Z"
        entries = [model_entry(card, name) for card, name in self._models(call)]
        await call.respond_json({"models": [{**entry, "expires_at": far, "size_vram": 0} for entry in entries]})

    async def show(self, call: Call) -> None:
        """`/api/show`: one model. Raises RequestError."""
        wanted = read_show(await call.small_body())
        for card, name in self._models(call):
            if name in (wanted, wanted.removesuffix(LATEST)):
                await call.respond_json(self._shown(card))
                return
        raise RequestError(404, f"model {abbreviated(wanted)} not found", param="model", code="model_not_found")

    async def version(self, call: Call) -> None:
        """`/api/version`: of this server, in numbers only, as its clients compare them."""
        released = _RELEASE.match(self._version)
        await call.respond_json({"version": self._version if released is None else released[0]})

    def _models(self, call: Call) -> list[tuple[ModelCard, ModelName]]:
        cards = [card for card in self._table.cluster.models() if card.generates or _makes_embeddings(card)]
        named = [(card, name) for card in cards for name in (card.name, *(lora.name for lora in card.loras))]
        allowed = [(card, name) for card, name in named if call.key.allows_model(name)]
        aliases = [(card, alias) for card in cards for alias in card.aliases]
        return allowed + [
            (card, alias) for card, alias in aliases if any(map(call.key.allows_model, (alias, card.name)))
        ]

    def _shown(self, card: ModelCard) -> dict[str, Any]:
        dialect = self._table.cluster.dialect(card.name)
        can = ["completion"] if card.generates else []
        can += ["embedding"] if _makes_embeddings(card) else []
        can += ["tools"] if dialect.tools is not None else []
        can += ["vision"] if card.images is not None else []
        can += ["thinking"] if dialect.reasoning is not None else []
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": model_details(card),
            "model_info": {
                "general.architecture": "baton",
                "baton.context_length": card.max_model_len,
                "baton.vocab_size": card.vocab_size,
            },
            "capabilities": can,
        }


def _makes_embeddings(card: ModelCard) -> bool:
    return card.pooling is not None and card.pooling.makes == "embeddings"


def _line(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body) + b"\n"
