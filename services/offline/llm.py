"""`LLM`: a model to be called like a function, with vLLM's names."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from services.offline.engine_thread import EngineThread
from services.offline.errors import EngineFailed, InvalidRequest
from services.offline.in_process import Answer
from services.offline.outputs import RequestOutput, request_output, tokens_with_logprobs
from services.offline.params import SamplingParams
from services.offline.progress import progress_bar
from services.offline.prompts import Asked, Message, Prompt, asked, conversations, params_for
from services.offline.settings import EngineSettings, configs, named
from shared.error_groups import innermost

PER_SEQUENCE = 2
"""Sequences at the engine for each that it can run: the next ones wait there, not here."""


class LLM:
    """Owns one engine, in this process but for its ranks where there are several.

    Calls block until all is generated; give many prompts in one call.

    Ends with `close()`, with its `with` block, or with the interpreter.
    """

    def __init__(
        self,
        model: str,
        *,
        served_model_name: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        kv_memory: str | int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_dtype: str = "auto",
        enforce_eager: bool = False,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 2048,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        settings: Mapping[str, object] | None = None,
        progress: bool = True,
        start_timeout: float = 600.0,
    ) -> None:
        """Returns when the model is loaded. `settings` are those of `baton up --set`: {"scheduler.run_ahead": 0}.

        Raises EngineFailed where it cannot be, InvalidRequest for a setting that is not allowed.
        """
        self.model = named(model, served_model_name)
        self._progress = progress
        self._window = PER_SEQUENCE * max_num_seqs
        chosen = EngineSettings(
            model=model,
            served_model_name=self.model,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            kv_memory=kv_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            enforce_eager=enforce_eager,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            more=settings or {},
        )
        self._texts: dict[int, str] = {}
        """Of single tokens, as far as log-probabilities have shown them; no more than the vocabulary."""
        self._engine = EngineThread(configs(chosen), start_timeout)
        self._end = weakref.finalize(self, self._engine.close)
        self._end.atexit = False  # the engine knows how to leave then

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; answers in their order. `params`: one for all, or one for each.

        Raises InvalidRequest for the first request that cannot be served; the others are given up then.
        """
        wanted = asked(prompts, params)
        return self._all(wanted, self._progress if progress is None else progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered by the model's chat template. Raises as `generate` does.

        The text is as the model wrote it: calls of tools and thoughts are not taken apart.
        """
        each = conversations(messages)
        template = {
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        fields = {name: value for name, value in template.items() if value is not None}
        prompts = self._engine.wait(self._rendered(each, fields))
        wanted = [Asked(ids, how) for ids, how in zip(prompts, params_for(len(each), params), strict=True)]
        return self._all(wanted, self._progress if progress is None else progress)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens that a prompt becomes."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": add_special_tokens}
        tokens: list[int] = self._engine.wait(self._asked("/tokenize", body))["tokens"]
        return tokens

    def close(self) -> None:
        """Ends the engine and frees what it holds. Safe to call again."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def call(self, method: str, path: str, body: bytes, request_id: str | None = None) -> Answer:
        """For whoever has requests of the OpenAI API already: what the server would answer. From any event loop."""
        future = self._engine.submit(self._engine.call(method, path, body, request_id))
        return await asyncio.wrap_future(future)

    # ---- on the engine's loop

    def _all(self, wanted: list[Asked], progress: bool) -> list[RequestOutput]:
        with progress_bar(len(wanted), progress) as done:
            return self._engine.wait(self._generated(wanted, done))

    async def _generated(self, wanted: list[Asked], done: Callable[[int], None]) -> list[RequestOutput]:
        """In the order given; as many at a time as keep the engine busy."""
        places = asyncio.Semaphore(self._window)

        async def one(request: Asked) -> RequestOutput:
            async with places:
                output = await self._one(request)
            done(sum(len(choice.token_ids) for choice in output.outputs))
            return output

        return await _first_error(one(request) for request in wanted)

    async def _one(self, request: Asked) -> RequestOutput:
        longest = await self._room(request) if request.params.max_tokens is None else None
        answer = await self._asked("/v1/completions", request.body(self.model, longest))
        text = request.text
        if text is None:
            text = await self._decoded(answer["choices"][0]["prompt_token_ids"])
        for token in tokens_with_logprobs(answer) - self._texts.keys():
            self._texts[token] = await self._decoded([token])
        return request_output(answer, text, self._texts, request.params.logprobs or 0)

    async def _decoded(self, tokens: list[int]) -> str:
        text: str = (await self._asked("/detokenize", {"model": self.model, "tokens": tokens}))["prompt"]
        return text

    async def _room(self, request: Asked) -> int:
        """Tokens that the context holds beside the prompt."""
        if isinstance(request.prompt, str):
            count = int((await self._asked("/tokenize", {"model": self.model, "prompt": request.prompt}))["count"])
        else:
            count = len(request.prompt)
        kept = request.params.truncate_prompt_tokens
        return max(1, self._engine.context - (count if kept is None or kept < 0 else min(count, kept)))

    async def _rendered(self, each: list[list[Message]], fields: Mapping[str, Any]) -> list[list[int]]:
        async def one(messages: list[Message]) -> list[int]:
            body = {"model": self.model, "messages": messages, **fields}
            tokens: list[int] = (await self._asked("/tokenize", body))["tokens"]
            return tokens

        return [await one(messages) for messages in each]

    async def _asked(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The gateway's answer. Raises InvalidRequest for what it refuses, EngineFailed for what it cannot do."""
        try:
            encoded = msgspec.json.encode(body)
        except TypeError as error:
            raise InvalidRequest(str(error)) from None
        answer = await self._engine.call("POST", path, encoded)
        found: dict[str, Any] = msgspec.json.decode(answer.body)
        if answer.status == 200:
            return found
        refusal = found["error"]
        if answer.status < 500:
            raise InvalidRequest(refusal["message"], refusal.get("param"))
        raise EngineFailed(refusal["message"])


async def _first_error(works: Iterable[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """All results in order; the first error gives up all the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise innermost(errors) from None
    return [task.result() for task in running]
