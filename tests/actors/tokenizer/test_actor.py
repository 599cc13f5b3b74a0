"""A tokenizer on the bus: prompts in, routes out, refusals to the gateway, questions answered."""

from __future__ import annotations

import asyncio
import ctypes
import json
import platform
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.tokenizer import actor, client_template, encoding_lanes
from services.tokenizer.actor import INLINE_BYTES, TokenizerActor
from services.tokenizer.client_template import MAX_TEMPLATE_CHARS
from services.tokenizer.core.chat_template import ChatTemplates
from services.tokenizer.core.encoder import PromptEncoder
from services.tokenizer.core.template_files import read_templates
from services.tokenizer.core.vocabulary import Vocabulary
from services.tokenizer.encoding_lanes import LARGE_BYTES
from shared import topics
from shared.actor import ActorRuntime
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, GatewayId, InstanceId, ModelName, RequestId
from shared.messages.coordinator import RequestEnded, Route, Withdraw
from shared.messages.gateway import PromptsHeld, RequestFailed, RequestRejected
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.tokenizer import (
    ChatPrompt,
    Decode,
    DecodeReply,
    Encode,
    EncodeReply,
    Prompt,
    TextPrompt,
    Tokenize,
    TokenizerRefusal,
    TokenizerReply,
    TokenizerRequest,
)
from shared.models.tokenizer_files import load_tokenizer
from shared.packing import count, pack, unpack
from tests.support.models import tiny_tokenizers

MODEL = ModelName("demo")
GATEWAY = GatewayId("gateway-1")
MESSAGES = json.dumps([{"role": "user", "content": "Hello world"}]).encode()


def tokenize_message(prompt: Prompt, request: str, attempt: int = 1, *, hears_held: bool = True) -> Tokenize:
    return Tokenize(
        request=RequestId(request),
        attempt=Attempt(attempt),
        gateway=GATEWAY,
        model=MODEL,
        prompt=prompt,
        sampling=SamplingOptions(seed=1),
        stopping=StopConditions(),
        hears_held=hears_held,
    )


class Ring:
    """A tokenizer between a gateway and a coordinator that only listen."""

    def __init__(self, bus: MemoryBus, folder: Path) -> None:
        self.bus = bus
        self.files = files = load_tokenizer(tiny_tokenizers.write_model(folder, tiny_tokenizers.byte_level()))
        encoding = PromptEncoder(Vocabulary(files), ChatTemplates(read_templates(files)), files.special_tokens)
        self.actor = TokenizerActor(bus, InstanceId("tokenizer-1"), MODEL, encoding)
        self.runtime = ActorRuntime(self.actor, drain_timeout=10)
        self.routed: asyncio.Queue[Route] = asyncio.Queue()
        self.at_gateway: asyncio.Queue[Any] = asyncio.Queue()
        self.held: asyncio.Queue[PromptsHeld] = asyncio.Queue()

    async def start(self, *, coordinator: bool = True) -> None:
        await self.bus.subscribe(topics.gateway_inbox(GATEWAY), self._heard_at_gateway)
        if coordinator:
            await self.bus.subscribe(topics.route(), self.routed.put)
        self.task = asyncio.create_task(self.runtime.run())
        async with asyncio.timeout(60):
            while self.runtime.phase != "ready":
                await asyncio.sleep(0.001)

    async def _heard_at_gateway(self, message: Any) -> None:
        await (self.held if isinstance(message, PromptsHeld) else self.at_gateway).put(message)

    async def tokenize(self, prompt: Prompt, request: str = "r", attempt: int = 1, *, hears_held: bool = True) -> None:
        message = tokenize_message(prompt, request, attempt, hears_held=hears_held)
        await self.bus.publish(topics.tokenize(MODEL), message)

    async def withdraw(self, request: str, attempt: int = 1) -> None:
        await self.bus.publish(topics.withdrawals(), Withdraw(RequestId(request), Attempt(attempt)))

    async def ask(self, question: TokenizerRequest) -> TokenizerReply:
        answer: TokenizerReply = await self.bus.request(topics.tokenizer_requests(MODEL), question, TokenizerReply, 60)
        return answer

    async def stop(self) -> None:
        self.runtime.stop()
        async with asyncio.timeout(60):
            await self.task


