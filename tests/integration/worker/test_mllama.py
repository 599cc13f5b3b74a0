"""Llama 3.2 Vision: what `transformers` generates of the same images and texts, in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.distributed.communicator import SingleStage
from services.worker.executor.warm_up import warm_up
from services.worker.models.config import ModelError
from services.worker.ops.interface import OpsName, OpsUnavailable
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.quantised_files import quantise
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_adapters import write_adapter
from tests.support.models.tiny_images import picture
from tests.support.models.tiny_mllama import ACROSS, TILE_ROWS, MllamaImages, make_mllama, make_mllama_images
from tests.support.models.tiny_models import TinyModel
from tests.support.worker.image_chats import ImageChat
from tests.support.worker.plan_driver import Driver
from tests.support.worker.rank_processes import EngineOfRanks, RankProcesses, Request, rank_processes
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend
from tests.unit.worker.executor.test_warm_up import recorded_plans

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
    images = backend.card.cross_images
    assert images is not None
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
    backend.reset()
    plans = recorded_plans(backend, monkeypatch)
    warm_up(backend, rows=24, sequences=3, beside=images.rows + 20)
    tried = [each.prompt_embeds.count for plan in plans for each in plan.new if each.prompt_embeds]
    assert tried == [images.rows, 20], "what sizes memory has as many rows as a step may bring"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def check_engine(engine: EngineOfRanks, models: dict[str, MllamaImages]) -> None:
    """Chats side by side say what the model says, by the name of its adapter, and once more from what is cached."""
    asked = [(chat, name) for chat in CHATS for name in models]

    def ask(chat: ImageChat, name: str) -> Request:
        ids, embeds = models[""].beside(chat.messages, chat.images)
        return engine.ask(ids, OUTPUT, lora=name, embeds=embeds)

    requests = [ask(*each) for each in asked]
    engine.run()
    again = [ask(*each) for each in asked[: len(models)]]
    engine.run()
    expected = [chat.expected(models[name], OUTPUT) for chat, name in asked]
    assert [each.tokens for each in (*requests, *again)] == [*expected, *expected[: len(models)]]
    assert all(each.cached >= 16 for each in again)


@pytest.mark.extras
@pytest.mark.features("images", "tensor parallel", "pipeline parallel", "quantization", "prefix cache")
@pytest.mark.parametrize(
    "asked",
    [
        {"stages": 2, "layers": (2, 4)},
        {"tp": 2, "quantization": "int4"},
        {"stages": 2, "quantization": "fp8"},
    ],
    ids=str,
)
def test_ranks_and_stages_share_it(asked: dict[str, Any], ranks: RankProcesses, tmp_path: Path) -> None:
    """A stage may end with a layer that attends to images; weights are rounded as a whole."""
    model = make_mllama_images(tmp_path)
    if (code := asked.get("quantization")) is not None:
        rounded(model.reference, code)
    check_engine(ranks.serve(model.path, ops="native", **asked), {"": model})


@pytest.mark.extras
@pytest.mark.features("images", "tensor parallel", "LoRA")
def test_adapters_make_other_keys_and_values_of_images(ranks: RankProcesses, tmp_path: Path) -> None:
    """By the names of today's library, and by those of before."""
    model = make_mllama_images(tmp_path / "model")
    parts = {True: "cross_attn", False: "self_attn"}
    heads = [f"{parts[n in ACROSS]}.{each}_proj" for n in range(6) for each in "qkvo"]
    modules = [f"language_model.layers.{n // 4}.{each}" for n, each in enumerate(heads)]
    modules += [f"language_model.layers.{n}.mlp.{each}_proj" for n in range(6) for each in ("gate", "up", "down")]
    models, folders = {"": model}, [tmp_path / "today", tmp_path / "before"]
    for seed, folder in enumerate(folders):
        own: Any = model  # has what is looked at
        merged = write_adapter(TinyModel("mllama", model.path, own.reference), folder, modules=modules, seed=seed)
        models[folder.name] = model._replace(reference=merged.reference)
    path = folders[1] / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(
        {name.replace("model.language_model.", "language_model.model."): each for name, each in tensors.items()}, path
    )
    loras = tuple((folder.name, str(folder)) for folder in folders)
    check_engine(ranks.serve(model.path, tp=2, ops="native", loras=loras), models)


@pytest.mark.refuses(
    "Llama 3.2 Vision with images", "--speculative", "--kv-connector", "--prefill-context-parallel-size"
)
def test_what_images_beside_a_prompt_do_not_go_with_is_refused_at_start(tmp_path: Path) -> None:
    path = make_mllama_images(tmp_path).path
    refused: dict[str, dict[str, Any]] = {
        "prefill_context_parallel_size": {"context_rows": 64},
        "model_impl native": {"model_impl": "native"},
        "speculative": {"speculation": SpeculationSettings(method="ngram")},
        "kv_connector": {"kv_connector": True},
        "enable_prompt_embeds": {"prompt_embeds": True},
    }
    for setting, different in refused.items():
        with pytest.raises(ModelError, match=f"{setting}: not allowed .*; --language-model-only serves it for texts"):
            tiny_backend(path, **different)
    for stage in range(3):  # by every rank, whichever stage it has
        pipeline = OneOfThree()
        pipeline.stage = stage
        with pytest.raises(ModelError, match=r"pp-layers: stage 1 .* images alone \(1 of cross_attention_layers"):
            tiny_backend(path, pipeline=pipeline, layers=(1, 1, 4))


class OneOfThree(SingleStage):
    """A stage that nothing is sent to: what it is not for is found before."""

    stages = 3


@pytest.mark.extras
@pytest.mark.features("images", "quantization", "tensor parallel")
def test_a_quantised_checkpoint_is_read_with_images(ranks: RankProcesses, tmp_path: Path) -> None:
    """Of which the tower is left alone, as published ones have it."""
    model = make_mllama_images(tmp_path)
    own: Any = model  # has what is looked at
    quantise(own, "int8", part="language_model")
    check_engine(ranks.serve(model.path, tp=2, ops="native"), {"": model})


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
