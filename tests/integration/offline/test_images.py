"""`LLM.chat` and `LLM.generate` with images: what `transformers` generates of the same files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from services.offline.errors import InvalidRequest
from services.offline.llm import LLM
from services.offline.requests import SamplingParams
from tests.support.models.image_kinds import IMAGE_KINDS
from tests.support.models.tiny_gemma4 import make_gemma4_model
from tests.support.models.tiny_glm_vl import make_glm_model
from tests.support.models.tiny_images import ImageModel, image_part, make_image_model, picture, shown, text_part
from tests.support.models.tiny_llama4 import make_llama4_model
from tests.support.models.tiny_mllama import make_mllama_images
from tests.support.models.tiny_onevision import make_onevision_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "make",
    [
        make_image_model,
        make_onevision_model,
        make_glm_model,
        make_llama4_model,
        make_gemma4_model,
        make_mllama_images,
        *(
            pytest.param(each, id=kind, marks=pytest.mark.extras if kind == "ministral3" else ())
            for kind, each in IMAGE_KINDS.items()
        ),
    ],
)
def test_chats_with_images_say_what_the_library_says(tmp_path: Path, make: Callable[[Path], ImageModel]) -> None:
    model, images = make(tmp_path), [picture(0), picture(1)]
    chats = [
        ([{"role": "user", "content": [image_part(images[0]), text_part("What is it?")]}], images[:1]),
        ([{"role": "user", "content": [text_part("Compare"), *map(image_part, images)]}], images),
        ([{"role": "user", "content": "Only a question."}], []),
    ]
    with LLM(str(tmp_path), progress=False) as llm:
        outputs = llm.chat([messages for messages, _ in chats], GREEDY)
        for output, (messages, given) in zip(outputs, chats, strict=True):
            assert output.outputs[0].token_ids == model.greedy(shown(messages), given, 12)
            ids = model.ids_and_rows(shown(messages), given)["input_ids"][0].tolist()
            assert output.prompt_token_ids == [
                model.row_tokens[0] if each in model.row_tokens else each for each in ids
            ]
        if make in IMAGE_KINDS.values():
            return
        # A prompt's own text goes the way of a chat's that is rendered, whatever the kind.
        beside = [Image.open(io.BytesIO(images[0])), images[1]]
        text = model.processor.apply_chat_template(shown(chats[1][0]), add_generation_prompt=True)
        (generated,) = llm.generate({"prompt": text, "multi_modal_data": {"image": beside}}, GREEDY)
        assert generated.outputs[0].token_ids == model.greedy(shown(chats[1][0]), images, 12)
        assert generated.prompt == text
        for data, why in (
            ({"audio": b""}, r"prompts\[0\].multi_modal_data.audio is not allowed; image and video are"),
            ({"image": 7}, "image: a int is not allowed; a PIL.Image, the bytes of a file, a Path, or a URL is"),
            ({"image": images[:1]}, "to show each of the 1 images"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                llm.generate([{"prompt": text, "multi_modal_data": data}], GREEDY)
        with pytest.raises(InvalidRequest, match="beside a prompt of text only"):
            llm.generate([{"prompt_token_ids": [1], "multi_modal_data": {"image": images}}], GREEDY)
        with pytest.raises(InvalidRequest, match="the image is broken"):
            llm.chat([{"role": "user", "content": [image_part(images[0][:99])]}], GREEDY)


def test_a_model_with_images_is_served_for_texts_alone(tmp_path: Path) -> None:
    model, chat = make_image_model(tmp_path), [{"role": "user", "content": "Only a question."}]
    with LLM(str(tmp_path), progress=False, language_model_only=True) as llm:
        (said,) = llm.chat([chat], GREEDY)
        assert said.outputs[0].token_ids == model.greedy(shown(chat), [], 12)
        with pytest.raises(InvalidRequest, match="takes no images"):
            llm.chat([{"role": "user", "content": [image_part(picture(0))]}], GREEDY)
