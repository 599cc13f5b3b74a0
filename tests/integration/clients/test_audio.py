"""Sounds through a whole stack by the `openai` SDK: what `transformers` writes down of them; and whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from services.gateway.audio.audio_process import DecodedWindow, decode_audio
from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.sounds import SAMPLE_RATE, encoded, in_sixteen_bits, sweep, wav
from tests.support.models.tiny_whisper import WINDOW_S, WhisperModel, make_whisper

NAME = "scribe"
SOUND = sweep(0)
LONG = np.concatenate([sweep(seed, 1.3) for seed in range(4)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> WhisperModel:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def stack(model: WhisperModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder: Path = tmp_path_factory.mktemp("audio")
    more = (f"--served-model-name={NAME}", "--set", "gateway.max_audio_s=20")
    with running_stack(folder, model=model.path, engines=2, more=more) as stack:
        yield stack


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(stack.url) as client:
        yield client.with_options(timeout=150)


def windows(file: bytes) -> list[DecodedWindow]:
    decoded = decode_audio(file, SAMPLE_RATE, WINDOW_S, 100)
    return [each for each in decoded if isinstance(each, DecodedWindow)]


def said(model: WhisperModel, file: bytes, language: str = "en", task: str = "transcribe", **more: Any) -> str:
    """What the library writes down of a file, window by window."""
    sounds = [np.frombuffer(window.samples, np.float32) for window in windows(file)]
    return "".join(model.text(model.greedy(sound, language, task, **more)) for sound in sounds).strip()


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of translations, in the SDK
async def test_a_sound_says_what_the_library_writes_down(client: AsyncOpenAI, model: WhisperModel) -> None:
    """In each language and task, behind what was said before, at the same time; and the language that the model says
    itself."""
    file, other = wav(SOUND), wav(sweep(1))
    assert windows(file)[0].samples == in_sixteen_bits(SOUND).tobytes(), "nothing is lost on the way"
    ask = client.audio.transcriptions.create
    answers = await asyncio.gather(
        ask(model=NAME, file=("a.wav", file), language="en"),
        ask(model=NAME, file=("a.wav", other), language="de", prompt="The quick brown fox"),
        client.audio.translations.create(model=NAME, file=("a.wav", file)),
        ask(model=NAME, file=("a.wav", other)),
    )
    found = [model.detected(np.frombuffer(windows(each)[0].samples, np.float32)) for each in (file, other)]
    assert [each.text for each in answers] == [
        said(model, file),
        said(model, other, "de", before="The quick brown fox"),
        said(model, file, found[0], "translate"),
        said(model, other, found[1]),
    ]
    assert answers[0].usage is not None
    assert answers[0].usage.to_dict() == {"type": "duration", "seconds": 2}


async def test_a_long_sound_is_heard_in_windows_and_streamed(client: AsyncOpenAI, model: WhisperModel) -> None:
    file = wav(LONG)
    assert len(windows(file)) == 3
    stream = await client.audio.transcriptions.create(
        model=NAME, file=("a.wav", file), language="fr", stream=True, response_format="json"
    )
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) > 3
    assert events[-1].type == "transcript.text.done"
    assert "".join(deltas).strip() == events[-1].text == said(model, file, "fr")


async def test_times_are_the_librarys(client: AsyncOpenAI, model: WhisperModel, stack: RunningStack) -> None:
    file = wav(LONG)
    verbose = await client.audio.transcriptions.create(
        model=NAME, file=("a.wav", file), language="en", response_format="verbose_json"
    )
    expected: list[tuple[float, float, str]] = []
    for window in windows(file):
        sound = np.frombuffer(window.samples, np.float32)
        tokens = model.greedy(sound, times=True)
        expected += model.segments(tokens, window.start, len(sound) / SAMPLE_RATE)
    assert len(expected) > 3
    segments = verbose.segments or []
    assert [(each.start, each.end, each.text) for each in segments] == [
        (round(start, 2), round(end, 2), text) for start, end, text in expected
    ]
    assert verbose.text == "".join(text for _, _, text in expected).strip()
    assert (verbose.language, verbose.duration) == ("en", round(len(LONG) / SAMPLE_RATE, 3))
    assert all(0 <= each.no_speech_prob <= 1 and each.avg_logprob < 0 for each in segments)
    worded = await client.audio.transcriptions.create(
        model=NAME,
        file=("a.wav", file),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert worded.text == verbose.text
    assert worded.segments is None
    words = worded.words or []
    letters, spoken = ("".join("".join(texts).split()) for texts in ([each.word for each in words], verbose.text))
    assert letters == spoken
    assert all(one.start <= one.end <= verbose.duration for one in words)
    assert [each.start for each in words] == sorted(each.start for each in words)
    assert len({each.start for each in words}) > 5
    subtitles = await client.audio.transcriptions.create(
        model=NAME, file=("a.wav", file), language="en", response_format="srt"
    )
    assert str(subtitles).startswith("1\n00:00:0")
    assert str(subtitles).count(" --> ") == len(segments)
    vtt = await client.audio.transcriptions.create(
        model=NAME, file=("a.wav", file), language="en", response_format="vtt"
    )
    assert str(vtt).startswith("WEBVTT\n\n00:00:0")


@pytest.mark.parametrize(
    ("form", "codec", "rate"),
    [("flac", "flac", 16000), ("mp3", "libmp3lame", 44100), ("webm", "libopus", 48000), ("ipod", "aac", 44100)],
)
async def test_other_formats_are_heard(
    client: AsyncOpenAI, model: WhisperModel, form: str, codec: str, rate: int
) -> None:
    file = encoded(SOUND, form, codec, rate)
    heard = await client.audio.transcriptions.create(
        model=NAME, file=("a", file), language="en", response_format="text"
    )
    assert str(heard).strip() == said(model, file)


async def test_what_is_no_sound_is_a_400_and_nobody_dies(client: AsyncOpenAI, stack: RunningStack) -> None:
    pids = {name: stack.pid(name) for name in ("encoder-1", "gateway-1", "engine-1-rank0")}
    for file, why in (
        (b"no sound at all", "file: the file is no sound, or broken"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "file: the file is no sound, or broken"),
        (wav(SOUND)[:30], "file: the file is no sound, or broken"),
        (wav(SOUND[:100]), "file: 0.00625 s of sound are not allowed; at least 0.1 are"),
        (
            encoded(np.zeros(SAMPLE_RATE * 25, np.float32), "flac", "flac", 16000),
            "file: more than 20 s are not allowed",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=why) as error:
            await client.audio.transcriptions.create(model=NAME, file=("a.wav", file), language="en")
        assert error.value.param == "file"
    with pytest.raises(openai.APIStatusError, match="bytes that are allowed"):
        await client.audio.transcriptions.create(model=NAME, file=("a.wav", bytes(26 * 2**20)))
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions alone"):
        await client.completions.create(model=NAME, prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions alone"):
        await client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Hello"}])
    async with httpx.AsyncClient() as plain:
        for fields, why in (
            ({"language": "xx"}, "language: 'xx' is not allowed; de, en, fr are"),
            ({"response_format": "xml"}, "response_format: 'xml' is not allowed"),
            ({"temperature": "2"}, "temperature: '2' is not allowed"),
            ({"stream": "true", "response_format": "srt"}, "with stream json and text are"),
            ({"timestamp_granularities[]": "line"}, "word and segment are"),
            ({"prompt": "<|endoftext|>"}, "prompt: <\\|"),
            ({"volume": "11"}, "volume: this field is not known"),
        ):
            answer = await plain.post(
                f"{stack.url}/v1/audio/transcriptions", data=fields, files={"file": ("a.wav", wav(SOUND))}
            )
            assert answer.status_code == 400, why
            assert why.replace("\\", "") in answer.json()["error"]["message"]
    assert {name: stack.pid(name) for name in pids} == pids


@pytest.mark.features("re-dispatch")
async def test_whoever_dies_leaves_the_text_as_it_would_have_been(
    client: AsyncOpenAI, model: WhisperModel, stack: RunningStack
) -> None:
    """The encoder while it is asked, and when it has read the sound and not yet said when words were; then each engine
    while the text is streamed."""
    file = wav(LONG)
    expected = said(model, file, "de")
    worded: Any = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    ask = partial(client.audio.transcriptions.create, model=NAME, file=("a.wav", file), language="de")
    before: Any = await ask(**worded)
    encoder = stack.kill("encoder-1", signal.SIGSTOP)
    asked = asyncio.create_task(ask(**worded))
    await asyncio.sleep(0.5)
    stack.kill("encoder-1")
    assert await asked == before
    await asyncio.to_thread(stack.replaced, "encoder-1", encoder)
    engines = [stack.kill(f"engine-{i}-rank0", signal.SIGSTOP) for i in (1, 2)]
    asked = asyncio.create_task(ask(**worded))
    await asyncio.sleep(1)  # rows are kept, so it has answered soon; ranks that stand still for 3 s are killed
    stack.kill("encoder-1", signal.SIGSTOP)
    for pid in engines:
        with contextlib.suppress(ProcessLookupError):  # the supervisor may have ended it for its silence
            os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    stack.kill("encoder-1")
    assert await asked == before
    # Not both at once: of two deaths within a trial the request would be to blame (ADR 22).
    for rank in ("engine-1-rank0", "engine-2-rank0"):
        stream = await client.audio.transcriptions.create(model=NAME, file=("a.wav", file), language="de", stream=True)
        events = []
        async for event in stream:
            if not events:
                stack.kill(rank)
            events.append(event)
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == expected
