"""vLLM's `/v1/completions/render`, `/v1/chat/completions/render` and `/v1/messages/render`: what a request comes to.

Its prompt's tokens, and how it is to be sampled: routers in front of several servers hash such tokens. Nothing is
generated."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

from services.gateway.api.encoding.lazy_json import LazyArray, LazyEncoder
from services.gateway.api.errors import unsupported
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.structured_outputs import OutputGrammar
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
            tokens = await call.unless_left(self._table.tokenizer.prompt_ids(generation, prompt))
            rendered.append(rendered_request(generation, f"{name}-{i}" if self._kind == "completion" else name, tokens))
        answer = LazyArray(rendered) if self._kind == "completion" else rendered[0]
        await call.respond(await LazyEncoder().encode(answer))


def rendered_request(generation: GenerationRequest, request_id: str, tokens: list[int]) -> dict[str, Any]:
    """Returns vLLM's GenerateRequest for one of the prompts, whose tokens are `tokens`."""
    stream, grammar = generation.stream, generation.output_grammar
    options = None
    if stream is not None:
        options = {"include_usage": stream.include_usage, "continuous_usage_stats": stream.continuous_usage}
    return {
        "request_id": request_id,
        "model": generation.served_name,
        "token_ids": tokens,
        "features": None,
        "sampling_params": _sampling_params(generation),
        "stream": stream is not None,
        "stream_options": options,
        "cache_salt": generation.cache_salt,
        "priority": generation.priority,
        "kv_transfer_params": None,
        "reasoning_ended": False if grammar is not None and grammar.grammar.after else None,
    }


def _sampling_params(generation: GenerationRequest) -> dict[str, Any]:
    """With vLLM's names; what is null was not asked for."""
    sampling, stopping = generation.sampling, generation.stopping
    return {
        "n": generation.n,
        "seed": generation.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": list(generation.bad_words),
        "thinking_token_budget": sampling.thinking_budget,
        "logprobs": sampling.logprobs,
        "logprob_token_ids": sampling.logprob_token_ids,
        "prompt_logprobs": sampling.prompt_logprobs,
        "max_tokens": stopping.max_tokens,
        "min_tokens": stopping.min_tokens,
        "stop": list(stopping.stop),
        "stop_token_ids": list(stopping.stop_token_ids),
        "ignore_eos": stopping.ignore_eos,
        "include_stop_str_in_output": stopping.include_stop,
        "skip_special_tokens": generation.skip_special_tokens,
        "stream_interval": generation.stream_interval,
        "structured_outputs": _structured_outputs(generation.output_grammar),
        "extra_args": msgspec.json.decode(sampling.extra_args) if sampling.extra_args else None,
        "skip_reading_prefix_cache": None if generation.prefix_caching else True,
    }


def _structured_outputs(output: OutputGrammar | None) -> dict[str, Any] | None:
    if output is None:
        return None
    grammar = output.grammar
    text = grammar.text
    value = text if grammar.kind in ("regex", "grammar") else msgspec.json.decode(text)
    return {grammar.kind: value, **({"disable_any_whitespace": True} if grammar.compact else {})}
