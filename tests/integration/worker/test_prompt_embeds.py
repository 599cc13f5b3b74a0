"""Prompts of embeddings on one rank: what `transformers` makes of `inputs_embeds`, in each situation of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.ops.interface import OpsName, OpsUnavailable
from tests.support.models.embedded_prompts import (
    greedy_of_rows,
    logits_of_rows,
    own_embeddings,
    prompt_embeds,
    random_rows,
)
from tests.support.models.library_models import library_model
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.launched_rank import launching
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return cache(lambda family: make_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


def add(driver: Driver, rows: Tensor, wanted: int = OUTPUT) -> Sequence:
    return driver.add([0] * len(rows), wanted, prompt_embeds=prompt_embeds(rows))


def words(count: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(3, VOCABULARY), k=count)


def check_batch(model: TinyModel, backend: Any) -> None:
    """Chunked prompts of rows that no token has, beside tokens; one of them is preempted."""
    reference = model.reference
    rows = [random_rows(reference, count, seed) for seed, count in enumerate((40, 1, 19))]
    driver = Driver(backend, budget=16)
    embedded = [add(driver, each) for each in rows]
    plain = driver.add(words(23), OUTPUT)
    for _ in range(5):
        driver.step()
    driver.preempt(embedded[0])
    driver.run()
    assert [each.output for each in embedded] == [greedy_of_rows(reference, each, OUTPUT) for each in rows]
    assert plain.output == model.greedy(words(23), OUTPUT)


@pytest.mark.features("prompt embeds", "chunked prefill", "preemption")
@pytest.mark.parametrize(
    ("family", "ops"),
    [
        *(("llama", "torch"), ("llama", "native"), ("gemma2", "native"), ("gemma3", "torch"), ("qwen3-moe", "native")),
        ("deepseek-v2", "native"),
        pytest.param("hy4", "native", marks=pytest.mark.extras),  # into several streams
    ],
)
def test_rows_of_a_client_come_to_what_the_library_makes_of_them(
    tiny: Callable[[str], TinyModel], family: str, ops: OpsName
) -> None:
    try:
        backend = tiny_backend(tiny(family).path, ops=ops, prompt_embeds=True)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    assert backend.card.prompt_embeds == tiny(family).reference.config.hidden_size
    check_batch(tiny(family), backend)


@pytest.mark.features("prompt embeds", "states")
def test_models_with_states_take_them(tiny: Callable[[str], TinyModel]) -> None:
    model = tiny("granite-hybrid")
    check_batch(model, tiny_backend(model.path, ops="torch", prompt_embeds=True))


@pytest.mark.parametrize("kind", ["Cohere2", "GPT2"])
def test_models_that_the_library_computes_take_them(kind: str, tmp_path: Path) -> None:
    model = library_model(kind, tmp_path)
    check_batch(model, tiny_backend(tmp_path, model_impl="transformers", prompt_embeds=True))


def test_they_are_launched_as_on_a_device_that_works_by_itself(tiny: Callable[[str], TinyModel]) -> None:
    check_batch(tiny("llama"), launching(tiny_backend(tiny("llama").path, prompt_embeds=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_models_own_embeddings_come_to_what_its_tokens_do(
    tiny: Callable[[str], TinyModel], recorded: list[Tensor], dtype: torch.dtype
) -> None:
    model, tokens = tiny("llama"), words(33)
    rows = own_embeddings(model.reference, tokens).to(dtype)
    backend = tiny_backend(model.path, ops="native", prompt_embeds=True)
    recorded.clear()
    driver = Driver(backend)
    embedded = add(driver, rows)
    driver.run()
    expected = logits_of_rows(model.reference, rows)[-1]
    assert (recorded[0][0] - expected).abs().max() < 1e-4 * expected.abs().max()
    if dtype == torch.float32:
        assert embedded.output == model.greedy(tokens, OUTPUT)


def test_rows_of_several_dtypes_meet_in_one_step(tiny: Callable[[str], TinyModel]) -> None:
    model = tiny("llama")
    driver = Driver(tiny_backend(model.path, prompt_embeds=True))
    rows = [random_rows(model.reference, 9, 1), random_rows(model.reference, 12, 2).to(torch.bfloat16)]
    embedded = [add(driver, each) for each in rows]
    driver.run()
    assert [each.output for each in embedded] == [greedy_of_rows(model.reference, each, OUTPUT) for each in rows]


@pytest.mark.features("prompt embeds", "chunked prefill", "preemption")
@pytest.mark.parametrize("ops", ["torch", "native"])
def test_rows_stand_between_tokens(tiny: Callable[[str], TinyModel], ops: OpsName) -> None:
    """In runs that lie across the borders of chunks and blocks, and end where a prompt does."""
    model, prompts = tiny("llama"), []
    try:
        driver = Driver(tiny_backend(model.path, ops=ops, prompt_embeds=True), budget=11)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    sequences = []
    for seed, (length, runs) in enumerate([(40, ((0, 3), (9, 20))), (30, ((14, 1), (15, 2), (29, 1))), (9, ((4, 2),))]):
        tokens, rows = words(length, seed), random_rows(model.reference, sum(count for _, count in runs), seed)
        places = [place for first, count in runs for place in range(first, first + count)]
        whole = own_embeddings(model.reference, tokens).clone()
        whole[places] = rows
        prompts.append(whole)
        ids = [0 if place in places else token for place, token in enumerate(tokens)]
        sequences.append(driver.add(ids, OUTPUT, prompt_embeds=replace(prompt_embeds(rows), runs=runs)))
    for _ in range(5):
        driver.step()
    driver.preempt(sequences[0])
    driver.run()
    assert [each.output for each in sequences] == [greedy_of_rows(model.reference, each, OUTPUT) for each in prompts]


@pytest.mark.parametrize("fault", [None, NotImplementedError("rows are not read")])
def test_a_model_of_the_library_that_reads_more_of_a_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    library_model("Olmo2", tmp_path)
    embedding = torch.nn.Embedding.forward

    def counted(self: torch.nn.Embedding, ids: Tensor) -> Tensor:
        return embedding(self, ids) * (2 if ids.ndim == 2 else 1)

    def failing(self: torch.nn.Embedding, ids: Tensor) -> Tensor:
        if ids.ndim == 1:
            raise fault or AssertionError
        return embedding(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", counted if fault is None else failing)
    with pytest.raises(ModelError, match="rows are not read" if fault else "reads more of a token than its embedding"):
        tiny_backend(tmp_path, model_impl="transformers", prompt_embeds=True)


@pytest.mark.features("prompt embeds", "pooling", refused=True)
def test_a_model_without_a_head_is_refused(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    tiny("llama").reference.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"enable_prompt_embeds: the model has no language model head"):
        tiny_backend(tmp_path, prompt_embeds=True, pooling_type="last")
