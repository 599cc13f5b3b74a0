"""A ring for tests of the gateway: tokenizer, coordinator, engine and detokenizer in one object on a bus.

It continues every prompt with the words of a script, a token each, in the messages and the order of the real ring. What
goes wrong is chosen by the prompt's text, so that a test says in its request what it wants to see.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from shared import topics
from shared.bus import Bus
from shared.ids import DetokenizerId, EngineId, GatewayId, Incarnation, InstanceId, ModelName
from shared.messages.coordinator import PlacementNotice, Withdraw
from shared.messages.dialects import Dialect, Thinking
from shared.messages.gateway import (
    Delta,
    Deltas,
    LogprobText,
    PositionLogprobs,
    PromptLogprobsDelta,
    RequestFailed,
    RequestPlaced,
    RequestQueued,
    RequestRejected,
    StreamOpened,
)
from shared.messages.lifecycle import EngineReport, Lifecycle, Phase, Service, SleepReport, TokenizerReport
from shared.messages.model_card import AudioModel, EncoderDecoderModel, ModelCard
from shared.messages.scheduler import (
    BlockMap,
    Cancel,
    EnginePicture,
    Probe,
    ProbeReply,
    ReadPicture,
    SchedulerControl,
    StepPicture,
    StepTiming,
)
from shared.messages.tokenizer import (
    ChatPrompt,
    Decode,
    DecodeReply,
    EncodeReply,
    TextPrompt,
    Tokenize,
    TokenizerRefusal,
    TokenizerReply,
    TokenizerRequest,
    TokenPrompt,
)
from shared.packing import count, pack, unpack

MODEL = ModelName("demo/model")
ENGINE = EngineId("engine-1")
DETOKENIZER = DetokenizerId("detokenizer-1")
CARD = ModelCard(
    name=MODEL, max_model_len=2048, vocab_size=2048, eos_token_ids=(2,), dtype="float32", created=1_700_000_000
)
WORDS = ("Paris", " is", " the", " capital", " of", " France", ".", " Ünïcödé", ' \u2028"quoted"\n', " 🎉")
"""What the model says, over and over: token i is word i modulo their number."""

PICTURE = EnginePicture(
    blocks=BlockMap(total=5, free=1, cached=1, loading=1, every=1, cells=bytes(range(5))),
    block_size=16,
    steps=(
        StepPicture(
            step=3,
            seconds=1.0,
            prefill_tokens=5,
            decode_tokens=2,
            prefills=1,
            decodes=2,
            drafted=0,
            accepted=0,
            timing=StepTiming(wait=0.0, prepare=0.125, forward=0.25, sample=0.125),
        ),
    ),
)
"""What the engine says of its inside."""

IDENTITY: dict[Service, str] = {
    "tokenizer": "tokenizer-1",
    "coordinator": "coordinator-1",
    "scheduler": ENGINE,
    "detokenizer": DETOKENIZER,
}


def word(position: int) -> str:
    return WORDS[position % len(WORDS)]


def said(tokens: int) -> str:
    """The text of the first `tokens` tokens that the model says."""
    return "".join(word(i) for i in range(tokens))


def prompt_text(prompt: Any) -> str:
    match prompt:
        case ChatPrompt():
            contents = [message.get("content") for message in msgspec.json.decode(prompt.messages)]
            return " ".join(c if isinstance(c, str) else str(c) for c in contents)
        case TextPrompt():
            return prompt.text
        case TokenPrompt():
            return "".join(word(token) for token in unpack(prompt.tokens))
    raise AssertionError(prompt)


class FakeRing:
    """Owns what each request has been through. `seen` holds every message that the gateway sent."""

    def __init__(self, bus: Bus, step: float = 0.0, longest: int = 10**9) -> None:
        self.bus, self.step, self.longest = bus, step, longest
        self.string_slices = True
        """Whether its tokenizer is of a release that spells tokens in slices."""
        self.seen: list[Any] = []
        self.cancelled: dict[str, int] = {}
        """The newest attempt that was cancelled, by request."""
        self.withdrawn: set[str] = set()
        self.held: list[TokenizerRequest] = []
        """Questions that get no answer."""
        self.running: dict[str, int] = {}
        self.lives: dict[Service, Incarnation] = dict.fromkeys(IDENTITY, Incarnation(1))
        self.absent: set[Service] = set()
        self.sleep: SleepReport | None = None
        """That of the engine, while it sleeps."""
        self.fails_first_attempts = False
        self.busy = 0
        """Of the engine's nine places."""
        self._numbers: dict[GatewayId, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.script: list[str] | None = None
        """What the model says instead, a token each; it ends by itself then."""
        self.dialect = Dialect()
        self.aliases: tuple[ModelName, ...] = ()
        self.encoder_decoder: EncoderDecoderModel | None = None
        self.audio: AudioModel | None = None
        self.images: int | None = None
        self.thinking: Thinking | None = None
        """How every prompt ends."""
        self.hold = asyncio.Event()
        """Prompts with HOLD in them go on when it is set."""

    async def start(self) -> None:
        self.intake = await self.bus.subscribe(topics.tokenize(MODEL), self._tokenize)
        await self.bus.serve(topics.tokenizer_requests(MODEL), self._question)
        await self.bus.subscribe(topics.engine_control(ENGINE), self._control)
        self.probes = await self.bus.serve(topics.engine_probes(ENGINE), self._probe)
        await self.bus.subscribe(topics.withdrawals(), self._withdraw)
        await self.announce()
        self._spawn(self._heartbeat())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            await self.announce()

    async def announce(self, phase: Phase = "ready") -> None:
        for service, instance in IDENTITY.items():
            if service not in self.absent:
                asleep = service == "scheduler" and self.sleep is not None
                await self.say(service, instance, "starting" if asleep else phase)

    async def say(self, service: Service, instance: str, phase: Phase) -> None:
        life = self.life_of(service, instance, phase)
        await self.bus.publish(topics.lifecycle_of(service, InstanceId(instance)), life)

    def life_of(self, service: Service, instance: str, phase: Phase) -> Lifecycle:
        """What an instance says of itself."""
        report = EngineReport(
            model=replace(
                CARD,
                aliases=self.aliases,
                audio=self.audio,
                images=self.images,
                encoder_decoder=self.encoder_decoder,
            ),
            waiting=0,
            running=self.busy,
            max_waiting=9,
            max_running=9,
            blocks_total=9,
            blocks_free=9,
            steps=0,
            tokens=0,
        )
        return Lifecycle(
            service=service,
            instance=InstanceId(instance),
            incarnation=self.lives[service],
            phase=phase,
            pid=1,
            host="h",
            started=0.0,
            engine=report if service == "scheduler" else None,
            sleep=self.sleep if service == "scheduler" else None,
            tokenizer=TokenizerReport(model=MODEL, dialect=self.dialect) if service == "tokenizer" else None,
        )

    async def die(self, service: Service) -> None:
        """The instance is announced dead and begins a new life."""
        await self.say(service, IDENTITY[service], "failed")
        self.lives[service] = Incarnation(self.lives[service] + 1)
        if service == "detokenizer":
            self._numbers.clear()

    async def _tokenize(self, message: Tokenize) -> None:
        self.seen.append(message)
        self._spawn(self._serve(message))

    async def _question(self, question: TokenizerRequest) -> TokenizerReply:
        if isinstance(question, Decode):
            return DecodeReply("".join(word(token) for token in unpack(question.tokens)))
        text = prompt_text(question.prompt)
        if "SILENCE" in text:
            self.held.append(question)
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
        if "REFUSE" in text:
            return TokenizerRefusal("too silly", "prompt")
        if "OVERLOAD" in text:
            return TokenizerRefusal("too many wait", kind="overloaded")
        pieces = text.split(" ")
        given = question.prompt.tokens if isinstance(question.prompt, TokenPrompt) else None
        ids = list(range(len(pieces))) if given is None else unpack(given)
        if (keep := question.truncate_prompt_tokens) is not None:
            ids = ids[-keep:] if question.truncation_side == "left" else ids[:keep]
        if question.return_strings and question.string_slices and self.string_slices:
            slices = (pieces[start : start + 2] for start in range(0, len(pieces), 2))
            return EncodeReply(pack(ids), string_slices=tuple(msgspec.msgpack.encode(each) for each in slices))
        return EncodeReply(pack(ids), tuple(pieces) if question.return_strings else None)

    async def _control(self, message: SchedulerControl) -> None:
        self.seen.append(message)
        if isinstance(message, Cancel):
            self.cancelled[message.request] = message.attempt

    async def _withdraw(self, message: PlacementNotice) -> None:
        self.seen.append(message)
        if isinstance(message, Withdraw):
            self.withdrawn.add(message.request)

    async def _probe(self, probe: Probe | ReadPicture) -> ProbeReply | EnginePicture:
        if isinstance(probe, ReadPicture):
            return PICTURE
        self.seen.append(probe)
        produced = self.running.get(probe.request)
        return ProbeReply("unknown", 0) if produced is None else ProbeReply("running", produced)

    async def tell(self, message: Tokenize, what: Any) -> None:
        await self.bus.publish(topics.gateway_inbox(message.gateway), what)

    async def deltas(
        self,
        message: Tokenize,
        opened: tuple[Any, ...],
        deltas: tuple[Any, ...],
        scored: tuple[PromptLogprobsDelta, ...] = (),
    ) -> None:
        number = self._numbers.get(message.gateway, 0)
        self._numbers[message.gateway] = number + 1
        batch = Deltas(
            detokenizer=DETOKENIZER,
            epoch=self.lives["detokenizer"],
            number=number,
            opened=opened,
            deltas=deltas,
            scored=scored,
        )
        await self.tell(message, batch)

    def lose_one(self, gateway: GatewayId) -> None:
        """The next message to `gateway` is lost on the way."""
        self._numbers[gateway] = self._numbers.get(gateway, 0) + 1

    async def _serve(self, message: Tokenize) -> None:
        text = prompt_text(message.prompt)
        first = message.attempt == 1
        if "REJECT" in text:
            kind = "overloaded" if "OVERLOAD" in text else "invalid_request"
            await self.tell(message, _rejected(message, kind))
        elif "QUEUE" in text:
            await self.tell(message, RequestQueued(message.request, message.attempt))
        elif "VANISH" in text and first:
            await self.tell(message, RequestPlaced(message.request, message.attempt, ENGINE, DETOKENIZER))
        elif self.fails_first_attempts and first:
            await self.tell(message, RequestPlaced(message.request, message.attempt, ENGINE, DETOKENIZER))
            await self.tell(message, RequestFailed(message.request, message.attempt, "the worker died"))
        elif "FAIL" in text and (first or "ALWAYS" in text):
            await self.tell(message, RequestPlaced(message.request, message.attempt, ENGINE, DETOKENIZER))
            await self._generate(message, until=3)
            await self.tell(message, RequestFailed(message.request, message.attempt, "the worker died"))
        else:
            await self.tell(message, RequestPlaced(message.request, message.attempt, ENGINE, DETOKENIZER))
            if "HOLD" in text:
                self.running[message.request] = 0
                await self.hold.wait()
            await self._generate(message, lose=4 if "LOSE" in text and first else None)

    async def _generate(self, message: Tokenize, until: int | None = None, lose: int | None = None) -> None:
        """Tokens from where the attempt resumes; `until` ends it in the middle, `lose` drops that position."""
        most = message.stopping.max_tokens
        length = min(most or 8, self.longest) if self.script is None else min(most or 10**9, len(self.script))
        finish = "length" if most and (self.script is None or most < len(self.script)) else "stop"
        position = count(message.resume)
        text = prompt_text(message.prompt)
        prompt_tokens = len(text.split(" "))
        opened: tuple[StreamOpened, ...] = (
            StreamOpened(message.request, message.attempt, prompt_tokens, prompt_tokens // 2, self.thinking, None, 0.0),
        )
        if message.sampling.prompt_logprobs is not None and not ("UNSCORED" in text and message.attempt == 1):
            await self.deltas(message, opened, (), _scored(message, prompt_tokens))
            opened = ()
        while position < length and position != until and message.attempt > self.cancelled.get(message.request, 0):
            self.running[message.request] = position + 1
            last = position + 1 == length
            delta = Delta(
                message.request,
                message.attempt,
                position,
                (position,),
                word(position) if self.script is None else self.script[position],
                finish if last else None,  # type: ignore[arg-type]
                None,
                _logprobs(message, position),
            )
            if position == lose:
                self.lose_one(message.gateway)
            else:
                await self.deltas(message, opened, (delta,))
            opened = ()
            position += 1
            await asyncio.sleep(self.step)
        self.running.pop(message.request, None)


def _rejected(message: Tokenize, kind: Any) -> RequestRejected:
    return RequestRejected(
        request=message.request,
        attempt=message.attempt,
        kind=kind,
        message="prompt: too long, 2048 tokens are allowed",
        field="messages",
        retry_after=2.5 if kind == "overloaded" else None,
    )


def _scored(message: Tokenize, prompt_tokens: int) -> tuple[PromptLogprobsDelta, ...]:
    """All but the first, in two parts."""
    wanted = message.sampling.prompt_logprobs or 0
    entries = [replace(_position(token, wanted), rank=1) for token in range(1, prompt_tokens)]
    halves = (entries[: prompt_tokens // 2], entries[prompt_tokens // 2 :])
    starts = (1, 1 + len(halves[0]))
    return tuple(
        PromptLogprobsDelta(message.request, message.attempt, start, tuple(half))
        for start, half in zip(starts, halves, strict=True)
        if half
    )


def _logprobs(message: Tokenize, position: int) -> tuple[PositionLogprobs, ...] | None:
    sampling = message.sampling
    return None if sampling.logprobs is None else (_position(position, sampling.logprobs, sampling.logprob_token_ids),)


def _position(position: int, most_likely: int, named: tuple[int, ...] | None = None) -> PositionLogprobs:
    def text(token: int, logprob: float) -> LogprobText:
        return LogprobText(word(token), word(token).encode(), logprob, token)

    shown = range(position, position + most_likely) if named is None else named
    top = tuple(text(token, -0.5 - i) for i, token in enumerate(shown))
    return PositionLogprobs(text(position, -0.5), top)


async def eventually(true: Callable[[], bool], timeout: float = 60.0) -> None:
    """Waits until `true()`; how long it may take is no part of what a test asserts."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)
