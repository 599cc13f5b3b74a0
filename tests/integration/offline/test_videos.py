"""`LLM.chat` with videos: what `transformers` generates of the same frames, with models of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.offline.errors import InvalidRequest
from services.offline.llm import LLM
from services.offline.requests import SamplingParams
from tests.support.models.image_kinds import IMAGE_KINDS
from tests.support.models.tiny_gemma4 import Gemma4Kind, make_gemma4_model
from tests.support.models.tiny_glm_vl import make_glm_model
from tests.support.models.tiny_images import ImageModel, image_part, picture, text_part
from tests.support.models.tiny_onevision import make_onevision_model
from tests.support.models.tiny_qwen_vl import make_qwen_model
from tests.support.models.tiny_tiles import make_tile_model
from tests.support.models.tiny_videos import VideoReference, noise, shown_with_videos, video, video_part

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WRITTEN = ("qwen2", "qwen3", "glm4v", "onevision", "gemma4")
"""One of those whose prompts show videos alike: what it is, a prompt's own text does not change."""
IN_SMALL_STEPS = ("onevision", "gemma4")
"""Whose prompts are cut within videos, as those of GLM-4.6V are in tests/integration/cluster/test_videos.py."""
FLAT, ODD = video(noise(15)), video(noise(7, (40, 160), seed=1), 5, "webm", "libvpx")


def make_model(folder: Path, kind: str) -> ImageModel:
    if kind == "onevision":
        return make_onevision_model(folder)
    if kind.startswith("gemma4"):
        sizes: dict[str, Gemma4Kind] = {"gemma4-large": "large", "gemma4-unified": "unified"}
        return make_gemma4_model(folder, sizes.get(kind, "small"))
    if kind in ("internvl", "smolvlm"):
        return make_tile_model(folder, kind)
    if kind in IMAGE_KINDS:
        return IMAGE_KINDS[kind](folder)
    return make_qwen_model(folder, kind) if kind.startswith("qwen") else make_glm_model(folder, kind)


@pytest.mark.parametrize(
    "kind",
    [
        "qwen2",
        "qwen2.5",
        "qwen3",
        "qwen3.5",
        "glm4v",
        "glm4v-moe",
        pytest.param("glm46v", marks=pytest.mark.extras),  # which a whole stack is asked of, too
        "glm-ocr",
        "onevision",
        "gemma4",
        "gemma4-large",
        "gemma4-unified",
        "internvl",
        "llava-next-video",
        "exaone4.5",
        "lfm3",
        "smolvlm",
        "glm-5-next",
    ],
)
def test_chats_with_videos_say_what_the_library_says(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path, kind)
    reference, image = VideoReference(model, kind), picture(0, (60, 40))
    chats = [
        ([video_part(FLAT), text_part("What is it?")], [], [FLAT]),
        ([text_part("Compare"), video_part(ODD, "webm"), image_part(image), video_part(FLAT)], [image], [ODD, FLAT]),
        ([text_part("Only a question.")], [], []),
    ]
    steps: Any = {"max_batch_tokens": 24, "max_num_seqs": 4} if kind in IN_SMALL_STEPS else {}
    with LLM(str(tmp_path), progress=False, **steps) as llm:
        messages = [[{"role": "user", "content": parts}] for parts, _, _ in chats]
        outputs = llm.chat(messages, GREEDY)
        for output, said, (_, images, videos) in zip(outputs, messages, chats, strict=True):
            inputs, tokens = reference.inputs(said, images, videos), output.outputs[0].token_ids
            assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
            assert tokens == reference.greedy_of(inputs, 12, tokens)
        if kind not in WRITTEN:
            return
        text = model.processor.apply_chat_template(shown_with_videos(messages[0]), add_generation_prompt=True)
        (generated,) = llm.generate({"prompt": text, "multi_modal_data": {"video": FLAT}}, GREEDY)
        assert generated.outputs[0].token_ids == outputs[0].outputs[0].token_ids
        with pytest.raises(InvalidRequest, match="the file is no video, or broken"):
            llm.chat([{"role": "user", "content": [video_part(FLAT[:99])]}], GREEDY)
