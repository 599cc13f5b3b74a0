"""`LLM.chat` with images: what `transformers` generates of the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.offline.errors import InvalidRequest
from services.offline.llm import LLM
from services.offline.requests import SamplingParams
from tests.support.models.tiny_images import image_part, make_image_model, picture, shown, text_part

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_chats_with_images_say_what_the_library_says(tmp_path: Path) -> None:
    model, images = make_image_model(tmp_path), [picture(0), picture(1)]
    chats = [
        ([{"role": "user", "content": [image_part(images[0]), text_part("What is it?")]}], images[:1]),
        ([{"role": "user", "content": [text_part("Compare"), *map(image_part, images)]}], images),
        ([{"role": "user", "content": "Only a question."}], []),
    ]
    with LLM(str(tmp_path), progress=False) as llm:
        outputs = llm.chat([messages for messages, _ in chats], GREEDY)
        for output, (messages, given) in zip(outputs, chats, strict=True):
            assert output.outputs[0].token_ids == model.greedy(shown(messages), given, 12)
            assert output.prompt_token_ids == model.ids_and_rows(shown(messages), given)["input_ids"][0].tolist()
        with pytest.raises(InvalidRequest, match="the image is broken"):
            llm.chat([{"role": "user", "content": [image_part(images[0][:99])]}], GREEDY)