def resident_bytes() -> int:
    """What this process holds of main memory."""
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """See proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Of memory of this process since `forget_peak`, also where it was given back since."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


async def heard(queue: asyncio.Queue[Any]) -> Any:
    async with asyncio.timeout(60):
        return await queue.get()


@pytest.fixture
async def ring(memory_bus: MemoryBus, tmp_path: Path) -> AsyncIterator[Ring]:
    ring = Ring(memory_bus, tmp_path)
    await ring.start()
    yield ring
    await ring.stop()


async def test_a_prompt_is_sent_on_to_a_coordinator(ring: Ring) -> None:
    await ring.tokenize(ChatPrompt(messages=MESSAGES))
    route = await heard(ring.routed)
    assert route.generation.prompt_length == count(route.generation.tokens) > 5


@pytest.fixture
def threads_go_on(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What is encoded on a thread has to wait there until this is set."""
    go_on = threading.Event()

    def waiting(encode: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*given: Any) -> Any:
            assert threading.current_thread() is threading.main_thread() or go_on.wait(60)
            return encode(*given)

        return wait

    for name in ("route", "answer"):
        monkeypatch.setattr(ring.actor._encoder, name, waiting(getattr(ring.actor._encoder, name)))
    yield go_on
    go_on.set()


async def test_short_prompts_overtake_a_long_one(ring: Ring, threads_go_on: threading.Event) -> None:
    await ring.tokenize(TextPrompt("Hello world, how are you? " * 20_000), "long")
    await ring.tokenize(TextPrompt("Hello"), "short")
    assert (await heard(ring.routed)).generation.request == "short"
    threads_go_on.set()
    second = await heard(ring.routed)
    assert second.generation.request == "long"
    assert second.generation.prompt_length > 100_000
    assert len(second.generation.block_hashes) == second.generation.prompt_length // 16 * 16


