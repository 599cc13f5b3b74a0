"""vLLM's `/v1/completions/render`, `/v1/chat/completions/render` and `/v1/messages/render`: what a request comes to,
without generating anything."""

from __future__ import annotations

import secrets
from typing import Literal

from services.gateway.api.errors import unsupported
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.vllm.rendered import rendered_request
from services.gateway.http.access import AccessControl
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call
from services.gateway.request_table import RequestTable
from shared.messages.tokenizer import embeds_of

RenderedKind = Literal["chat", "completion", "messages"]
PREFIXES: dict[RenderedKind, str] = {"chat": "chatcmpl", "completion": "cmpl", "messages": "chatcmpl"}


class RenderEndpoint:
    """Answers with a rendered request; for completions with one for each prompt."""

    def __init__(self, table: RequestTable, kind: RenderedKind, parser: BodyParser, access: AccessControl) -> None:
        self._table, self._kind, self._parser, self._access = table, kind, parser, access

    async def __call__(self, call: Call) -> None:
        """Reads and responds. Raises RequestError."""
        with self._table.arriving():
            generation: GenerationRequest = await self._parser.read(self._kind, await call.body())
        call.record.model = generation.served_name
        generation = self._access.bound(generation, call.key)
        if any(map(embeds_of, generation.prompts)):
            raise unsupported("messages", "rendering of images and embeddings, which have no token ids,")
        name = f"{PREFIXES[self._kind]}-{generation.request_id or secrets.token_hex(12)}"
        rendered = []
        for i, prompt in enumerate(generation.prompts):
            tokens = await self._table.tokenizer.prompt_ids(generation, prompt)
            rendered.append(rendered_request(generation, f"{name}-{i}" if self._kind == "completion" else name, tokens))
        await call.respond_json(rendered if self._kind == "completion" else rendered[0])
