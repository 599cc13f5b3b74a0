"""Every cell of the table of architectures and features in docs/models.md: as `transformers` says, or refused with the
error that the table names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.scheduler.core.limits import EngineLimits
from services.worker.executor import torch_backend
from services.worker.executor.host_runner import HostRunner
from services.worker.models.config import ModelError
from services.worker.models.lora.slots import LoraSettings
from shared.ids import EngineId, ModelName
from shared.messages.generation import Grammar
from tests.architecture.model_matrix import CELLS, MLLAMA, NAS, REFUSED, Architecture, Cell, ModelFeature
from tests.support.engines.real_engine import RealEngine, asked, right
from tests.support.kv.arenas import Clock, new_directory, remove, store_in
from tests.support.models.library_models import library_model
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_adapters import linear_layers, peft_adapter, write_adapter
from tests.support.models.tiny_mllama import make_mllama
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.models.tiny_nas import make_nas
from tests.support.models.tiny_tokenizers import letters
from tests.support.worker.compiled_grammars import grammar_library
from tests.support.worker.guided_engine import GuidedEngine
from tests.support.worker.library_situations import FEW_LENGTHS, check_mixed_batch, generated, prompt
from tests.support.worker.plan_driver import GREEDY, Driver
from tests.support.worker.planned_engine import PlannedEngine
from tests.support.worker.rank_processes import RankProcesses, rank_processes
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 6
MEMORY = 16 << 20
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
_OF_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTED = {
    "GPT2": ("c_attn", "c_proj", "c_fc"),
    "Glm4Moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "Llama4Text": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "gpt-oss": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "minimax-m3": (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_up_proj", "mlp.down_proj", "shared_experts.gate_up_proj", "shared_experts.down_proj"),
    ),
    **dict.fromkeys(("deepseek-v3.2", "glm-5", "hy4"), _OF_LATENTS),
    "glm-5-next": (
        *(f"self_attn.{part}_proj" for part in ("q_a", "q_b", "q", "k", "v", "b", "g_a", "g_b", "o")),
        *("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "forget_gate.f_a_proj", "forget_gate.f_b_proj"),
        *(f"{block}.{part}_proj" for block in ("layers.0.mlp", "shared_experts") for part in ("gate", "up", "down")),
    ),
    "qwen4": (
        *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")),
        *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
        *(f"shared_expert.{part}_proj" for part in ("gate", "up", "down")),
    ),
    "mistral-large-4": (
        *("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj"),
        *(f"{block}.{part}_proj" for block in ("mlp", "shared_experts") for part in ("gate", "up", "down")),
    ),
    "deepseek-v4": (
        *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_proj", "o_b_proj"),
        *("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
    ),
}
"""Modules of an adapter, by checkpoint, where they are not all linear layers: of a mixture that `transformers` computes
the attention; of sparse attention no indexer's, of compressed keys nothing of entries."""


@dataclass
class Bench:
    """A row's checkpoint, and what its cells are tried on."""

    model: TinyModel
    native: bool
    ranks: RankProcesses
    folder: Path
    """For what a cell writes."""
    recorded: list[Tensor] = field(default_factory=list)
    """The logits of every step."""

    def backend(self, **different: object) -> HostRunner:
        return tiny_backend(self.model.path, dtype="float32", ops="native", kv_memory_bytes=MEMORY, **different)

    @cached_property
    def plain(self) -> HostRunner:
        """With default settings."""
        return self.backend()


def make_row(architecture: Architecture, folder: Path) -> TinyModel:
    if architecture.checkpoint == NAS:
        return with_letters(make_nas(folder))
    if architecture.checkpoint == MLLAMA:
        return with_letters(make_mllama(folder))
    make = make_model if architecture.native else library_model
    # Two ranks share the heads of delta nets' keys in whole groups.
    even = (
        {"linear_num_key_heads": 2}
        if architecture.checkpoint.startswith(("qwen3-next", "qwen3.5", "qwen4", "olmo-h"))
        else {}
    )
    return with_letters(make(architecture.checkpoint, folder, **even))