@pytest.fixture
def large_go_on(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Large prompts have to wait on their thread until this is set."""
    go_on = threading.Event()
    encode = Vocabulary.encode

    def waiting(vocabulary: Vocabulary, text: str, **options: Any) -> list[int]:
        assert len(text) <= LARGE_BYTES or go_on.wait(60)
        return encode(vocabulary, text, **options)

    monkeypatch.setattr(Vocabulary, "encode", waiting)
    yield go_on
    go_on.set()


SENTENCES = "Hello world, how are you? 12345 naïve 日本 "


async def test_two_large_prompts_hold_up_no_other(ring: Ring, large_go_on: threading.Event) -> None:
    texts = {name: SENTENCES * 2000 + name for name in ("large-1", "large-2")}
    texts |= {"short": "Hello", "long": SENTENCES * 1000}
    for name, text in texts.items():
        await ring.tokenize(TextPrompt(text), name)
    question = await ring.ask(Encode(TextPrompt(texts["long"])))
    routes = [await heard(ring.routed), await heard(ring.routed)]
    assert {route.generation.request for route in routes} == {"short", "long"}
    large_go_on.set()
    routes += [await heard(ring.routed), await heard(ring.routed)]
    assert [route.generation.request for route in routes[2:]] == ["large-1", "large-2"]
    plain = ring.files.tokenizer
    for route in routes:
        assert unpack(route.generation.tokens) == plain.encode(texts[route.generation.request]).ids
    assert question == EncodeReply(pack(plain.encode(texts["long"]).ids))


async def test_the_bus_is_served_while_large_prompts_are_encoded(ring: Ring) -> None:
    """Encoding leaves the interpreter's lock to the event loop; without that nothing would come before its end."""
    for name in ("large-1", "large-2"):
        await ring.tokenize(TextPrompt(SENTENCES * 12_000), name)
    for number in range(20):
        await ring.tokenize(TextPrompt("Hello"), f"short-{number}")
        assert (await heard(ring.routed)).generation.request == f"short-{number}"
    assert {(await heard(ring.routed)).generation.request for _ in range(2)} == {"large-1", "large-2"}


async def test_an_attempt_that_was_given_up_while_it_waited_is_not_encoded(
    ring: Ring, large_go_on: threading.Event
) -> None:
    for name, attempt in (("first", 1), ("second", 1), ("second", 2)):
        await ring.tokenize(TextPrompt(SENTENCES * 3000), name, attempt)
    await ring.tokenize(TextPrompt("Hello"), "short")
    assert (await heard(ring.routed)).generation.request == "short"
    large_go_on.set()
    routes = [(await heard(ring.routed)).generation for _ in range(2)]
    assert [(route.request, route.attempt) for route in routes] == [("first", 1), ("second", 2)]


async def until_held(ring: Ring, prompts: int) -> None:
    async with asyncio.timeout(60):
        while ring.actor.load() != prompts:
            await asyncio.sleep(0.001)


async def test_of_clients_that_left_at_most_the_prompt_under_way_is_encoded(
    ring: Ring, large_go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_lanes, "MAX_PROMPTS", 10)
    encoded: asyncio.Queue[str] = asyncio.Queue()
    encode, loop = ring.actor._encoder.route, asyncio.get_running_loop()

    def counted(message: Tokenize, prompt: Prompt) -> Any:
        loop.call_soon_threadsafe(encoded.put_nowait, message.request)
        return encode(message, prompt)

    monkeypatch.setattr(ring.actor._encoder, "route", counted)
    await ring.tokenize(TextPrompt(SENTENCES * 3000), "under-way")
    assert await heard(encoded) == "under-way"
    for wave in range(3):  # more than there is room for, had they stayed
        for number in range(9):
            await ring.tokenize(TextPrompt(SENTENCES * 3000), f"left-{wave}-{number}")
        await until_held(ring, 10)
        for number in range(9):
            await ring.withdraw(f"left-{wave}-{number}")
        await until_held(ring, 1)
    await ring.withdraw("under-way")
    await ring.tokenize(TextPrompt(SENTENCES * 3000), "stays")
    await ring.bus.publish(topics.withdrawals(), RequestEnded(RequestId("stays"), 1))
    await ring.tokenize(TextPrompt("Hello"), "short")
    assert (await heard(ring.routed)).generation.request == await heard(encoded) == "short"
    large_go_on.set()
    assert (await heard(ring.routed)).generation.request == await heard(encoded) == "stays"
    assert ring.routed.empty()
    assert encoded.empty()
    assert ring.at_gateway.empty()


async def test_a_request_that_is_given_up_before_it_is_read_is_dropped_and_its_next_attempt_is_not(ring: Ring) -> None:
    await ring.withdraw("r", 2)
    async with asyncio.timeout(60):
        while not ring.actor._fence.is_closed(RequestId("r"), Attempt(2)):
            await asyncio.sleep(0.001)
    for attempt in (1, 2, 3):
        await ring.tokenize(TextPrompt("Hello"), "r", attempt)
    assert (await heard(ring.routed)).generation.attempt == 3


async def test_a_withdrawal_may_come_before_the_prompt_is_begun(ring: Ring) -> None:
    for name in ("left", "stays"):
        await ring.actor.handle(tokenize_message(TextPrompt(SENTENCES * 300), name))
    await ring.actor.handle(Withdraw(RequestId("left"), Attempt(1)))
    assert (await heard(ring.routed)).generation.request == "stays"
    await until_held(ring, 0)
    assert ring.routed.empty()


async def test_a_withdrawal_of_an_old_attempt_leaves_the_new_one_alone(
    ring: Ring, large_go_on: threading.Event
) -> None:
    for attempt in (1, 2):
        await ring.tokenize(TextPrompt(SENTENCES * 3000), "r", attempt)
    await ring.withdraw("r", 1)
    large_go_on.set()
    assert (await heard(ring.routed)).generation.attempt == 2


async def test_the_rendering_for_a_client_that_left_is_stopped(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    started: asyncio.Queue[bool] = asyncio.Queue()

    async def endless(_: bytes) -> bytes:
        started.put_nowait(True)
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            started.put_nowait(False)

    monkeypatch.setattr(client_template, "_run", endless)
    await ring.tokenize(ChatPrompt(messages=MESSAGES, template="{{ messages[0].content }}"))
    assert await heard(started)
    await ring.withdraw("r")
    assert not await heard(started)


async def test_a_question_waits_no_longer_than_its_gateway(
    ring: Ring, large_go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "QUESTION_TIMEOUT", 0.05)
    await ring.tokenize(TextPrompt(SENTENCES * 3000), "under-way")
    await ring.tokenize(TextPrompt("Hello"), "short")
    assert (await heard(ring.routed)).generation.request == "short"
    answer = await ring.ask(Encode(TextPrompt(SENTENCES * 3000)))
    assert isinstance(answer, TokenizerRefusal)
    assert (answer.kind, answer.message) == (
        "overloaded",
        "no thread was free for 0.05 s: longer prompts are being tokenized",
    )


async def test_a_long_question_whose_client_left_is_called_off(ring: Ring, large_go_on: threading.Event) -> None:
    """Whatever comes first, the question or its withdrawal. The one under way is finished."""
    large = TextPrompt(SENTENCES * 3000)
    await ring.tokenize(large, "under-way")
    await until_held(ring, 1)
    asked = asyncio.create_task(ring.ask(Encode(large, request=RequestId("left"))))
    await until_held(ring, 2)
    await ring.withdraw("left")
    await until_held(ring, 1)
    late = await ring.ask(Encode(large, request=RequestId("left")))
    assert isinstance(late, TokenizerRefusal)
    assert "left" not in ring.actor._held
    large_go_on.set()
    assert (await heard(ring.routed)).generation.request == "under-way"
    assert not asked.done(), "there is no answer, and its bus was not told of a failure"
    asked.cancel()


@pytest.mark.parametrize("withdrawn", [True, False])
async def test_a_later_attempt_is_rendered_while_the_process_of_an_earlier_one_still_ends(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, withdrawn: bool
) -> None:
    started: asyncio.Queue[None] = asyncio.Queue()
    ended, run = asyncio.Event(), client_template._run

    async def ending_slowly(request: bytes) -> bytes:
        if not started.empty():
            return await run(request)
        started.put_nowait(None)
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            await ended.wait()

    monkeypatch.setattr(client_template, "_run", ending_slowly)
    prompt = ChatPrompt(messages=MESSAGES, template="{{ messages[0].content }}")
    await ring.tokenize(prompt, attempt=1)
    async with asyncio.timeout(60):
        while started.empty():
            await asyncio.sleep(0.001)
    if withdrawn:
        await ring.withdraw("r", 1)
    await ring.tokenize(prompt, attempt=2)
    assert (await heard(ring.routed)).generation.attempt == 2
    ended.set()
    await until_held(ring, 0)
    assert ring.actor._held == {}
    assert ring.routed.empty()


async def test_a_gateway_hears_which_of_its_prompts_wait(
    memory_bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "HELD_INTERVAL", 0.01)
    go_on, encode = threading.Event(), Vocabulary.encode

    def waiting(vocabulary: Vocabulary, text: str, **options: Any) -> list[int]:
        assert go_on.wait(60)
        return encode(vocabulary, text, **options)

    monkeypatch.setattr(Vocabulary, "encode", waiting)
    ring = Ring(memory_bus, tmp_path)
    await ring.start()
    try:
        for name, attempt in (("first", 1), ("second", 1), ("second", 2)):
            await ring.tokenize(TextPrompt(SENTENCES * 3000), name, attempt)
        await ring.tokenize(TextPrompt(SENTENCES * 3000), "of-an-older-release", hears_held=False)
        expected = {(RequestId("first"), Attempt(1)), (RequestId("second"), Attempt(2))}
        while set((held := await heard(ring.held)).requests) != expected:
            assert held.tokenizer == "tokenizer-1"
        go_on.set()
        routes = [(await heard(ring.routed)).generation for _ in range(3)]
        assert [(route.request, route.attempt) for route in routes[:2]] == [("first", 1), ("second", 2)]
        await memory_bus.flush()
        assert ring.actor._held == {}
    finally:
        go_on.set()
        await ring.stop()


async def test_of_more_long_prompts_than_there_is_room_for_the_last_are_refused(
    ring: Ring, threads_go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_lanes, "MAX_PROMPTS", 20)
    for number in range(21):
        await ring.tokenize(TextPrompt("x" * (INLINE_BYTES + 1)), f"r{number}")
    refused = await heard(ring.at_gateway)
    assert (refused.request, refused.kind, refused.retry_after) == ("r20", "overloaded", 1.0)
    answer = await ring.ask(Encode(TextPrompt("x" * (INLINE_BYTES + 1))))
    assert isinstance(answer, TokenizerRefusal)
    assert (answer.kind, answer.message) == ("overloaded", refused.message)
    threads_go_on.set()
    assert {(await heard(ring.routed)).generation.request for _ in range(20)} == {f"r{n}" for n in range(20)}
    assert isinstance(await ring.ask(Encode(TextPrompt("x" * (INLINE_BYTES + 1)))), EncodeReply)


@pytest.mark.parametrize("size", [1, INLINE_BYTES])
async def test_a_prompt_at_fault_is_rejected_to_the_gateway(ring: Ring, size: int) -> None:
    content = json.dumps([{"role": "user", "content": "x" * size}, {"role": 5}]).encode()
    await ring.tokenize(ChatPrompt(messages=content))
    assert await heard(ring.at_gateway) == RequestRejected(
        request=RequestId("r"),
        attempt=Attempt(1),
        kind="invalid_request",
        message="messages[1].role: a string is expected",
        field="messages",
    )


async def test_a_prompt_without_a_token_is_rejected(ring: Ring) -> None:
    await ring.tokenize(TextPrompt(""))
    rejected = await heard(ring.at_gateway)
    assert (rejected.field, rejected.message) == ("prompt", "prompt: at least one token is needed")


async def test_without_a_coordinator_the_gateway_hears_that_the_attempt_failed(
    memory_bus: MemoryBus, tmp_path: Path
) -> None:
    ring = Ring(memory_bus, tmp_path)
    await ring.start(coordinator=False)
    await ring.tokenize(TextPrompt("Hello"))
    assert await heard(ring.at_gateway) == RequestFailed(RequestId("r"), Attempt(1), "no coordinator is there")
    await ring.stop()


async def test_a_prompt_too_large_for_the_bus_is_a_named_refusal(tmp_path: Path) -> None:
    bus = MemoryBus(max_payload=100_000)
    ring = Ring(bus, tmp_path)
    await ring.start()
    await ring.tokenize(TextPrompt("1 2 " * 20_000))
    answer = await heard(ring.at_gateway)
    assert (answer.kind, answer.field) == ("too_large", "prompt")
    await ring.stop()
    await bus.close()


async def test_questions_are_answered(ring: Ring) -> None:
    encoded = await ring.ask(Encode(ChatPrompt(messages=MESSAGES), return_strings=True))
    assert isinstance(encoded, EncodeReply)
    assert encoded.strings is not None
    assert encoded.strings[0] == "<|im_start|>"
    assert await ring.ask(Decode(encoded.tokens, skip_special_tokens=True)) == DecodeReply(
        "user\nHello world\nassistant\n"
    )
    assert await ring.ask(Encode(TextPrompt(""))) == EncodeReply(b"")
    long = await ring.ask(Encode(TextPrompt("Hello " * INLINE_BYTES)))
    assert isinstance(long, EncodeReply)
    assert await ring.ask(Decode(long.tokens)) == DecodeReply("Hello " * INLINE_BYTES)
    assert await ring.ask(Encode(ChatPrompt(messages=b"[]"))) == TokenizerRefusal(
        "messages: at least one is needed", "messages"
    )


async def test_a_long_question_holds_up_no_request(ring: Ring, threads_go_on: threading.Event) -> None:
    question = asyncio.create_task(ring.ask(Encode(TextPrompt("Hello world, how are you? " * 20_000))))
    await asyncio.sleep(0)
    await ring.tokenize(TextPrompt("Hello"))
    await heard(ring.routed)
    assert not question.done()
    threads_go_on.set()
    answer = await question
    assert isinstance(answer, EncodeReply)
    assert count(answer.tokens) > 100_000


async def test_a_template_of_the_clients_own_is_rendered(ring: Ring) -> None:
    prompt = ChatPrompt(messages=MESSAGES, template="{{ bos_token }}{{ messages[0].content }}")
    encoded = await ring.ask(Encode(prompt))
    assert isinstance(encoded, EncodeReply)
    assert await ring.ask(Decode(encoded.tokens)) == DecodeReply("<s>Hello world")
    await ring.tokenize(prompt)
    assert (await heard(ring.routed)).generation.tokens == encoded.tokens
    assert await ring.ask(Encode(ChatPrompt(messages=MESSAGES, template="default"))) == await ring.ask(
        Encode(ChatPrompt(messages=MESSAGES))
    )


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ("{% if %}", "chat_template"),
        ("{{ raise_exception('no') }}", "messages"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "chat_template"),
        ("{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
         "chat_template"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "chat_template"),
        ("{% for i in range(50000) %}" + "x" * 1000 + "{% endfor %}", "chat_template"),
    ],
    ids=["broken", "refusing", "endless", "doubling", "huge", "endless-output"],
)  # fmt: skip
async def test_a_template_of_the_clients_own_that_does_harm_is_refused(ring: Ring, template: str, field: str) -> None:
    await ring.tokenize(ChatPrompt(messages=MESSAGES, template=template))
    answer = await heard(ring.at_gateway)
    assert (answer.kind, answer.field) == ("invalid_request", field)
    await ring.tokenize(ChatPrompt(messages=MESSAGES))
    await heard(ring.routed)


