"""`/v1/chat/completions/batch`: several chats at once, as vLLM has it."""

from __future__ import annotations

from services.gateway.api.response import ResponseWriter, response_body
from services.gateway.http.call import Call
from services.gateway.http.generation import GeneratingEndpoint, new_header


class ChatBatchEndpoint(GeneratingEndpoint):
    """Answers with a choice for each conversation, once all have ended."""

    async def __call__(self, call: Call) -> None:
        """Generates and responds. Raises RequestError."""
        generation = await self._read(call, "chat_batch")
        generation = self._admitted(call, generation)
        details = await call.unless_left(self._table.tokenizer.prompt_details(generation))
        header = new_header(generation, "chatcmpl")
        self._log(call, generation, header)
        response = await self._table.open(generation, header, ResponseWriter(), details)
        if await self._whole(call, response):
            body = response_body(header, response.choices, generation.response_options, response.started_at)
            await self._answer(call, body)
