"""Images through a whole stack that change what their tokens see or how they are turned (Qwen3.5, Gemma 3): what
`transformers` generates of them, handed over, with drafts, from a shared prefix, in small steps, and behind a death;
and of a video, as large as no other body may be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from safetensors.torch import load_file, save_file

from services.gateway.videos.video_decoder import MODULE as VIDEO_MODULE
from shared.messages.lifecycle import Lifecycle
from tests.support.cluster.batches import batch_of
from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.gateway.fake_services import eventually
from tests.support.models.tiny_gemma import TOKENS, make_gemma_model
from tests.support.models.tiny_images import ImageModel, image_part, picture, shown, text_part
from tests.support.models.tiny_qwen_vl import make_qwen_model
from tests.support.models.tiny_videos import VideoReference, noise, padded, video, video_part
from tests.support.warm.processes import baton_up

NAME, LENGTH, SHORT = "seer", 120, 24
"""Tokens of what an engine is killed within, and of other answers."""
EXTRA = {"ignore_eos": True}
NGRAM = '--speculative={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
FLAT, TALL, LARGE = picture(0, (150, 40)), picture(1, (40, 160)), picture(2, (900, 700))


def user(*parts: bytes | str) -> dict[str, Any]:
    return {"role": "user", "content": [image_part(p) if isinstance(p, bytes) else text_part(p) for p in parts]}


@pytest.mark.features(
    "prompt embeds",
    "images",
    "states",
    "prefill/decode",
    "tensor parallel",
    "speculative",
    "prefix cache",
    "re-dispatch",
    "n > 1",
)
async def test_images_of_any_size_are_handed_over_and_outlive_an_engine(tmp_path: Path) -> None:
    """Of a model with states."""
    model = make_qwen_model(tmp_path / "model", "qwen3.5")
    chats = [
        ([FLAT, TALL], user("Compare ", FLAT, " with ", TALL, " and tell all about both of them, please.")),
        ([LARGE], user(LARGE, "What is it?")),
        ([], {"role": "user", "content": "Only a question."}),
    ]
    tokens = model.greedy(shown([chats[0][1]]), chats[0][0], LENGTH)
    whole, first = (
        model.processor.tokenizer.decode(tokens[:count], skip_special_tokens=True) for count in (LENGTH, SHORT)
    )
    said = [first, *(model.text(shown([message]), images, SHORT) for images, message in chats[1:])]
    more = (f"--served-model-name={NAME}", NGRAM)
    with running_stack(
        tmp_path,
        model=model.path,
        prefill=1,
        decode=1,
        tp_decode=2,
        settings=["coordinator.disaggregate_tokens=16"],
        more=more,
    ) as pools:
        async with client_of(pools.url) as client:
            how: Any = {"model": NAME, "temperature": 0, "max_tokens": SHORT, "extra_body": {"ignore_eos": True}}
            create: Any = client.with_options(timeout=150).chat.completions.create
            answers = await asyncio.gather(*(create(messages=[chat], **how) for _, chat in chats))
            assert [each.choices[0].message.content for each in answers] == said
            again = await create(messages=[chats[0][1]], n=2, **how)
            assert [each.message.content for each in again.choices] == [said[0], said[0]]
            assert again.usage.prompt_tokens_details.cached_tokens >= 32
            await _a_video_outlives_its_encoder(model, pools, create, how)
            await _a_line_of_a_batch_has_a_video(model, pools, tmp_path)
            text, pid = "", None
            async for chunk in await create(messages=[chats[0][1]], stream=True, **how | {"max_tokens": LENGTH}):
                text += chunk.choices[0].delta.content or ""
                if text and pid is None:
                    engines = {
                        name: life for name, life in (await pools.heard()).items() if life.service == "scheduler"
                    }
                    busy = [name for name, life in engines.items() if life.load]
                    pid = pools.kill(f"{(busy or sorted(engines))[0]}-rank0")
            assert text == whole


async def test_a_checkpoint_without_its_tower_is_served_for_texts(tmp_path: Path) -> None:
    """Where that is asked for, or no image and no video is allowed; else the error says how."""
    model = make_qwen_model(tmp_path / "model", "qwen3.5")
    file = model.path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if ".visual." not in k}, file, {"format": "pt"})
    run = [*baton_up(os.environ), "up", "--model", str(model.path), "--port=0", "--engines=1"]
    ended = await asyncio.to_thread(
        subprocess.run, [*run, "--run-dir", str(tmp_path / "ends")], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode
    assert "has no visual." in ended.stdout + ended.stderr
    assert "--language-model-only serves it for texts" in ended.stdout + ended.stderr
    question: dict[str, Any] = {"role": "user", "content": "Only a question."}
    limits = '--limit-mm-per-prompt={"image": 0, "video": 0}'
    with running_stack(tmp_path / "runs", model=model.path, more=(f"--served-model-name={NAME}", limits)) as stack:
        assert not stack.instances("encoder")
        async with client_of(stack.url) as client:
            create: Any = client.chat.completions.create
            answer = await create(model=NAME, messages=[question], temperature=0, max_tokens=24, extra_body=EXTRA)
            assert answer.choices[0].message.content == model.text([question], [], 24)
            with pytest.raises(openai.BadRequestError, match=f"{NAME} takes no images"):
                await create(model=NAME, messages=[user(FLAT)])


async def _a_video_outlives_its_encoder(model: ImageModel, pools: RunningStack, create: Any, how: Any) -> None:
    """Killed while it is asked for the first frames; asked again, for another's question, its rows are in the cache."""
    film = padded(video(noise(7)), 17 * 2**20)
    question = {"role": "user", "content": [video_part(film), text_part("What is it?")]}
    tokens = VideoReference(model, "qwen3.5").greedy([question], [], [film], SHORT)
    said = model.processor.tokenizer.decode(tokens, skip_special_tokens=True)
    encoder = pools.kill("encoder-1", signal.SIGSTOP)
    asking = asyncio.create_task(create(messages=[question], **how))
    await eventually(lambda: decodes(pools.pid("gateway-1")))
    await eventually(lambda: not decodes(pools.pid("gateway-1")))  # the encoder has been asked for all frames
    pools.kill("encoder-1")
    assert (await asking).choices[0].message.content == said
    await asyncio.to_thread(pools.replaced, "encoder-1", encoder)
    heard = await pools.until_heard(lambda lives: (e := lives["encoder-1"].encoder) is not None and e.encoded >= 2)
    before = heard["encoder-1"].encoder
    assert before is not None
    again = await create(messages=[question], **how)
    assert again.choices[0].message.content == said
    assert again.usage.prompt_tokens_details.cached_tokens >= 16
    await pools.until_heard(lambda lives: hits_of(lives) == before.hits + before.encoded)


