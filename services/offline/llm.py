"""`LLM`: a model that is called like a function, with vLLM's names; all services in a thread of their own."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

import msgspec

from services.gateway.http.local_call import LocalAnswer
from services.offline.errors import EngineFailed, InvalidRequest
from services.offline.local_cluster import LocalCluster
from services.offline.outputs import RequestOutput, request_output, tokens_with_logprobs
from services.offline.pooling import (
    CLASSIFICATION,
    EMBEDDING,
    POOLING,
    ClassificationOutput,
    EmbeddingOutput,
    PooledCall,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    ScoringOutput,
    pair_calls,
    prompt_calls,
)
from services.offline.requests import (
    Message,
    Prompt,
    PromptRequest,
    SamplingParams,
    conversations,
    params_for,
    prompt_requests,
)
from services.offline.settings import EngineArguments, ServiceConfigs, service_configs
from shared.error_groups import innermost

R = TypeVar("R")
T = TypeVar("T")

STOP_SECONDS = 15.0
REQUESTS_PER_SEQUENCE = 2
"""Requests in flight for each sequence that the engine can run, so that the next ones wait at the engine."""


class LLM:
    """Owns one engine in this process; several ranks are processes of their own.

    Calls block until everything is generated, so give many prompts in one call. The engine ends with `close()`, with
    its `with` block, or with the interpreter.
    """

    def __init__(
        self,
        model: str,
        *,
        settings: Mapping[str, object] | None = None,
        progress: bool = True,
        start_timeout: float = 600.0,
        **arguments: Unpack[EngineArguments],
    ) -> None:
        """Returns when the model is loaded. `arguments` are described by the worker's settings of the same names;
        `settings` are those of `baton up --set`: {"scheduler.run_ahead": 0}; `start_timeout` is in seconds.

        Raises EngineFailed where the model cannot be loaded, InvalidRequest for a setting that is not allowed.
        """
        configs = service_configs(model, arguments, settings)
        self.model: str = configs.tokenizer.model_name()
        self._progress = progress
        self._window = REQUESTS_PER_SEQUENCE * configs.scheduler.max_running
        self._texts: dict[int, str] = {}
        """Text of single tokens that log-probabilities have named, by id; bounded by the vocabulary."""
        self._engine = EngineThread(configs, start_timeout)
        self._end = weakref.finalize(self, self._engine.close)
        self._end.atexit = False  # the engine has an exit handler of its own

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; returns the outputs in their order. `params`: one for all, or one for each.

        Raises InvalidRequest for the first request that cannot be served, and cancels the others; EngineFailed where
        the engine ends.
        """
        return self._run(prompt_requests(prompts, params), progress)

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
        """Answers one conversation or several, rendered by the model's chat template. Raises what `generate` raises.

        The text is as the model wrote it: tool calls and reasoning are not parsed.
        """
        template = {
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        fields = {name: value for name, value in template.items() if value is not None}
        each = conversations(messages)
        own = zip(each, params_for(len(each), params), strict=True)
        return self._run([PromptRequest({"messages": chat, **fields}, chosen) for chat, chosen in own], progress)

    @overload
    def encode(self, prompts: str, *, add_special_tokens: bool = True) -> list[int]: ...
    @overload
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask,
        progress: bool | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]: ...
    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        add_special_tokens: bool = True,
        progress: bool | None = None,
    ) -> list[int] | list[PoolingRequestOutput[PoolingOutput]]:
        """Returns what `/pooling` makes of each prompt for that task; without one the token ids that a text becomes.
        Raises what `generate` raises."""
        if pooling_task is not None:
            return self._pool(prompt_calls(POOLING, prompts, pooling_params, task=pooling_task), progress)
        return self._engine.wait(self._tokens(prompts, {"add_special_tokens": add_special_tokens}))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        progress: bool | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Returns the embedding of each prompt. `pooling_params`: one for all, or one for each. Raises what `generate`
        raises."""
        return self._pool(prompt_calls(EMBEDDING, prompts, pooling_params), progress)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        progress: bool | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Returns what there is of each label of each prompt. As `embed`."""
        return self._pool(prompt_calls(CLASSIFICATION, prompts, pooling_params), progress)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        progress: bool | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Returns how well texts go together: one with each of several, or each with its own. As `embed`."""
        return self._pool(pair_calls(data_1, data_2, pooling_params), progress)

    def close(self) -> None:
        """Ends the engine and frees what it holds. Safe to call again."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def call(self, method: str, path: str, body: bytes, request_id: str | None = None) -> LocalAnswer:
        """Returns what the server would answer to a request of the OpenAI API, not streamed. From any event loop.

        Raises EngineFailed where the engine ends.
        """
        future = self._engine.submit(self._engine.cluster.call(method, path, body, request_id))
        return await asyncio.wrap_future(future)

    def _run(self, requests: list[PromptRequest], progress: bool | None) -> list[RequestOutput]:
        with progress_bar(len(requests), self._progress if progress is None else progress) as done:
            return self._engine.wait(self._generate(requests, done))

    def _pool(self, calls: list[PooledCall], progress: bool | None) -> list[PoolingRequestOutput[Any]]:
        with progress_bar(len(calls), self._progress if progress is None else progress, "pooling") as done:
            return self._engine.wait(self._all(calls, lambda call, turn: self._pooled(call, turn, done)))

    # On the engine's event loop.

    async def _generate(self, requests: list[PromptRequest], done: Callable[[int], None]) -> list[RequestOutput]:
        return await self._all(requests, lambda request, turn: self._complete(request, turn, done))

    async def _all(self, asked: list[R], answer: Callable[[R, asyncio.Semaphore], Coroutine[Any, Any, T]]) -> list[T]:
        """All outputs in order; as many requests at a time as keep the engine busy. The first error ends the others."""
        in_flight = asyncio.Semaphore(self._window)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(answer(each, in_flight)) for each in asked]
        except BaseExceptionGroup as errors:
            raise innermost(errors) from None
        return [task.result() for task in running]

    async def _pooled(
        self, call: PooledCall, in_flight: asyncio.Semaphore, done: Callable[[int], None]
    ) -> PoolingRequestOutput[Any]:
        async with in_flight:
            answer = await self._post(call.kind.path, {"model": self.model, **call.body})
            cut = {name: call.body[name] for name in ("truncate_prompt_tokens",) if name in call.body}
            tokens = [] if call.prompt is None else await self._tokens(call.prompt, cut)
        done(0)
        return call.output(answer, tokens)

    async def _tokens(self, prompt: str | list[int], more: Mapping[str, Any]) -> list[int]:
        """What a prompt becomes. Raises InvalidRequest, EngineFailed."""
        if not isinstance(prompt, str):
            kept = more.get("truncate_prompt_tokens")
            return prompt if kept is None or kept < 0 else prompt[-kept:]
        tokens: list[int] = (await self._post("/tokenize", {"model": self.model, "prompt": prompt, **more}))["tokens"]
        return tokens

    async def _complete(
        self, request: PromptRequest, in_flight: asyncio.Semaphore, done: Callable[[int], None]
    ) -> RequestOutput:
        async with in_flight:
            if request.is_chat:
                answer = await self._post("/v1/chat/completions", request.body(self.model, None))
            else:
                max_tokens = await self._room(request) if request.params.max_tokens is None else None
                answer = await self._post("/v1/completions", request.body(self.model, max_tokens))
            for token in tokens_with_logprobs(answer) - self._texts.keys():
                decoded = await self._post("/detokenize", {"model": self.model, "tokens": [token]})
                self._texts[token] = decoded["prompt"]
        output = request_output(answer, request.text, self._texts, request.params.logprobs or 0)
        done(sum(len(choice.token_ids) for choice in output.outputs))
        return output

    async def _room(self, request: PromptRequest) -> int:
        """How many tokens the context holds beside the prompt, or what begins the answers of a model that has the
        prompt read by an encoder."""
        prompt, context = request.fields["prompt"], self._engine.cluster.context
        if (model := self._engine.cluster.encoder_decoder) is not None:
            begin = await self._count(request.fields.get("decoder_prompt", ()), add_special_tokens=False)
            return max(1, context - begin - len(model.decoder_prompt))
        count = await self._count(prompt)
        kept = request.params.truncate_prompt_tokens
        return max(1, context - (count if kept is None or kept < 0 else min(count, kept)))

    async def _count(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> int:
        if not isinstance(prompt, str):
            return len(prompt)
        body = {"model": self.model, "prompt": prompt, "add_special_tokens": add_special_tokens}
        return int((await self._post("/tokenize", body))["count"])

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The gateway's answer. Raises InvalidRequest for an error of the request, EngineFailed for any other."""
        try:
            encoded = msgspec.json.encode(body)
        except TypeError as error:
            raise InvalidRequest(str(error)) from None
        answer = await self._engine.cluster.call("POST", path, encoded, parsed=False)
        found: dict[str, Any] = msgspec.json.decode(answer.body)
        if answer.status == 200:
            return found
        refusal = found["error"]
        if answer.status < 500:
            raise InvalidRequest(refusal["message"], refusal.get("param"))
        raise EngineFailed(refusal["message"])


@contextlib.contextmanager
def progress_bar(total: int, wanted: bool, title: str = "generating") -> Iterator[Callable[[int], None]]:
    """Yields a function to call, from any thread, with the number of output tokens of each finished request.

    Shows a progress bar on standard error; nothing where that is no terminal, or where `rich` is not installed.
    """
    if not wanted or not sys.stderr.isatty():
        yield lambda tokens: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda tokens: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bar:
        task = bar.add_task(title, total=total)
        started, produced = time.monotonic(), 0

        def done(tokens: int) -> None:
            nonlocal produced
            produced += tokens
            rate = produced / max(1e-3, time.monotonic() - started)
            bar.update(task, advance=1, description=f"{title}, {rate:,.0f} tokens/s")

        yield done


class EngineThread:
    """Owns the thread, its event loop and the cluster. May be used from any other thread.

    The thread is a daemon: a device that hangs must not keep the interpreter from ending.
    """

    def __init__(self, configs: ServiceConfigs, start_timeout: float) -> None:
        """Returns when requests are served. Raises EngineFailed."""
        self.cluster = LocalCluster(configs)
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-engine", daemon=True)
        self._closed = False
        self._thread.start()
        atexit.register(self._leave)
        try:
            self.wait(self.cluster.start(start_timeout))
        except BaseException:
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs `work` on the loop, and returns its future. Raises EngineFailed once closed."""
        if self._closed:
            work.close()
            raise EngineFailed("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop, and returns its result. An interrupt (Ctrl-C) cancels it. Raises EngineFailed once
        closed."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the cluster and the thread. Safe to call again."""
        if self._closed:
            return
        atexit.unregister(self._leave)
        stopping = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._closed = True
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
            stopping.result(STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        await self.cluster.stop()
        await self._loop.shutdown_default_executor()

    def _leave(self) -> None:
        """At the interpreter's end no thread can be given work any more, so the loop just stops where it is."""
        self._closed = True
        self._loop.set_exception_handler(lambda loop, context: None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
