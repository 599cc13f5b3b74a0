"""Sounds at a real gateway: how windows are asked for, joined and streamed, and what ends with a client."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from services.gateway.metrics import AUDIO_FILES
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.messages.encoder import EncodeInput, EncoderRefusal, EncoderReply, EncoderRows
from shared.messages.gateway import Delta, LogprobText, PositionLogprobs, RequestPlaced, StreamOpened
from shared.messages.generation import PromptEmbeds
from shared.messages.tokenizer import Tokenize, TokenPrompt
from shared.packing import unpack
from tests.support.gateway.fake_services import DETOKENIZER, ENGINE, MODEL, FakeRing, eventually
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.models.sounds import SAMPLE_RATE, sweep, wav
from tests.unit.gateway.api.test_audio import AUDIO

SOUND = wav(np.concatenate([sweep(seed, 1.6) for seed in range(4)]))


class HearingRing(FakeRing):
    """A model that says of each window how many samples it has, and of the language German; and its encoder."""

    def __init__(self, bus: MemoryBus) -> None:
        super().__init__(bus)
        self.audio = AUDIO
        self.windows: list[bytes] = []
        self.refusal = ""
        self.crowds = 0
        """How often its encoder has no room, behind the first window."""

    async def start(self) -> None:
        await self.bus.serve(topics.image_requests(MODEL), self._encode)
        await super().start()

    async def _encode(self, question: EncodeInput) -> EncoderReply:
        if self.refusal:
            return EncoderRefusal(self.refusal)
        if self.windows and self.crowds:
            self.crowds -= 1
            return EncoderRefusal("64 images wait", "overloaded")
        self.windows.append(question.content)
        rows = struct.pack("<8f", *([len(question.content) / 4] * 8))
        return EncoderRows(PromptEmbeds(dtype="float32", size=8, rows=rows, runs=((0, 1),), encoded=True))

    async def _serve(self, message: Tokenize) -> None:
        prompt = message.prompt
        assert isinstance(prompt, TokenPrompt)
        assert prompt.encoded is not None
        samples = int(struct.unpack("<f", prompt.encoded.rows[:4])[0])
        if message.stopping.max_tokens == 1:
            words = [(103, "<|de|>")]
        elif unpack(prompt.tokens)[-1] == AUDIO.no_timestamps:
            words = [(1, " heard"), (2, f" {samples}")]
        else:
            words = [(111, ""), (1, " heard"), (2, f" {samples}"), (111 + samples // 320, "")]
        await self.tell(message, RequestPlaced(message.request, message.attempt, ENGINE, DETOKENIZER))
        await self.hold.wait()
        opened: tuple[StreamOpened, ...] = (StreamOpened(message.request, message.attempt, 4, 0),)
        for position, (token, text) in enumerate(words):
            chosen = LogprobText(text, text.encode(), -0.25, token)
            named = tuple(LogprobText("", b"", -1.5, each) for each in message.sampling.logprob_token_ids or ())
            drawn = None if message.sampling.logprobs is None else (PositionLogprobs(chosen, named),)
            finish: Any = "stop" if position + 1 == len(words) else None
            delta = Delta(message.request, message.attempt, position, (token,), text, finish, None, drawn)
            await self.deltas(message, opened, (delta,))
            opened = ()


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    ring = HearingRing(memory_bus)
    ring.hold.set()
    async with gateway_stack(memory_bus, ring=ring, silence_s=30.0, max_audio_s=60.0) as stack:
        yield stack


def ring_of(stack: GatewayStack) -> HearingRing:
    assert isinstance(stack.ring, HearingRing)
    return stack.ring


async def ask(stack: GatewayStack, task: str = "transcriptions", file: bytes = SOUND, **fields: str) -> httpx2.Response:
    return await stack.http.post(f"/v1/audio/{task}", data=fields, files={"file": ("a.wav", file)})


def asked(stack: GatewayStack) -> list[tuple[list[int], dict[str, str]]]:
    """Prompts and rules of the windows, without those that only ask for the language."""
    seen = [each for each in stack.ring.seen if isinstance(each, Tokenize) and each.sampling.extra_args]
    return [(unpack(each.prompt.tokens), msgspec.json.decode(each.sampling.extra_args)) for each in seen]  # type: ignore[union-attr]


async def test_windows_are_asked_for_and_joined_in_their_order(stack: GatewayStack) -> None:
    answer = await ask(stack, language="en", prompt="said before")
    ring = ring_of(stack)
    lengths = [len(each) // 4 for each in ring.windows]
    assert sum(lengths) == 6.4 * SAMPLE_RATE
    assert len(lengths) == 4
    assert answer.json() == {
        "text": " ".join(f"heard {length}" for length in lengths),
        "usage": {"type": "duration", "seconds": 7},
    }
    said = [106, 0, 1, 2]
    assert asked(stack) == 4 * [([*said, 101, 102, 104, 110], {"transcription": "text"})]
    assert (await ask(stack, "translations", response_format="text")).text.startswith("heard ")
    assert asked(stack)[-1] == ([101, 103, 105, 110], {"transcription": "text"}), "in the language that was found"
    decoded = AUDIO_FILES.labels("decoded")._value.get()
    await ask(stack, language="en")
    assert AUDIO_FILES.labels("decoded")._value.get() == decoded + 1


async def test_segments_have_their_windows_times(stack: GatewayStack) -> None:
    verbose = (await ask(stack, response_format="verbose_json")).json()
    starts = np.cumsum([0, *(len(each) // 4 for each in ring_of(stack).windows)]) / SAMPLE_RATE
    assert verbose["language"] == "de"
    assert [each["start"] for each in verbose["segments"]] == [round(each, 2) for each in starts[:-1].tolist()]
    assert [each["end"] for each in verbose["segments"]] == pytest.approx(starts[1:].tolist(), abs=0.03)
    assert {(each["avg_logprob"], round(each["no_speech_prob"], 4)) for each in verbose["segments"]} == {
        (-0.25, 0.2231)
    }
    assert asked(stack)[0] == ([101, 103, 104], {"transcription": "timestamps"})
    assert (await ask(stack, response_format="vtt")).headers["content-type"] == "text/vtt; charset=utf-8"


async def test_a_stream_is_openais(stack: GatewayStack) -> None:
    answer = await ask(stack, language="de", stream="true")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    events = [msgspec.json.decode(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    deltas = [each["delta"] for each in events if each["type"] == "transcript.text.delta"]
    assert deltas[0] == "heard"
    assert len(deltas) == 8
    assert events[-1]["type"] == "transcript.text.done"
    assert events[-1]["text"] == "".join(deltas)


async def test_a_crowd_at_the_encoders_is_waited_for(stack: GatewayStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.images.image_rows.CROWD_INTERVAL", 0.01)
    ring_of(stack).crowds = 5
    assert (await ask(stack, language="en")).json()["text"].count("heard") == 4
    assert ring_of(stack).crowds == 0


async def test_who_leaves_ends_what_was_asked_for_it(stack: GatewayStack) -> None:
    ring = ring_of(stack)
    ring.hold.clear()
    leaving = asyncio.create_task(ask(stack, language="de"))
    await eventually(lambda: len(stack.gateway.requests) == 4)
    leaving.cancel()
    await eventually(lambda: len(stack.gateway.requests) == 0 and stack.gateway.requests.idle)


async def test_what_an_encoder_refuses_is_a_400_for_the_file(stack: GatewayStack) -> None:
    ring_of(stack).refusal = "the tower makes numbers of the sound that are none"
    answer = await ask(stack, language="de")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("file: the tower makes")
    assert (await ask(stack, file=wav(np.zeros(SAMPLE_RATE * 61, np.float32)))).json()["error"]["message"] == (
        "file: the tower makes numbers of the sound that are none"
    ), "windows come in their order"
    for body, why in ((b"no form", "multipart/form-data"), (b"", "multipart/form-data")):
        bad = await stack.http.post("/v1/audio/transcriptions", content=body)
        assert (bad.status_code, why in bad.text) == (400, True)