async def _a_line_of_a_batch_has_a_video(model: ImageModel, pools: RunningStack, folder: Path) -> None:
    film = video(noise(5, (40, 160), seed=3))
    question = {"role": "user", "content": [text_part("And this?"), video_part(film)]}
    body = {"model": NAME, "messages": [question], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    line = {"custom_id": "film", "method": "POST", "url": "/v1/chat/completions", "body": body}
    answers = await batch_of(pools, [line], folder)
    tokens = VideoReference(model, "qwen3.5").greedy([question], [], [film], 12)
    said = model.processor.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answers["film"]["choices"][0]["message"]["content"] == said


def hits_of(lives: Mapping[str, Lifecycle]) -> int:
    encoder = lives["encoder-1"].encoder
    return 0 if encoder is None else encoder.hits


def decodes(gateway: int) -> bool:
    """Whether a process of the gateway's decodes a video."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(VIDEO_MODULE in child.cmdline() for child in psutil.Process(gateway).children())
    return True


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "prefix cache", "logprobs")
async def test_images_that_are_never_cut_are_computed_in_small_steps(tmp_path: Path) -> None:
    model = make_gemma_model(tmp_path / "model")
    chats = [
        ([FLAT, TALL], user("Compare ", FLAT, " with ", TALL)),
        ([LARGE], user(LARGE, "What is it?")),
        ([], {"role": "user", "content": "Only a question."}),
    ]
    said = [model.text(shown([message]), images, 24) for images, message in chats]
    more = (f"--served-model-name={NAME}", "--max-batch-tokens=24", "--max-num-seqs=4")
    with running_stack(tmp_path, model=model.path, more=more) as stack:
        async with client_of(stack.url) as client:
            how: Any = {"model": NAME, "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
            create: Any = client.with_options(timeout=150).chat.completions.create
            answers = await asyncio.gather(*(create(messages=[chat], logprobs=True, **how) for _, chat in chats))
            assert [each.choices[0].message.content for each in answers] == said
            again = await create(messages=[chats[0][1]], **how)
            assert again.choices[0].message.content == said[0]
            assert again.usage.prompt_tokens_details.cached_tokens >= 2 * TOKENS
            with pytest.raises(openai.BadRequestError, match="to show each of the 1 images"):
                await create(messages=[user("<start_of_image>", FLAT)], **how)
