"""Videos through a whole stack by the `openai` SDK, of models that write times as text (GLM-4.6V, Gemma 4) or close
each video with a row (LLaVA-OneVision): what `transformers` generates of the same frames, in small steps, beside
images, from a shared prefix, and behind an engine's death; and what is no video."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.tiny_gemma4 import make_gemma4_model
from tests.support.models.tiny_glm_vl import make_glm_model
from tests.support.models.tiny_images import ImageModel, image_part, picture, text_part
from tests.support.models.tiny_onevision import make_onevision_model
from tests.support.models.tiny_videos import VideoReference, noise, video, video_part

NAME = "seer"
SHORT, LONG = 24, 120
FLAT, ODD, IMAGE = video(noise(15)), video(noise(7, (40, 160), seed=1), 5, "webm", "libvpx"), picture(0, (60, 40))


class Chats:
    """Asks a stack, and knows what the library says."""

    def __init__(self, model: ImageModel, kind: str, create: Any) -> None:
        self._tokenizer, self._reference, self._create = model.processor.tokenizer, VideoReference(model, kind), create

    async def ask(self, content: list[dict[str, Any]], count: int = SHORT, **more: Any) -> Any:
        how: Any = {"model": NAME, "temperature": 0, "max_tokens": count, "extra_body": {"ignore_eos": True}, **more}
        return await self._create(messages=[{"role": "user", "content": content}], **how)

    def said(
        self, content: list[dict[str, Any]], images: list[bytes], videos: list[bytes], count: int = SHORT
    ) -> tuple[str, int]:
        """The library's answer, and how many tokens the prompt has."""
        messages = [{"role": "user", "content": content}]
        tokens = self._reference.greedy(messages, images, videos, count)
        prompt = self._reference.inputs(messages, images, videos)["input_ids"]
        return self._tokenizer.decode(tokens, skip_special_tokens=True), prompt.shape[1]


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "prefix cache", "re-dispatch", "n > 1")
@pytest.mark.parametrize(
    "kind",
    # Of the others, tests/integration/offline/test_videos.py compares the same in small steps.
    ["glm46v", *(pytest.param(each, marks=pytest.mark.slow) for each in ("onevision", "gemma4"))],
)
async def test_videos_say_what_the_library_says(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    makers = {"onevision": make_onevision_model, "gemma4": make_gemma4_model}
    model = makers[kind](folder) if kind in makers else make_glm_model(folder, kind)
    alone = [video_part(FLAT), text_part("What is it? Tell me all about it, please, and from the beginning.")]
    mixed = [video_part(ODD, "webm"), image_part(IMAGE), text_part("Compare."), video_part(FLAT)]
    more = (f"--served-model-name={NAME}", "--max-batch-tokens=24", "--max-num-seqs=4")
    with running_stack(tmp_path, model=model.path, engines=2, more=more) as stack:
        async with client_of(stack.url) as client:
            chats = Chats(model, kind, client.with_options(timeout=150).chat.completions.create)
            answers = await asyncio.gather(chats.ask(alone), chats.ask(mixed), chats.ask([text_part("Only that?")]))
            said = [chats.said(alone, [], [FLAT]), chats.said(mixed, [IMAGE], [ODD, FLAT])]
            assert [(each.choices[0].message.content, each.usage.prompt_tokens) for each in answers[:2]] == said
            for _ in range(3):  # two of them are computed by one engine
                again = await chats.ask(alone, n=2)
                assert {each.message.content for each in again.choices} == {said[0][0]}
            assert again.usage.prompt_tokens_details.cached_tokens >= 32
            await _bad_videos_are_refused(chats, stack)
            await _a_stream_outlives_its_engine(chats, stack, alone)


async def _bad_videos_are_refused(chats: Chats, stack: RunningStack) -> None:
    """By the field, and nobody dies."""
    pids = {name: stack.pid(name) for name in ("encoder-1", "gateway-1", "engine-1-rank0")}
    for file, why in (
        (FLAT[:99], "the file is no video, or broken"),
        (b"", "the video is empty"),
        (picture(1), "the file is no video, or broken"),
        (video(noise(2, (64, 64)), 25, "mp4", "mpeg2video"), "codec is not allowed"),
        (video(noise(2, (16, 2048)), codec="mpeg4"), "one side may be 64 times the other"),
    ):
        with pytest.raises(openai.BadRequestError, match=why) as error:
            await chats.ask([text_part("Look: "), video_part(file)])
        assert error.value.param == "messages[0].content[1].video_url.url"
    for wrong in (7, {"url": 7}, {}, None):
        with pytest.raises(openai.BadRequestError) as error:
            await chats.ask([text_part("Look: "), {"type": "video_url", "video_url": wrong}])
        assert str(error.value.param).startswith("messages[0].content[1].video_url")
    assert pids == {name: stack.pid(name) for name in pids}


async def _a_stream_outlives_its_engine(chats: Chats, stack: RunningStack, content: list[dict[str, Any]]) -> None:
    text, killed = "", False
    async for chunk in await chats.ask(content, LONG, stream=True):
        text += chunk.choices[0].delta.content or ""
        if text and not killed:
            engines = {name: life for name, life in (await stack.heard()).items() if life.service == "scheduler"}
            busy = [name for name, life in engines.items() if life.load]
            stack.kill(f"{(busy or sorted(engines))[0]}-rank0")
            killed = True
    assert text == chats.said(content, [], [FLAT], LONG)[0]