async def test_a_bug_on_a_thread_ends_the_process(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ring.actor._encoder, "route", broken)
    await ring.tokenize(TextPrompt("x" * (INLINE_BYTES + 1)))
    with pytest.raises(ExceptionGroup) as error:
        async with asyncio.timeout(60):
            await ring.task
    assert error.group_contains(ZeroDivisionError)
    ring.task = asyncio.create_task(asyncio.sleep(0))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's heap is its own matter")
async def test_what_a_large_prompt_took_goes_back_to_the_system(ring: Ring) -> None:
    """Encoding takes a hundred times the text's size, which glibc would keep."""
    words = " ".join(f"{number * 2654435761 % 2**32:x}" for number in range(60_000))
    first = await ring.ask(Encode(TextPrompt(words[:9000])))
    ctypes.CDLL(None).malloc_trim(0)  # of what earlier tests have left
    before = resident_bytes()
    forget_peak()
    answer = await ring.ask(Encode(TextPrompt(words)))
    assert isinstance(answer, EncodeReply)
    del answer
    grown = peak_bytes() - before
    assert grown > 30 * 2**20, "else there is nothing to give back"
    async with asyncio.timeout(60):
        while resident_bytes() - before > grown // 2:
            await asyncio.sleep(0.05)
    assert await ring.ask(Encode(TextPrompt(words[:9000]))) == first, "words that were forgotten are found again"
