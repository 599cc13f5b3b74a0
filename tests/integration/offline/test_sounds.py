"""`LLM.chat` and `baton batch` with sounds: what `transformers` generates of them with each model that hears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.batch.own_engine import offline_engine
from deploy.cli.batch.run import answer_batch
from services.offline.errors import InvalidRequest
from services.offline.llm import LLM
from services.offline.requests import SamplingParams
from tests.support.models.sounds import in_sixteen_bits, sweep, wav
from tests.support.models.tiny_gemma4 import Gemma4Kind, inputs_of_chat, make_gemma4_model
from tests.support.models.tiny_hearing import HEARING, make_hearing_model, sound_url_part
from tests.support.models.tiny_images import image_part, logits_behind, picture, text_part
from tests.support.models.tiny_phi4 import make_phi_model
from tests.support.models.tiny_qwen_audio import WINDOW_S, SoundChatModel, make_sound_model, sound_part

LANGUAGES = ("voxtral", "qwen3-asr")
"""Those that are told which, whose whole stack is in tests/integration/clients/test_transcribing_chats.py."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_chats_with_sounds_say_what_the_library_says(tmp_path: Path) -> None:
    """A short one, one as long as the model hears, several, and none; cut into steps within them."""
    model = make_sound_model(tmp_path)
    short, long = sweep(0, 0.7), sweep(1, WINDOW_S)
    chats = [
        ([sound_part(wav(short)), text_part("What is it?")], [short]),
        ([text_part("Compare"), sound_part(wav(long)), sound_part(wav(short))], [long, short]),
        ([text_part("Only a question.")], []),
    ]
    with LLM(str(tmp_path), progress=False, max_batch_tokens=16, max_num_seqs=4) as llm:
        messages = [[{"role": "user", "content": parts}] for parts, _ in chats]
        for output, said, (_, sounds) in zip(llm.chat(messages, GREEDY), messages, chats, strict=True):
            heard = [in_sixteen_bits(each) for each in sounds]
            assert output.outputs[0].token_ids == model.greedy(said, heard, 12)
            assert output.prompt_token_ids == model.inputs(said, heard)["input_ids"][0].tolist()
        for part, why in (
            (
                sound_part(wav(sweep(0, WINDOW_S + 0.5))),
                "a sound of more than 2 s is not allowed: the model hears no more",
            ),
            (sound_part(b"no sound at all"), r"input_audio.data: the file is no sound, or broken"),
            (sound_part(wav(short), "pcm16"), "'pcm16' is not allowed; wav, mp3, flac, ogg, webm, m4a are"),
            ({"type": "input_audio", "input_audio": {"data": "*", "format": "wav"}}, "base64 of a sound's file is"),
            ({"type": "input_audio", "input_audio": "x"}, "is not allowed"),
            (image_part(picture(0)), "takes no images"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                llm.chat([{"role": "user", "content": [part]}], GREEDY)
    _a_line_of_a_batch_has_a_sound(tmp_path, model)


@pytest.mark.parametrize("kind", [each for each in HEARING if each not in LANGUAGES])
def test_chats_of_each_model_that_hears_say_what_the_library_says(kind: str, tmp_path: Path) -> None:
    """A short sound, one of several windows, two, and none; cut into steps within them, and behind a shared prefix."""
    model = make_hearing_model(tmp_path, kind)
    short, long = sweep(0, 0.7), sweep(1, WINDOW_S + 1.1)
    chats = [
        ([sound_part(wav(short)), text_part("What is it?")], [short]),
        ([text_part("Compare"), sound_url_part(wav(long)), sound_part(wav(short))], [long, short]),
        ([text_part("Compare"), sound_url_part(wav(long)), text_part("and this")], [long]),
        ([text_part("Only a question.")], []),
    ]
    with LLM(str(tmp_path), progress=False, max_batch_tokens=16, max_num_seqs=4) as llm:
        messages: Any = [[{"role": "user", "content": parts}] for parts, _ in chats]
        expected = [
            model.inputs(said, [in_sixteen_bits(each) for each in sounds])
            for said, (_, sounds) in zip(messages, chats, strict=True)
        ]
        right = [model.greedy_of(each, 12) for each in expected]
        assert len(set(map(tuple, right))) == len(right), "what is heard changes words"
        for _ in range(2):
            outputs = llm.chat(messages, GREEDY)
            assert [each.prompt_token_ids for each in outputs] == [each["input_ids"][0].tolist() for each in expected]
            assert [each.outputs[0].token_ids for each in outputs] == right
        assert outputs[1].num_cached_tokens >= 32


@pytest.mark.extras
@pytest.mark.parametrize(("kind", "seed"), [("small", 0), ("unified", 2)])
def test_gemma4_hears_beside_images_what_the_library_hears(kind: Gemma4Kind, seed: int, tmp_path: Path) -> None:
    """With what its processor writes around a sound; two sounds, and texts alone; a bad one fails alone."""
    model = make_gemma4_model(tmp_path, kind, seed, hears=True)
    short, long, image = sweep(0, 0.7), sweep(1, 1.9), picture(0, (60, 40))
    chats = [
        ([text_part("What is it?"), sound_part(wav(short)), image_part(image)], [image], [short]),
        ([sound_part(wav(long)), text_part("or"), sound_part(wav(short))], [], [long, short]),
        ([sound_part(wav(short)), text_part("or"), sound_part(wav(long))], [], [short, long]),
        ([text_part("Only a question.")], [], []),
    ]
    with LLM(str(tmp_path), progress=False, max_batch_tokens=80, max_num_seqs=4) as llm:
        messages = [[{"role": "user", "content": parts}] for parts, _, _ in chats]
        said = set[tuple[int, ...]]()
        for output, chat, (_, images, sounds) in zip(llm.chat(messages, GREEDY), messages, chats, strict=True):
            inputs = inputs_of_chat(model, chat, images, [in_sixteen_bits(each) for each in sounds])
            assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
            tokens = output.outputs[0].token_ids
            assert tokens == logits_behind(model.reference, inputs, tokens).argmax(-1).tolist()
            said.add(tuple(tokens))
        assert len(said) == len(chats), "what is heard changes words"
        with pytest.raises(InvalidRequest, match=r"input_audio.data: the file is no sound, or broken"):
            llm.chat([{"role": "user", "content": [sound_part(b"no sound at all"), image_part(image)]}], GREEDY)


def test_phi_hears_beside_images_what_the_library_hears(tmp_path: Path) -> None:
    """The same sound without an image and beside one, which has other rows then; two of them, and texts alone."""
    model, sound, image = make_phi_model(tmp_path), sweep(0, 0.9), picture(0, (60, 40))
    heard = in_sixteen_bits(sound)
    chats: list[tuple[Any, list[bytes], list[Any]]] = [
        ([text_part("What is it?"), sound_part(wav(sound))], [], [heard]),
        ([text_part("What is it?"), sound_part(wav(sound)), image_part(image)], [image], [heard]),
        ([sound_part(wav(sound)), text_part("or"), sound_part(wav(sound))], [], [heard, heard]),
        ([text_part("Only a question.")], [], []),
    ]
    with LLM(str(tmp_path), progress=False, max_batch_tokens=80, max_num_seqs=4, max_model_len=1024) as llm:
        messages = [[{"role": "user", "content": parts}] for parts, _, _ in chats]
        for output, chat, (_, images, sounds) in zip(llm.chat(messages, GREEDY), messages, chats, strict=True):
            inputs = model.inputs_of_chat(chat, images, sounds)
            assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
            tokens = output.outputs[0].token_ids
            assert tokens == logits_behind(model.reference, inputs, tokens).argmax(-1).tolist()


def _a_line_of_a_batch_has_a_sound(folder: Path, model: SoundChatModel) -> None:
    sound, given, answered = sweep(2, 0.9), folder / "lines.jsonl", folder / "answers.jsonl"
    messages = [{"role": "user", "content": [sound_part(wav(sound)), text_part("And this?")]}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    given.write_text(json.dumps(line) + "\n")
    answer_batch(given, answered, offline_engine(str(folder), {}), 1)
    (choice,) = json.loads(answered.read_text())["response"]["body"]["choices"]
    assert choice["token_ids"] == model.greedy(messages, [in_sixteen_bits(sound)], 12)
