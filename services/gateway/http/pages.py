"""Everything but generation: models, tokens, health, metrics, version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from services.gateway.api.errors import ApiError, shown
from services.gateway.api.tokens import read_detokenize, read_tokenize
from services.gateway.desk import Desk
from services.gateway.http.call import Call
from shared.ids import ModelName
from shared.messages.lifecycle import ModelCard
from shared.tokens import unpack

VERSION = version("baton-serve")


class Pages:
    """Owns nothing; answers from what the desk knows."""

    def __init__(self, desk: Desk, max_body: int) -> None:
        self._desk, self._max_body = desk, max_body

    async def live(self, call: Call) -> None:
        """200 as long as the process answers at all."""
        await call.respond_json({"status": "alive"})

    async def health(self, call: Call) -> None:
        """200 only if the ring can serve."""
        await self._verdict(call, self._desk.not_serving())

    async def ready(self, call: Call) -> None:
        """200 only if this gateway takes requests and the ring can serve them."""
        reason = self._desk.not_serving() if self._desk.accepting else "this gateway is draining"
        await self._verdict(call, reason)

    async def _verdict(self, call: Call, reason: str | None) -> None:
        if reason is None:
            await call.respond_json({"status": "ok"})
        else:
            await call.respond_json({"status": "unavailable", "reason": reason}, 503, [(b"retry-after", b"1")])

    async def metrics(self, call: Call) -> None:
        await call.respond(generate_latest(REGISTRY), content_type=CONTENT_TYPE_LATEST.encode())

    async def version(self, call: Call) -> None:
        await call.respond_json({"version": VERSION})

    async def models(self, call: Call) -> None:
        await call.respond_json({"object": "list", "data": [_model(card) for card in self._desk.ring.models()]})

    async def model(self, call: Call) -> None:
        name = call.scope["path_params"]["name"]
        card = self._desk.ring.model(ModelName(name))
        if card is None:
            message = f"The model `{shown(name)[1:-1]}` does not exist."
            raise ApiError(404, message, param="model", code="model_not_found")
        await call.respond_json(_model(card))

    async def tokenize(self, call: Call) -> None:
        desk = self._desk
        card, question = read_tokenize(await call.body(self._max_body), desk.ring.models(), desk.limits)
        encoded = await desk.questions.encode(card, question)
        tokens = unpack(encoded.tokens)
        await call.respond_json(
            {
                "count": len(tokens),
                "max_model_len": card.max_model_len,
                "tokens": tokens,
                "token_strs": encoded.strings,
            }
        )

    async def detokenize(self, call: Call) -> None:
        card, question = read_detokenize(await call.body(self._max_body), self._desk.ring.models())
        decoded = await self._desk.questions.decode(card, question)
        await call.respond_json({"prompt": decoded.text})


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }
