"""Reads bodies as requests: small ones at once, large ones in a process beside the event loop.

16 MiB of JSON take up to 10 s where they have many values, and the decoder alone holds the interpreter's lock for 2 s
of them, so a thread would delay every open stream. The process has limits of its own and may be killed; it ends with
its standard input, so it never outlives the gateway. What it answers is small: prompts are packed there; but for the
files of images, videos and sounds, which come back behind it. Without large bodies there is no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import io
import pickle
import signal
import sys
from asyncio import StreamReader
from asyncio.subprocess import Process
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.anthropic.request import read_count_tokens, read_messages, read_tool_clearing
from services.gateway.api.chat import read_chat
from services.gateway.api.chat_batch import read_chat_batch
from services.gateway.api.cohere.request import read_cohere_chat
from services.gateway.api.completions import read_completion
from services.gateway.api.decisions.request import read_decisions
from services.gateway.api.errors import RequestError, most_values
from services.gateway.api.generation import GenerationKind, GenerationRequest, RequestLimits
from services.gateway.api.ollama.embeddings import read_ollama_embed, read_ollama_embeddings
from services.gateway.api.ollama.request import read_ollama_chat, read_ollama_generate
from services.gateway.api.pooling.classification import read_classification
from services.gateway.api.pooling.cohere import read_cohere_embed
from services.gateway.api.pooling.embeddings import read_embedding, read_pooling_request
from services.gateway.api.pooling.scores import read_rerank, read_score
from services.gateway.api.prompts import read_detokenize, read_invocation, read_tokenize
from services.gateway.api.responses.conversation import (
    read_conversation,
    read_conversation_items,
    read_conversation_update,
)
from services.gateway.api.responses.request import read_input_tokens, read_responses
from services.gateway.api.sglang.request import read_sglang
from services.gateway.api.tokens.generative_scores import read_generative_scores
from services.gateway.api.tokens.request import read_tokens
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.machine.helper_process import PIECE_BYTES, end_helper, feed, start_helper
from shared.messages.model_card import ModelCard

ALWAYS_INLINE_BYTES = 8 * 2**10
MAX_INLINE_BYTES = 256 * 2**10
MAX_INLINE_VALUES = 4096
"""Bodies within both limits are read on the event loop: 10 ms at the most, usually 1 ms. A value costs up to 2.3 µs, a
byte of text 4 ns."""
MAX_PROCESSES = 2
MAX_MEMORY = 4 * 2**30
"""Bytes of address space of each process: 16 MiB of empty lists take 0.5 GiB."""
QUEUE_TIMEOUT = 30.0
"""Seconds that a large body waits for a process."""
PARSE_TIMEOUT = 60.0
"""Seconds that a process may take; 6 times what 16 MiB take at most on one processor."""
MAX_MEDIA_VALUES = 2**20
"""Of a body that images, videos or sounds make larger than others may be: what is large in it are strings."""
TOO_MUCH_MEMORY = "body: reading it takes too much memory; send fewer values in it"
LENGTH_BYTES = 8
"""Size of the number before each message on a pipe."""

BodyKind = Literal[
    GenerationKind,
    "cohere_rerank",
    "cohere_embed",
    "chat_batch",
    "conversation",
    "conversation_items",
    "conversation_update",
    "count_tokens",
    "count_tokens_cleared",
    "input_tokens",
    "messages_cleared",
    "ollama_chat",
    "ollama_embed",
    "ollama_embeddings",
    "ollama_generate",
    "tokenize",
    "tool_clearing",
    "detokenize",
    "invocation",
]


class BodyContext(Struct, frozen=True):
    """What a body is read with."""

    kind: BodyKind
    cards: list[ModelCard]
    limits: RequestLimits
    dialects: dict[ModelName, OutputDialect] | None
    """The format of each model's tool calls and reasoning; None: outputs are not parsed."""
    history: bytes | None = None
    """The items of the stored response that the body goes on from."""
    referenced: bytes | None = None
    """Those that it refers to, a JSON object by their ids."""

    @property
    def dialect_of(self) -> Callable[[ModelName], OutputDialect] | None:
        """Returns a model's."""
        return None if self.dialects is None else self.dialects.__getitem__


class Refused(Struct, frozen=True):
    """An error of the client's, on its way from the process."""

    status: int
    message: str
    param: str | None
    code: str | None
    retry_after: float | None
    elsewhere: bool = False


_Cards = list[ModelCard]
_DialectOf = Callable[[ModelName], OutputDialect] | None
_ALONE: dict[BodyKind, Callable[[bytes], Any]] = {
    "conversation": read_conversation,
    "conversation_items": read_conversation_items,
    "conversation_update": read_conversation_update,
    "tool_clearing": read_tool_clearing,
}
_WITH_CARDS: dict[BodyKind, Callable[[bytes, _Cards], Any]] = {
    "detokenize": read_detokenize,
    "invocation": read_invocation,
}
_WITH_LIMITS: dict[BodyKind, Callable[[bytes, _Cards, RequestLimits], Any]] = {
    "classification": read_classification,
    "cohere_embed": read_cohere_embed,
    "cohere_rerank": partial(read_rerank, cohere=True),
    "completion": read_completion,
    "count_tokens": read_count_tokens,
    "count_tokens_cleared": partial(read_count_tokens, clear_tools=True),
    "decision": read_decisions,
    "embedding": read_embedding,
    "generative_score": read_generative_scores,
    "ollama_embed": read_ollama_embed,
    "ollama_embeddings": read_ollama_embeddings,
    "pooling": read_pooling_request,
    "rerank": read_rerank,
    "score": read_score,
    "sglang": read_sglang,
    "tokenize": read_tokenize,
}
_WITH_DIALECTS: dict[BodyKind, Callable[[bytes, _Cards, RequestLimits, _DialectOf], Any]] = {
    "chat": read_chat,
    "chat_batch": read_chat_batch,
    "cohere": read_cohere_chat,
    "messages": read_messages,
    "messages_cleared": partial(read_messages, clear_tools=True),
    "ollama_chat": read_ollama_chat,
    "ollama_generate": read_ollama_generate,
    "tokens": read_tokens,
}
_WITH_STORED_ITEMS = {"input_tokens": read_input_tokens, "responses": read_responses}


def read_body(body: bytes, context: BodyContext) -> Any:
    """Returns the request that a body makes. Raises RequestError."""
    kind, cards, limits, dialect_of = context.kind, context.cards, context.limits, context.dialect_of
    if kind in _ALONE:
        return _ALONE[kind](body)
    if kind in _WITH_CARDS:
        return _WITH_CARDS[kind](body, cards)
    if kind in _WITH_LIMITS:
        return _WITH_LIMITS[kind](body, cards, limits)
    if kind in _WITH_DIALECTS:
        return _WITH_DIALECTS[kind](body, cards, limits, dialect_of)
    return _WITH_STORED_ITEMS[kind](body, cards, limits, dialect_of, context.history, context.referenced)


def is_small(body: bytes) -> bool:
    """Whether a body is read so fast that other requests do not notice."""
    if len(body) <= ALWAYS_INLINE_BYTES:
        return True
    return len(body) <= MAX_INLINE_BYTES and most_values(body) <= MAX_INLINE_VALUES


def _check_large(body: bytes, limits: RequestLimits) -> None:
    """Raises RequestError 413 for a body that is larger than bodies without media may be and has too many values."""
    if len(body) > limits.max_body and (values := most_values(body)) > MAX_MEDIA_VALUES:
        text = f"body: {values} values in {len(body)} bytes; more than {limits.max_body} bytes of images, videos or "
        raise RequestError(413, f"{text}sounds may have {MAX_MEDIA_VALUES}", param="body", code="too_large")


def _check_rest(body: bytes, limits: RequestLimits, asked: Any) -> None:
    """Raises RequestError 413 where a body, without its media, is larger than bodies without media may be."""
    if len(body) > limits.max_body and isinstance(asked, GenerationRequest):
        rest = len(body) - sum(len(each.data) * 4 // 3 for each in asked.media)
        if rest > limits.max_body:
            text = f"body: {rest} bytes without its images, videos and sounds; {limits.max_body} are allowed"
            raise RequestError(413, text, param="body", code="too_large")


class BodyParser:
    """Owns the processes that read large bodies; `MAX_PROCESSES` at most, started when they are needed."""

    def __init__(self, context_of: Callable[[BodyKind], BodyContext], *, beside: bool = True) -> None:
        """`context_of` gives what a body is read with now. Not `beside`: all bodies are read on the event loop."""
        self._context_of, self._beside = context_of, beside
        self._idle: list[Process] = []
        self._slots = asyncio.Semaphore(MAX_PROCESSES)

    async def read(
        self, kind: BodyKind, body: bytes, history: bytes | None = None, referenced: bytes | None = None
    ) -> Any:
        """Returns the request that a body makes; `history`, `referenced`: see `BodyContext`. Raises RequestError, 503
        where no process is free in time."""
        context = self._context_of(kind)
        if history is not None or referenced is not None:
            context = replace(context, history=history, referenced=referenced)
        asked = await self._read(body, context)
        _check_rest(body, context.limits, asked)
        return asked

    async def _read(self, body: bytes, context: BodyContext) -> Any:
        parts = (body, context.history or b"", context.referenced or b"")
        if not self._beside or all(map(is_small, parts)):
            return read_body(body, context)
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT):
                await self._slots.acquire()
        except TimeoutError:
            raise RequestError(503, "too many large bodies are being read; try again", retry_after=1.0) from None
        try:
            return await self._read_beside(body, context)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            await end_helper(self._idle.pop())

    async def _read_beside(self, body: bytes, context: BodyContext) -> Any:
        process = self._idle.pop() if self._idle else await start_helper("-c", f"from {__name__} import main; main()")
        try:
            async with asyncio.timeout(PARSE_TIMEOUT):
                answer = await _ask(process, pickle.dumps(context), body)
            self._idle.append(process)
        except TimeoutError:
            text = f"the body was not read within {PARSE_TIMEOUT:g} s; send fewer values in it"
            raise RequestError(503, text, retry_after=1.0) from None
        except (EOFError, ConnectionError):
            if await process.wait() < 0:  # the kernel killed it, as memory ended
                raise RequestError(400, TOO_MUCH_MEMORY, param="body") from None
            raise
        finally:
            if process not in self._idle:
                await end_helper(process)
        if isinstance(answer, Refused):
            raise RequestError(
                answer.status,
                answer.message,
                param=answer.param,
                code=answer.code,
                retry_after=answer.retry_after,
                elsewhere=answer.elsewhere,
            )
        return answer


async def _ask(process: Process, *parts: bytes) -> Any:
    """Sends the parts of one request, and returns the answer. Raises EOFError or ConnectionError where the process
    ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    for part in parts:
        process.stdin.write(len(part).to_bytes(LENGTH_BYTES))
        await feed(process.stdin, part)
    answer = pickle.loads(await _read_reply(process.stdout))
    if not isinstance(answer, GenerationRequest) or not answer.media:
        return answer
    files = [await _read_reply(process.stdout) for _ in answer.media]
    media = tuple(each._replace(data=file) for each, file in zip(answer.media, files, strict=True))
    return replace(answer, media=media)


async def _read_reply(source: StreamReader) -> bytes:
    """The next part of an answer, which may be large. It is read piece by piece and never copied as a whole, so that
    other tasks get their turns. Raises EOFError."""
    left, parts = int.from_bytes(await source.readexactly(LENGTH_BYTES)), io.BytesIO()
    while left:
        piece = await source.read(min(left, PIECE_BYTES))
        if not piece:
            raise EOFError
        parts.write(piece)
        left -= len(piece)
    return parts.getvalue()


def _limit_this_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when it ends
    try:
        import resource
    except ImportError:  # Windows has none
        return
    with contextlib.suppress(OSError, ValueError):  # macOS knows the limit and takes none
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def _read_part(source: BinaryIO) -> bytes:
    """The next part; empty where the gateway has ended."""
    return source.read(int.from_bytes(source.read(LENGTH_BYTES)))


def _answer(body: bytes, context: BodyContext) -> list[bytes]:
    """The request, or the refusal; behind it the files of its media, which are left out of it."""
    files: list[bytes] = []
    try:
        _check_large(body, context.limits)
        asked = read_body(body, context)
        if isinstance(asked, GenerationRequest):
            files = [each.data for each in asked.media]
            asked = replace(asked, media=tuple(each._replace(data=b"") for each in asked.media))
        return [pickle.dumps(asked), *files]
    except RequestError as error:
        refused = Refused(error.status, error.message, error.param, error.code, error.retry_after, error.elsewhere)
        return [pickle.dumps(refused)]
    except MemoryError:
        return [pickle.dumps(Refused(400, TOO_MUCH_MEMORY, "body", None, None))]


def _proxy(items: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    """A read-only mapping: pickle does not know the type by its name."""
    return MappingProxyType(items)


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """The process: answers requests until its input ends. A bug ends it, with a traceback on standard error."""
    while context := _read_part(source):
        for part in _answer(_read_part(source), pickle.loads(context)):
            target.write(len(part).to_bytes(LENGTH_BYTES))
            target.write(part)
        target.flush()


def main() -> None:
    """Runs the process. The module is not run by `python -m`: as `__main__` its classes would have another name for
    pickle."""
    _limit_this_process()
    copyreg.pickle(MappingProxyType, lambda proxy: (_proxy, (dict(proxy),)))
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)