def with_letters(model: TinyModel) -> TinyModel:
    letters(VOCABULARY).save(str(model.path / "tokenizer.json"))
    return model


def greedy(bench: Bench) -> None:
    """The same tokens, from nearly the same logits."""
    driver, tokens = Driver(bench.plain, budget=29), prompt(70)
    bench.recorded.clear()
    sequence = driver.add(tokens, OUTPUT)
    driver.run()
    assert sequence.output == bench.model.greedy(tokens, OUTPUT, sequence.output)
    expected = bench.model.logits(sequence.tokens)[len(tokens) - 1 : -1]
    assert torch.cat(bench.recorded[-OUTPUT:]).sub(expected).abs().max() < 1e-4 * expected.abs().max()


def mixed_batch(bench: Bench) -> None:
    check_mixed_batch(bench.model, bench.plain, FEW_LENGTHS)


def tensor_parallel(bench: Bench) -> None:
    on_ranks(bench, tp=2)


def pipeline_parallel(bench: Bench) -> None:
    on_ranks(bench, stages=2)


def on_ranks(bench: Bench, tp: int = 1, stages: int = 1) -> None:
    engine = bench.ranks.serve(bench.model.path, tp=tp, stages=stages, ops="native", limits=LIMITS, kv_memory=MEMORY)
    prompts = [prompt(length, length) for length in (2, 33, 71)]
    requests = [engine.ask(tokens, OUTPUT) for tokens in prompts]
    engine.run()
    said = [request.tokens for request in requests]
    assert said == generated(bench.model, prompts, said)


def prefix_cache(bench: Bench) -> None:
    """The same prompt again, and another behind what both have in common."""
    engine, tokens = PlannedEngine(bench.plain), prompt(70, 5)
    other = tokens[:48] + prompt(9, 6)
    for asked_for, cached in ((tokens, 0), (tokens, 64)):
        said = engine.generate(asked_for, OUTPUT)
        assert said == (bench.model.greedy(tokens, OUTPUT, said[0]), cached)
    # Layers with states leave a checkpoint there for the second that comes.
    found = [engine.generate(asked_for, OUTPUT) for asked_for in (other, [*other[:-1], 7])]
    assert found[0][0] == bench.model.greedy(other, OUTPUT, found[0][0])
    assert found[1] == (bench.model.greedy([*other[:-1], 7], OUTPUT, found[1][0]), 48)


def handed_over(bench: Bench) -> None:
    """From an engine that computes prompts to one that decodes, by a real KV store."""
    directory = new_directory()
    try:
        store = store_in(directory, 64 << 20, Clock())
        prefill, decode = (
            RealEngine(name, bench.model, store, directory, kv_memory_bytes=MEMORY) for name in ("prefill", "decode")
        )
        tokens = prompt(50, 7)
        prefill.send(asked("r", tokens, decode_on=EngineId("decode")))
        prefill.run()
        for request in prefill.handed:
            decode.send(request)
        decode.run()
        said = prefill.tokens["r"] + decode.tokens["r"]
        assert (said, prefill.computed, decode.computed) == (right(bench.model, tokens, said), 50, len(said) - 1)
    finally:
        remove(directory)


def guided(bench: Bench) -> None:
    """Of the tokens that the grammar allows, those that the library holds to be the most likely."""
    engine, tokens = GuidedEngine(bench.plain), prompt(20, 8)
    sequence = engine.add(tokens, Grammar("regex", "[a-z]{4}[0-9]{2}"), GREEDY)
    engine.run()
    tokenizer = letters(VOCABULARY)
    small, digits = (
        [tokenizer.token_to_id(letter) for letter in allowed]
        for allowed in ("abcdefghijklmnopqrstuvwxyz", "0123456789")
    )
    expected: list[int] = []
    for allowed in (small, small, small, small, digits, digits):
        logits = bench.model.logits(tokens + expected)[-1]
        expected.append(allowed[int(logits[allowed].argmax())])
    assert sequence.output == [*expected, tokenizer.token_to_id("</s>")]


