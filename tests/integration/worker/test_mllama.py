"""Llama 3.2 Vision on one rank: what `transformers` generates of the same images and texts, in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.models.config import ModelError
from services.worker.models.lora.slots import LoraSettings
from services.worker.ops.interface import OpsName, OpsUnavailable
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.quantised_files import compressed_config, quantise
from tests.support.models.tiny_images import picture
from tests.support.models.tiny_mllama import TILE_ROWS, make_mllama, make_mllama_images
from tests.support.worker.image_chats import ImageChat
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 12
TALL, WIDE, SMALL = picture(0, (30, 100)), picture(1, (60, 25)), picture(2, (20, 20))
CHATS = (
    ImageChat("Before it ", TALL, "What is it?"),
    ImageChat("Compare ", WIDE, SMALL, " with ", TALL, " and say more."),
    ImageChat("No image at all, only a question."),
    ImageChat(SMALL),
)


@pytest.mark.features("images", "chunked prefill", "preemption", "prefix cache")
@pytest.mark.parametrize("ops", ["native", pytest.param("torch", marks=pytest.mark.extras)])
def test_images_are_seen_by_the_tokens_behind_them(
    tmp_path: Path, ops: OpsName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, several, with and without text between them, beside texts, cut into steps, preempted, behind a prefix that
    was computed, and with rows that another sequence has brought."""
    model = make_mllama_images(tmp_path)
    try:
        backend = tiny_backend(model.path, ops=ops, dtype="float32")
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    assert backend.card.images == 64
    assert (images := backend.card.cross_images) is not None
    assert (images.row_size, images.rows) == (64, 4 * 4 * TILE_ROWS)
    driver = Driver(backend, budget=9)
    sequences = []
    for chat in CHATS:
        ids, embeds = model.beside(chat.messages, chat.images)
        sequences.append(driver.add(ids, OUTPUT, prompt_embeds=embeds))
    while len(sequences[1].output) < 3:
        driver.step()
    driver.preempt(sequences[1])
    ids, embeds = model.beside(CHATS[0].messages, CHATS[0].images)
    again = driver.add(ids, OUTPUT, prompt_embeds=embeds)
    driver.share_encoded(again, sequences[0])
    assert driver.share_prefix(again, sequences[0]) >= 16
    ids, embeds = model.beside(CHATS[1].messages, CHATS[1].images)
    written_again = driver.add(ids, OUTPUT, prompt_embeds=embeds)
    while sequences[1].computed < 16:
        driver.step()
    assert driver.share_prefix(written_again, sequences[1], 16) == 16
    driver.run()
    expected = [chat.expected(model, OUTPUT) for chat in CHATS]
    assert [each.output for each in sequences] == expected
    assert (again.output, written_again.output) == (expected[0], expected[1])
    backend.reset()
    recorded, chat = record_logits(monkeypatch), CHATS[1]
    ids, embeds = model.beside(chat.messages, chat.images)
    driver = Driver(backend, budget=9)
    driver.add(ids, OUTPUT, prompt_embeds=embeds)
    driver.run()
    wanted = model.logits(chat.messages, chat.images, expected[1])
    assert torch.cat(recorded[-OUTPUT:]).sub(wanted).abs().max() < 1e-4 * wanted.abs().max()
    ids = model.beside(CHATS[3].messages, CHATS[3].images)[0]
    other = driver.add(ids, OUTPUT, prompt_embeds=model.beside(CHATS[3].messages, [TALL])[1])
    driver.run()
    assert other.output != expected[3], "an image that nobody sees would agree, too"


@pytest.mark.refuses(
    "Llama 3.2 Vision with images", "--tp", "--pp", "--speculative", "--kv-connector", "--lora", "quantised checkpoints"
)
def test_what_images_beside_a_prompt_do_not_go_with_is_refused_at_start(tmp_path: Path) -> None:
    path = make_mllama_images(tmp_path).path
    refused: dict[str, dict[str, Any]] = {
        "tp": {"communicator": SimpleNamespace(world_size=2)},
        "pp": {"pipeline": SimpleNamespace(stages=2)},
        "model_impl native": {"model_impl": "native"},
        "speculative": {"speculation": SpeculationSettings(method="ngram")},
        "kv_connector": {"kv_connector": True},
        "enable_prompt_embeds": {"prompt_embeds": True},
        "lora": {"loras": LoraSettings(at_run_time=True)},
    }
    for setting, different in refused.items():
        with pytest.raises(ModelError, match=f"{setting}: not allowed .*; --language-model-only serves it for texts"):
            tiny_backend(path, **different)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = compressed_config(8, "float", "channel", "float-quantized")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no quantised checkpoint of it is read; --language-model-only"):
        tiny_backend(path)


@pytest.mark.extras
def test_a_quantised_checkpoint_is_read_for_texts(tmp_path: Path) -> None:
    model, prompt = make_mllama(tmp_path), [3 + 7 * i % 150 for i in range(30)]
    exact = model.logits(prompt)
    quantise(model, "int8")
    assert (model.logits(prompt) - exact).abs().max() > 1e-2, "codes that were left alone would agree, too"
    backend = tiny_backend(model.path, dtype="float32")
    assert "transformers" not in backend.rank.decoder.ops_name
    driver = Driver(backend, budget=13)
    sequence = driver.add(prompt, OUTPUT)
    driver.run()
    assert sequence.output == model.greedy(prompt, OUTPUT)
