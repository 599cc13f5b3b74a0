"""Images on one rank: what `transformers` generates of the same files and texts, in each situation of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.worker.models.config import ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.hf_layers.llava import LANGUAGE_MODEL_DEFAULTS, language_model, language_model_name
from services.worker.ops.interface import OpsName, OpsUnavailable
from shared.messages.generation import PromptEmbeds
from tests.support.models.embedded_prompts import prompt_embeds
from tests.support.models.tiny_images import ImageModel, image_part, make_image_model, picture, shown, text_part
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 6


class Chat:
    """A chat with images, as an engine gets it and as the library does."""

    def __init__(self, *parts: bytes | str) -> None:
        self.images = [part for part in parts if isinstance(part, bytes)]
        content = [image_part(part) if isinstance(part, bytes) else text_part(part) for part in parts]
        self.messages = shown([{"role": "user", "content": content}])

    def add_to(self, driver: Driver, model: ImageModel) -> Sequence:
        """Rows in place of image tokens, whose ids are 0."""
        ids: list[int] = model.ids_and_rows(self.messages, self.images)["input_ids"][0].tolist()
        token = model.reference.config.image_token_id
        runs: list[tuple[int, int]] = []
        for place, each in enumerate(ids):
            if each == token and runs and sum(runs[-1]) == place:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            elif each == token:
                runs.append((place, 1))
        if not runs:
            return driver.add(ids, OUTPUT)
        whole = prompt_embeds(torch.cat([model.rows(image) for image in self.images]))
        embeds = PromptEmbeds(dtype=whole.dtype, size=whole.size, rows=whole.rows, runs=tuple(runs))
        return driver.add([0 if each == token else each for each in ids], OUTPUT, prompt_embeds=embeds)


@pytest.mark.features("prompt embeds", "chunked prefill", "preemption")
@pytest.mark.parametrize(
    ("text", "tower", "ops"),
    [
        ("llama", "clip", "native"),
        ("llama", "clip", "torch"),
        ("mistral", "clip", "torch"),
        ("qwen2", "siglip", "torch"),
    ],
)
def test_images_come_to_what_the_library_makes_of_them(tmp_path: Path, text: str, tower: str, ops: OpsName) -> None:
    """Several in a prompt, cut into steps within an image, beside texts, and preempted."""
    model = make_image_model(tmp_path, text, tower)
    try:
        backend = tiny_backend(model.path, ops=ops)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    assert (backend.card.images, backend.card.prompt_embeds) == (64, None)
    chats = [
        Chat(picture(0), "What is it?"),
        Chat("Compare ", picture(1), " with ", picture(2), " and ", picture(0)),
        Chat("No image at all, only a question."),
    ]
    driver = Driver(backend, budget=11)
    sequences = [chat.add_to(driver, model) for chat in chats]
    for _ in range(6):
        driver.step()
    driver.preempt(sequences[1])
    driver.run()
    assert [each.output for each in sequences] == [model.greedy(chat.messages, chat.images, OUTPUT) for chat in chats]


@pytest.mark.parametrize("kind", LANGUAGE_MODEL_DEFAULTS)
def test_sizes_that_a_configuration_leaves_out_are_the_librarys(kind: str, tmp_path: Path) -> None:
    """As LLaVA 1.5's does."""
    theirs = transformers.AutoConfig.for_model(kind)
    for key, value in LANGUAGE_MODEL_DEFAULTS[kind].items():
        assert getattr(theirs, key) == value
    said = {"architectures": ["LlavaForConditionalGeneration"], "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps({**said, "text_config": {"model_type": kind}}))
    config = read_model_config(tmp_path)
    assert (config.num_layers, config.hidden_size, config.dtype) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        "float16",
    )


def test_other_language_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text_config.model_type 'opt' is not supported; supported: llama, mistral"):
        language_model(b'{"text_config": {"model_type": "opt"}}')
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="text_config"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("whole", "alone"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.embeddings.class_embedding", "vision_tower.embeddings.class_embedding"),
    ],
)
def test_tensors_of_older_and_newer_releases_are_found(whole: str, alone: str) -> None:
    assert language_model_name(whole) == alone


def test_dummy_weights_have_no_tower(tmp_path: Path) -> None:
    model = make_image_model(tmp_path)
    card: Any = tiny_backend(model.path, load_format="dummy").card
    assert card.images is None