def lora(bench: Bench) -> None:
    """Beside the model alone, in one batch."""
    folder, modules = bench.folder / "adapter", ADAPTED.get(bench.model.family) or linear_layers(bench.model)
    write = peft_adapter if bench.model.family == "GPT2" else write_adapter  # whose matrices lie transposed
    adapted = write(bench.model, folder, modules=modules, r=8)
    backend = bench.backend(loras=LoraSettings(((ModelName("a"), adapted.path),), 1, 8))
    driver, tokens = Driver(backend, budget=90), prompt(40, 9)
    bench.recorded.clear()
    drawn = [driver.add(tokens, OUTPUT, lora=each) for each in (None, backend.card.loras[0].id)]
    driver.run()
    logits = torch.stack(bench.recorded[-OUTPUT:], dim=1)
    for sequence, model, rows in zip(drawn, (bench.model, adapted), logits, strict=True):
        expected = model.logits(sequence.tokens)[len(tokens) - 1 : -1]
        assert rows.sub(expected).abs().max() < 1e-4 * expected.abs().max()
    assert (logits[0, 0] - logits[1, 0]).abs().max() > 0.1, "an adapter that was left out would agree, too"


def int8(bench: Bench) -> None:
    backend, reference = bench.backend(quantization="int8"), copy.deepcopy(bench.model.reference)
    rounded(reference, "int8", experts=bench.native)
    driver, tokens = Driver(backend, budget=29), prompt(70, 10)
    bench.recorded.clear()
    sequence = driver.add(tokens, OUTPUT)
    driver.run()
    expected = TinyModel("rounded", bench.folder, reference).logits(sequence.tokens)[len(tokens) - 1 : -1]
    assert torch.cat(bench.recorded[-OUTPUT:]).sub(expected).abs().max() < 1e-3
    exact = bench.model.logits(sequence.tokens)[len(tokens) - 1 : -1]
    assert (expected - exact).abs().max() > 1e-2, "weights that were not rounded would agree, too"


CHECKS: dict[ModelFeature, Callable[[Bench], None]] = {
    "greedy": greedy,
    "mixed batch": mixed_batch,
    "TP 2": tensor_parallel,
    "PP 2": pipeline_parallel,
    "prefix cache": prefix_cache,
    "prefill/decode": handed_over,
    "guided": guided,
    "LoRA": lora,
    "int8": int8,
}


class FirstOfTwo:
    """A place among ranks that nobody joins: what cannot be split is found before."""

    rank, world_size = 0, 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module", autouse=True)
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All rows have one vocabulary: the processes that compile and follow grammars are started once."""
    folder = tmp_path_factory.mktemp("letters")
    letters(VOCABULARY).save(str(folder / "tokenizer.json"))
    with grammar_library(folder, VOCABULARY, (2,)) as library, pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch_backend, "GrammarLibrary", lambda _settings: library)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, ranks: RankProcesses) -> Callable[[Architecture], Bench]:
    """A row's bench; that of the row before is dropped."""

    @lru_cache(1)
    def make(architecture: Architecture) -> Bench:
        folder = tmp_path_factory.mktemp("row")
        return Bench(make_row(architecture, folder / "model"), architecture.native, ranks, folder)

    return make


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # what PEFT asks transformers
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell(cell: Cell, made: Callable[[Architecture], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = made(cell.architecture)
    bench.recorded = record_logits(monkeypatch)
    complaint = REFUSED.get((cell.architecture.name, cell.feature))
    if complaint is None:
        CHECKS[cell.feature](bench)
        bench.plain.reset()
        return
    adapted = LoraSettings(((ModelName("a"), bench.folder),), 1, 8)
    asked_for = {"TP 2": {"communicator": FirstOfTwo()}, "LoRA": {"loras": adapted}}
    with pytest.raises(ModelError, match=re.escape(complaint)):
        bench.backend(**asked_for[cell.feature])
