"""Images, videos and sounds in one chat through a whole stack by the `openai` SDK (Qwen-Omni): what `transformers`
generates of the same pixels and samples, in small steps and from a shared prefix; and what is not heard."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.sounds import in_sixteen_bits, sweep, wav
from tests.support.models.tiny_images import image_part, picture, text_part
from tests.support.models.tiny_omni import OmniReference, make_omni_model
from tests.support.models.tiny_qwen_audio import WINDOW_S, Sound, sound_part
from tests.support.models.tiny_videos import noise, video, video_part

NAME, COUNT = "omni", 16
IMAGE, FILM, SHORT, LONG = picture(0, (60, 40)), video(noise(6, (80, 60)), 2), sweep(0, 0.7), sweep(1, WINDOW_S)
ALL = [text_part("Look:"), video_part(FILM), image_part(IMAGE), sound_part(wav(SHORT)), text_part("What is it?")]
HEARD = [sound_part(wav(LONG)), text_part("and"), sound_part(wav(SHORT)), text_part("Which is longer?")]


class Chats:
    """Asks a stack, and knows what the library says."""

    def __init__(self, model: OmniReference, create: Any) -> None:
        self._model, self._create = model, create
        self._right: dict[str, tuple[list[int], list[int]]] = {}
        """Ids of each prompt and of its answer."""

    async def ask(self, content: list[dict[str, Any]], **more: Any) -> Any:
        """The answer's ids, and how many tokens the prompt has, of them cached."""
        extra: Any = {"ignore_eos": True, "return_token_ids": True, **more}
        how: Any = {"model": NAME, "temperature": 0, "max_tokens": COUNT, "extra_body": extra}
        return await self._create(messages=[{"role": "user", "content": content}], **how)

    async def check(
        self,
        content: list[dict[str, Any]],
        images: list[bytes],
        videos: list[bytes],
        sounds: list[Sound],
        **more: Any,
    ) -> int:
        """Returns how many of the prompt's tokens were cached."""
        answer = await self.ask(content, **more)
        if (name := json.dumps(content)) not in self._right:
            messages = [{"role": "user", "content": content}]
            given = self._model.of_chat(messages, images, videos, [in_sixteen_bits(each) for each in sounds])
            self._right[name] = given["input_ids"][0].tolist(), self._model.tokens(given, COUNT)
        assert (answer.prompt_token_ids, answer.choices[0].token_ids) == self._right[name]
        found: int = answer.usage.prompt_tokens_details.cached_tokens
        return found


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "prefix cache")
@pytest.mark.parametrize("kind", ["qwen2.5", pytest.param("qwen3", marks=pytest.mark.extras)])
async def test_what_is_seen_and_heard_in_one_chat_is_as_the_library_has_it(tmp_path: Path, kind: str) -> None:
    model = make_omni_model(tmp_path / "model", kind)
    more = (f"--served-model-name={NAME}", "--max-batch-tokens=24", "--max-num-seqs=4")
    with running_stack(tmp_path, model=model.path, more=more) as stack:
        async with client_of(stack.url) as client:
            chats = Chats(model, client.with_options(timeout=150).chat.completions.create)
            await asyncio.gather(
                chats.check(ALL, [IMAGE], [FILM], [SHORT]),
                chats.check(HEARD, [], [], [LONG, SHORT]),
                chats.check([image_part(IMAGE), text_part("And this?")], [IMAGE], [], []),
                chats.check([text_part("Only a question.")], [], [], []),
            )
            quiet = {"use_audio_in_video": False}
            assert await chats.check(ALL, [IMAGE], [FILM], [SHORT], mm_processor_kwargs=quiet) >= 32
            await _what_is_bad_is_refused(chats, stack)


async def _what_is_bad_is_refused(chats: Chats, stack: RunningStack) -> None:
    """By the field, and nobody dies."""
    pids = {name: stack.pid(name) for name in ("encoder-1", "gateway-1", "engine-1-rank0")}
    one = ALL[2:3]
    for before, part, where, why in (
        (ALL, sound_part(b"RIFF, but no sound"), "input_audio.data", "no sound, or broken"),
        (one, sound_part(wav(sweep(0, WINDOW_S + 0.5))), "input_audio.data", "a sound of more than 2 s is not allowed"),
        (one, sound_part(wav(SHORT)[:50]), "input_audio.data", "at least 0.1 are"),
        (one, image_part(wav(SHORT)), "image_url.url", "not an image"),
        (one, video_part(IMAGE), "video_url.url", "no video, or broken"),
    ):
        with pytest.raises(openai.BadRequestError, match=why) as error:
            await chats.ask([*before, part])
        assert error.value.param == f"messages[0].content[{len(before)}].{where}"
    with pytest.raises(openai.BadRequestError, match="use_audio_in_video: sounds within videos are not heard"):
        await chats.ask(ALL, mm_processor_kwargs={"use_audio_in_video": True})
    with pytest.raises(openai.BadRequestError, match=r"show each of the 1 images and"):
        await chats.ask([image_part(IMAGE), text_part("<|IMAGE|>")])
    assert pids == {name: stack.pid(name) for name in pids}
