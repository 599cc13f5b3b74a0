"""Layers that differ in what they see, each kind with block tables of its own: real ranks and the scheduler's core say
what `transformers` says, in contexts of several windows, with less memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from services.scheduler.core.limits import EngineLimits
from services.worker.kv.layer_groups import HybridKvCache
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.library_models import library_model
from tests.support.models.tiny_drafters import make_eagle
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.library_situations import prompt
from tests.support.worker.rank_processes import EngineOfRanks, RankProcesses, rank_processes

OUTPUT = 24
GROWING = 60
"""Output tokens of sequences that together outgrow a small memory."""
LENGTHS = (1, 23, 25, 100, 150)
"""Of prompts; windows have 24 tokens, blocks 16."""
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=40, max_running=4, speculation="fixed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Five layers with windows for one that sees all."""
    different: dict[str, Any] = {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    return make_model("gemma3", tmp_path_factory.mktemp("gemma3"), **different)


@pytest.mark.features("hybrid KV cache", "tensor parallel", "speculative", "prefix cache", "chunked prefill")
@pytest.mark.parametrize("tp", [1, 2])
def test_every_context_says_what_the_library_does(ranks: RankProcesses, gemma3: TinyModel, tp: int) -> None:
    """Chunked prompts and decodes in one batch, with drafts; then the same prompts again, by what is cached of them.
    One rank computes in one call of the C++ library, two call each operation."""
    agrees(
        ranks.serve(gemma3.path, tp=tp, ops="native", limits=LIMITS, drafts=2, hybrid="on"), gemma3, [None] + [24] * 5
    )


@pytest.mark.features("hybrid KV cache", "pipeline parallel", "prefix cache", "chunked prefill")
def test_stages_share_tables_for_layers_of_their_own(ranks: RankProcesses, gemma3: TinyModel) -> None:
    """The first has windows alone, four of the five; of the layer that sees everything it has blocks all the same."""
    engine = ranks.serve(gemma3.path, stages=2, layers=(4, 2), ops="native", limits=LIMITS, hybrid="on")
    assert [group.layers for group in engine.serving[0].kv_groups] == [1, 5]
    assert [one.block_bytes for one in engine.serving] == [
        4 * engine.serving[1].block_bytes,
        engine.serving[1].block_bytes,
    ]
    agrees(engine, gemma3, [None, 24])


@pytest.mark.features("hybrid KV cache", "prefix cache", "chunked prefill")
def test_chunks_are_freed_as_windows_of_their_length(ranks: RankProcesses, tmp_path: Path) -> None:
    """Llama 4: two layers whose tokens see their own 32 positions, and one that sees everything."""
    model = library_model("Llama4Text", tmp_path)
    agrees(ranks.serve(model.path, ops="native", limits=LIMITS, hybrid="on"), model, [None, 32, 32])


@pytest.mark.features("hybrid KV cache", "speculative", "prefix cache", "chunked prefill")
@pytest.mark.parametrize("method", ["draft", "eagle"])
def test_drafts_are_kept_where_layers_see_everything(
    ranks: RankProcesses, gemma3: TinyModel, tmp_path: Path, method: Literal["draft", "eagle"]
) -> None:
    """A draft model, which is the model itself, and a layer that predicts the next state of Qwen2's."""
    model, folder = (gemma3, gemma3.path) if method == "draft" else with_eagle(tmp_path)
    drafts = SpeculationSettings(method=method, num_speculative_tokens=3, model=str(folder))
    engine = ranks.serve(model.path, ops="native", limits=LIMITS, speculation=drafts, hybrid="on")
    agrees(engine, model, [None] + [24] * (5 if method == "draft" else 2))
    assert engine.accepted


def with_eagle(folder: Path) -> tuple[TinyModel, Path]:
    model = make_model("qwen2-yarn-sliding", folder / "model")
    return model, make_eagle(model, folder / "eagle")


def agrees(engine: EngineOfRanks, model: TinyModel, windows: list[int | None]) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    assert [group.window for group in engine.serving[0].kv_groups] == windows
    first, again = outputs(engine, prompts, OUTPUT), [engine.ask(tokens, OUTPUT) for tokens in prompts]
    engine.run()
    assert first == right(model, prompts, first)
    assert [request.tokens for request in again] == first
    assert [request.cached for request in again] == [(length - 1) // 16 * 16 for length in LENGTHS]


@pytest.mark.features("hybrid KV cache", "preemption", "prefix cache", "chunked prefill")
def test_who_is_preempted_goes_on_where_it_was(ranks: RankProcesses, gemma3: TinyModel) -> None:
    """There is room for the longest prompt alone: 11 blocks, and for each window of 24 the 7 that it spans together
    with the 64 tokens of a step."""
    blocks = ranks.serve(gemma3.path, ops="native", limits=LIMITS, hybrid="on").serving[0].block_bytes
    engine = ranks.serve(gemma3.path, ops="native", limits=LIMITS, kv_memory=blocks * (1 + 11 + 7 * 5), hybrid="on")
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS[:4])]
    said = outputs(engine, prompts, GROWING)
    assert said == right(gemma3, prompts, said)
    assert engine.preemptions


def test_a_model_of_windows_alone_needs_no_memory_behind_them(ranks: RankProcesses, tmp_path: Path) -> None:
    """Its context is longer than its memory; no sequence needs more than 7 blocks."""
    model = make_model("mistral", tmp_path)
    probe = ranks.serve(model.path, ops="native", limits=LIMITS, hybrid="on")
    memory = 8 * probe.serving[0].block_bytes
    engine = ranks.serve(model.path, ops="native", limits=LIMITS, kv_memory=memory, hybrid="on")
    assert engine.serving[0].card.max_model_len == probe.serving[0].card.max_model_len == 256
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    said = outputs(engine, prompts, OUTPUT)
    assert said == right(model, prompts, said)


def test_in_the_same_bytes_a_longer_context_fits(ranks: RankProcesses, gemma3: TinyModel) -> None:
    longest = {}
    choices: list[HybridKvCache] = ["off", "on"]
    for hybrid in choices:
        engine = ranks.serve(gemma3.path, ops="native", limits=LIMITS, kv_memory=240_000, hybrid=hybrid)
        longest[hybrid] = engine.serving[0].card.max_model_len
    assert longest["off"] < 150
    assert longest["on"] > 220
    prompts = [prompt(200, 1)]
    said = outputs(engine, prompts, OUTPUT)
    assert said == right(gemma3, prompts, said)


def outputs(engine: EngineOfRanks, prompts: list[list[int]], count: int) -> list[list[int]]:
    requests = [engine.ask(tokens, count) for tokens in prompts]
    engine.run()
    assert [len(request.tokens) for request in requests] == [count] * len(prompts)
    return [request.tokens for request in requests]


def right(model: TinyModel, prompts: list[list[int]], said: list[list[int]]) -> list[list[int]]:
    """What the library would say after each prompt and each beginning of what was said: in one pass, it is quick."""
    passes = (
        model.logits(tokens + answer[:-1])[len(tokens) - 1 :] for tokens, answer in zip(prompts, said, strict=True)
    )
    return [logits.argmax(-1).tolist() for logits in passes]
