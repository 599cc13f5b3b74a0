"""Models that take sounds in chats, asked by the `openai` SDK to write down what is said: what `transformers` writes by
the prompt of each model's own processor."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from services.gateway.audio.audio_process import DecodedWindow, decode_audio
from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import running_stack
from tests.support.models.sounds import SAMPLE_RATE, in_sixteen_bits, sweep, wav
from tests.support.models.tiny_adapters import ATTENTION, write_adapter
from tests.support.models.tiny_hearing import HEARING, HearingModel, make_hearing_model, sound_url_part
from tests.support.models.tiny_images import text_part
from tests.support.models.tiny_models import TinyModel
from tests.support.models.tiny_qwen_audio import WINDOW_S

NAME, ADAPTER, LENGTH = "scribe", "speech", 128
SOUND, LONG = sweep(0, 1.3), np.concatenate([sweep(seed, 1.3) for seed in range(3)])
LANGUAGES = {"voxtral": "de", "qwen3-asr": "de"}
"""Those that are told what is spoken."""


def said(model: HearingModel, file: bytes, **how: str) -> str:
    """What the library writes down of a file, window by window."""
    window_s = 30 if model.processor is None else WINDOW_S  # Granite Speech's files say nothing of windows
    decoded = decode_audio(file, SAMPLE_RATE, window_s, 100)
    sounds = [np.frombuffer(each.samples, np.float32) for each in decoded if isinstance(each, DecodedWindow)]
    texts = [model.written(each, LENGTH, **how).strip() for each in sounds]
    return " ".join(texts).strip()


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of translations, in the SDK
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each in LANGUAGES else pytest.mark.slow) for each in HEARING]
)
async def test_what_is_said_is_written_down_as_the_library_does(kind: str, tmp_path: Path) -> None:
    """In a language and without, with a prompt, side by side, streamed, of a sound of several windows."""
    model = make_hearing_model(tmp_path / "model", kind)
    more = (f"--served-model-name={NAME}", f"--max-model-len={LENGTH}", "--max-batch-tokens=32", "--max-num-seqs=4")
    adapted = None
    if kind == "granite-speech":  # whose adapter lies beside it, as published
        tiny = TinyModel(kind, model.path, model.reference)
        adapted = model._replace(reference=write_adapter(tiny, model.path, modules=ATTENTION).reference)
        more = (*more, "--lora", f"{ADAPTER}={model.path}")
    with running_stack(tmp_path, model=model.path, more=more) as stack:
        async with client_of(stack.url) as client:
            client = client.with_options(timeout=150)
            ask: Any = client.audio.transcriptions.create
            file, long = ("a.wav", wav(SOUND)), ("b.wav", wav(LONG))
            how: dict[str, str] = {"language": LANGUAGES[kind]} if kind in LANGUAGES else {}
            told: dict[str, str] = {} if kind == "voxtral" else {"prompt": "The quick brown fox"}
            answers = await asyncio.gather(
                ask(model=NAME, file=file), ask(model=NAME, file=file, **how, **told), ask(model=NAME, file=long, **how)
            )
            expected = [said(model, file[1]), said(model, file[1], **how, **told), said(model, long[1], **how)]
            assert [each.text for each in answers] == expected
            assert len(set(expected)) == len(expected), "what is heard and said changes words"
            assert answers[2].usage.to_dict() == {"type": "duration", "seconds": 4}
            events = [each async for each in await ask(model=NAME, file=long, stream=True, **how)]
            deltas = [each.delta for each in events if each.type == "transcript.text.delta"]
            assert len(deltas) > 3
            assert "".join(deltas) == events[-1].text == expected[2]
            await _chats_have_sounds_too(client, model)
            if adapted is not None:
                assert (await ask(model=ADAPTER, file=file)).text == said(adapted, file[1]) != expected[0]
                await _chats_have_sounds_too(client, adapted, ADAPTER)
            await _what_is_not_allowed_is_said(client, kind)


async def _chats_have_sounds_too(client: Any, model: HearingModel, name: str = NAME) -> None:
    heard = base64.b64encode(wav(SOUND)).decode()
    part = {"type": "input_audio", "input_audio": {"data": heard, "format": "wav"}}
    messages = [{"role": "user", "content": [part, text_part("or"), sound_url_part(wav(sweep(4, 0.5)))]}]
    answer = await client.chat.completions.create(
        model=name, messages=messages, temperature=0, max_tokens=12, extra_body={"return_token_ids": True}
    )
    sounds = [in_sixteen_bits(each) for each in (SOUND, sweep(4, 0.5))]
    assert answer.choices[0].token_ids == model.greedy(messages, sounds, 12)


async def _what_is_not_allowed_is_said(client: Any, kind: str) -> None:
    for fields, why in (
        ({"response_format": "verbose_json"}, "response_format: 'verbose_json' is not allowed; json and text are"),
        ({"response_format": "srt"}, "does not say when"),
        ({"language": "xx"}, "'xx' is not allowed" if kind in LANGUAGES else "telling scribe what is spoken"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            await client.audio.transcriptions.create(model=NAME, file=("a.wav", wav(SOUND)), **fields)
    with pytest.raises(openai.BadRequestError, match="translating by scribe"):
        await client.audio.translations.create(model=NAME, file=("a.wav", wav(SOUND)))
