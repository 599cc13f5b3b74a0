"""LoRA adapters on a backend: what `transformers` generates with each of them merged into its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from services.scheduler.core.limits import EngineLimits
from services.worker.executor.host_runner import HostRunner
from services.worker.models.lora.slots import LoraSettings
from services.worker.ops.interface import OpsName, OpsUnavailable
from services.worker.speculation.settings import read_speculation
from shared.ids import Incarnation, LoraId, ModelName, SequenceId
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from tests.support.models.library_models import library_model
from tests.support.models.tiny_adapters import ALL_LINEAR, linear_layers, peft_adapter, write_adapter
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.launched_rank import DriverAhead, launching
from tests.support.worker.plan_driver import GREEDY, Driver
from tests.support.worker.rank_processes import RankProcesses, rank_processes
from tests.support.worker.tiny_backend import tiny_backend

FAMILIES = ("llama", "qwen3", "gemma2")
BASE = "base"


class Served(NamedTuple):
    """A backend with adapters, and the references: the model's, and those of each adapter merged into it."""

    backend: HostRunner
    references: dict[str, TinyModel]
    ids: dict[str, LoraId]

    def lora(self, name: str) -> LoraId | None:
        return self.ids.get(name)

    def logprobs(self, names: list[str]) -> list[float]:
        """Of what the first of these adapters draws while the others draw beside it."""
        driver = Driver(self.backend)
        sequences = [
            driver.add(prompt(number), 8, lora=self.lora(name), sampling=replace(GREEDY, logprobs=0))
            for number, name in enumerate(names)
        ]
        driver.run()
        self.backend.reset()
        return [one.logprob for one in sequences[0].logprobs]


def prompt(seed: int, length: int = 20) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, VOCABULARY) for _ in range(length)]


def adapters(model: TinyModel, folder: Path) -> dict[str, TinyModel]:
    """Of several ranks, modules and scales; one of embedding and head where these are apart."""
    tied = model.reference.config.tie_word_embeddings
    made = {
        "all": write_adapter(model, folder / "all", seed=1),
        "query-value": write_adapter(model, folder / "query-value", modules=("q_proj", "v_proj"), r=16, seed=2),
        "rank-stable": write_adapter(model, folder / "rank-stable", r=32, alpha=4.0, rslora=True, seed=3),
        "narrow": write_adapter(model, folder / "narrow", modules=("down_proj", "up_proj"), r=1, alpha=8.0, seed=4),
    }
    if not tied:
        words = (*ALL_LINEAR, "embed_tokens", "lm_head")
        made["words"] = write_adapter(model, folder / "words", modules=words, seed=5)
    return made


def serve(
    family: str,
    folder: Path,
    *,
    made: Callable[[TinyModel, Path], dict[str, TinyModel]] = adapters,
    max_loras: int = 5,
    max_rank: int = 32,
    ops: OpsName = "torch",
    **different: object,
) -> Served:
    model = make_model(family, folder / family)
    references = made(model, folder)
    folders = tuple((ModelName(name), each.path) for name, each in references.items())
    try:
        settings = LoraSettings(folders, max_loras, max_rank)
        backend = tiny_backend(model.path, ops=ops, dtype="float32", loras=settings, **different)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    return Served(backend, {BASE: model, **references}, {card.name: card.id for card in backend.card.loras})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, OpsName], Served]:
    return cache(lambda family, ops: serve(family, tmp_path_factory.mktemp(f"{family}-{ops}"), ops=ops))


@pytest.mark.features("LoRA", "chunked prefill")
@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_mixed_in_one_batch_give_what_merged_weights_give(
    family: str, ops: OpsName, served: Callable[[str, OpsName], Served]
) -> None:
    each = served(family, ops)
    driver = Driver(each.backend, budget=33)  # prompts are cut into chunks
    wanted = [(name, prompt(seed)) for seed in (1, 2) for name in each.references]
    sequences = [driver.add(tokens, 12, lora=each.lora(name)) for name, tokens in wanted]
    driver.run()
    for (name, tokens), sequence in zip(wanted, sequences, strict=True):
        assert sequence.output == each.references[name].greedy(tokens, 12), name
    each.backend.reset()


@pytest.mark.features("LoRA", "logprobs")
def test_an_adapter_alone_gives_the_same_bits_as_in_a_mixed_batch(served: Callable[[str, OpsName], Served]) -> None:
    each = served("llama", "native")

    assert each.logprobs(["all"]) == each.logprobs(["all", BASE, "rank-stable", "all", "words", "narrow"])


def peft_adapters(model: TinyModel, folder: Path) -> dict[str, TinyModel]:
    """Of ranks from 8 to 256, and one with embedding and head."""
    made = {f"rank-{rank}": peft_adapter(model, folder / f"rank-{rank}", r=rank) for rank in (8, 64, 256)}
    words = (*ALL_LINEAR, "embed_tokens", "lm_head")
    return {**made, "words": peft_adapter(model, folder / "words", r=8, modules=words)}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # what PEFT asks transformers
@pytest.mark.parametrize("ops", ["torch", "native"])
def test_what_peft_writes_gives_what_peft_merges(ops: OpsName, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="of the extra dev")
    each = serve("llama", tmp_path, made=peft_adapters, max_loras=4, max_rank=256, ops=ops)
    driver = Driver(each.backend)
    sequences = {name: driver.add(prompt(13), 12, lora=each.lora(name)) for name in each.references}
    driver.run()
    for name, sequence in sequences.items():
        assert sequence.output == each.references[name].greedy(prompt(13), 12), name
    assert len({tuple(sequence.output) for sequence in sequences.values()}) == len(sequences)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # what PEFT asks transformers
@pytest.mark.parametrize(
    ("architecture", "modules", "ops"),
    [
        ("Cohere2", ALL_LINEAR, "native"),
        ("GPT2", ("c_attn", "c_proj", "c_fc"), "native"),
        ("Starcoder2", ("q_proj", "v_proj", "c_fc"), "torch"),
    ],
)
def test_adapters_of_models_that_transformers_computes(
    architecture: str, modules: tuple[str, ...], ops: OpsName, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="of the extra dev")
    model = library_model(architecture, tmp_path / "model")
    made = {f"rank-{r}": peft_adapter(model, tmp_path / f"rank-{r}", r=r, modules=modules) for r in (4, 24)}
    folders = tuple((ModelName(name), each.path) for name, each in made.items())
    backend = tiny_backend(model.path, ops=ops, dtype="float32", loras=LoraSettings(folders, 2, 24))
    ids = {card.name: card.id for card in backend.card.loras}
    driver = Driver(backend, budget=33)
    references = {BASE: model, **made}
    sequences = {name: driver.add(prompt(14, 40), 10, lora=ids.get(name)) for name in references}
    driver.run()
    for name, sequence in sequences.items():
        assert sequence.output == references[name].greedy(prompt(14, 40), 10), name
    assert len({tuple(sequence.output) for sequence in sequences.values()}) == 3


def test_an_adapter_of_latents_alone_gives_the_same_bits_as_in_a_mixed_batch(tmp_path: Path) -> None:
    each = serve("deepseek-v3", tmp_path, made=of_mixers, max_loras=2, ops="native")

    assert each.logprobs(["around"]) == each.logprobs(["around", BASE, "every", "around", "every"])


def of_mixers(model: TinyModel, folder: Path) -> dict[str, TinyModel]:
    """Of every linear layer; and of those around states alone, or of what makes keys and values of latents."""
    every = linear_layers(model)
    of_states = ("in_proj", "out_proj", "kv_b_proj", "g_proj", "qkv_proj", "output_gate", "f_", "g_b")
    around = tuple(name for name in every if name.startswith(of_states))
    return {
        "every": write_adapter(model, folder / "every", modules=every, seed=1, strength=0.1),
        "around": write_adapter(model, folder / "around", modules=around, r=4, seed=2),
    }


@pytest.mark.features("LoRA", "states", "chunked prefill", "preemption")
@pytest.mark.parametrize(
    ("family", "ops"),
    [
        ("deepseek-v2", "torch"),
        ("deepseek-v3", "native"),
        ("mamba2", "native"),
        ("bamba", "torch"),
        ("granite-hybrid-moe", "native"),
        ("qwen3-next", "native"),
        ("qwen3.5", "torch"),
        ("qwen3.5-moe", "native"),
        pytest.param("olmo-hybrid", "native", marks=pytest.mark.extras),
        pytest.param("kimi-linear", "native", marks=pytest.mark.extras),
        pytest.param("ling-3", "native", marks=pytest.mark.extras),
        pytest.param("minimax", "native", marks=pytest.mark.extras),
        pytest.param("zamba2", "native", marks=pytest.mark.extras),
    ],
)
def test_adapters_of_states_and_of_latent_attention(family: str, ops: OpsName, tmp_path: Path) -> None:
    """Projections of states, gated attention, joined matrices, the expert that every row goes through, and matrices on
    the other side of attention."""
    each = serve(family, tmp_path, made=of_mixers, max_loras=2, ops=ops)
    driver = Driver(each.backend, budget=33)
    sequences = {name: driver.add(prompt(3, 40), 12, lora=each.lora(name)) for name in each.references}
    while len(sequences["every"].output) < 3:
        driver.step()
    driver.preempt(sequences["every"])
    driver.run()
    for name, sequence in sequences.items():
        assert sequence.output == each.references[name].greedy(prompt(3, 40), 12), name
    assert len({tuple(sequence.output) for sequence in sequences.values()}) == len(sequences)


def test_more_adapters_than_slots_take_turns(tmp_path: Path) -> None:
    each = serve("llama", tmp_path, max_loras=2)
    slots = each.backend.rank.loras
    assert slots is not None
    driver = Driver(each.backend)
    for name in ("all", "query-value", "narrow", "all"):
        sequence = driver.add(prompt(7), 6, lora=each.lora(name))
        driver.run()
        assert sequence.output == each.references[name].greedy(prompt(7), 6)
        assert slots.loaded[-1] == each.lora(name)
        assert len(slots.loaded) <= 2
    for name in ("all", "query-value", "narrow"):
        driver.add(prompt(8), 4, lora=each.lora(name))
    with pytest.raises(ValueError, match="a step has 3 adapters; max_loras is 2"):
        driver.run()


def test_one_that_is_gone_is_forgotten_while_others_decode_but_in_no_step_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = serve("llama", tmp_path, made=lambda model, to: {"gone": write_adapter(model, to / "gone")}, ops="native")
    slots, gone = each.backend.adapters, each.lora("gone")
    assert slots is not None
    assert gone is not None

    def plan(step: int, count: int, **others: Any) -> StepPlan:
        work = (SequenceWork(SequenceId(0), count, b"" if step else pack([0]), True),)
        return StepPlan(epoch=Incarnation(1), step=step, work=work, **others)

    new = NewSequence(
        sequence=SequenceId(0), tokens=pack(prompt(1, 4)), prompt_length=4, computed=0, blocks=b"", sampling=GREEDY
    )
    with each.backend.compute_context():
        under_way = each.backend.prepare(plan(0, 4, new=(new,)))
        monkeypatch.setattr(each.backend, "wait", under_way.launch)
        slots.remove(ModelName("gone"))
        step = each.backend.prepare(plan(1, 1, forget_loras=(gone,)))
        assert under_way.computed
        assert gone not in slots.numbers
        step.launch()
    assert len(step.result().sampled) == 1


@pytest.mark.features("LoRA", "preemption", "prefix cache")
def test_a_preempted_sequence_and_one_behind_a_cached_prefix_keep_their_adapter(
    served: Callable[[str, OpsName], Served],
) -> None:
    each = served("llama", "native")
    driver, tokens = Driver(each.backend), prompt(3, 40)
    first = driver.add(tokens, 10, lora=each.lora("all"))
    other = driver.add(tokens, 10, lora=each.lora("query-value"))
    for _ in range(4):
        driver.step()
    driver.preempt(first)
    behind = driver.add(tokens, 10, lora=each.lora("query-value"))
    assert driver.share_prefix(behind, other) == 32
    driver.run()
    assert first.output == each.references["all"].greedy(tokens, 10)
    assert other.output == behind.output == each.references["query-value"].greedy(tokens, 10)
    each.backend.reset()


@pytest.mark.features("LoRA", "speculative")
def test_drafts_of_the_base_model_are_verified_with_the_adapter(tmp_path: Path) -> None:
    speculation = read_speculation('{"method": "ngram", "num_speculative_tokens": 3}')
    each = serve("llama", tmp_path, ops="native", speculation=speculation)
    driver = Driver(each.backend, speculate=3)
    tokens = prompt(4, 12) * 3
    sequences = {name: driver.add(tokens, 24, lora=each.lora(name)) for name in each.references}
    driver.run()
    assert driver.drafted > 0
    for name, sequence in sequences.items():
        assert sequence.output == each.references[name].greedy(tokens, 24), name


def test_steps_launched_ahead_have_their_adapters(served: Callable[[str, OpsName], Served]) -> None:
    each = served("llama", "torch")
    driver = DriverAhead(launching(each.backend), budget=33)
    sequences = {name: driver.add(prompt(9), 10, lora=each.lora(name)) for name in each.references}
    driver.run()
    for name, sequence in sequences.items():
        assert sequence.output == each.references[name].greedy(prompt(9), 10), name
    each.backend.reset()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.features("LoRA", "tensor parallel", "prefix cache", "chunked prefill")
def test_two_ranks_under_a_scheduler_with_fewer_slots_than_adapters(ranks: RankProcesses, tmp_path: Path) -> None:
    """Those without a slot wait, those of the model alone do not; and no block is shared between adapters."""
    model = make_model("llama", tmp_path / "model")
    references = {"": model, **adapters(model, tmp_path)}
    folders = tuple((name, str(each.path)) for name, each in references.items() if name)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=6)
    engine = ranks.serve(model.path, tp=2, ops="native", limits=limits, loras=folders, max_loras=2)
    tokens = prompt(11, 40)
    for attempt in range(2):
        asked = {name: engine.ask(tokens, 20, lora=name) for name in references}
        engine.run()
        for name, request in asked.items():
            assert request.tokens == references[name].greedy(tokens, 20), name
            if attempt == 0:
                assert request.cached == 0, name
    report = engine.core.report()
    assert report is not None
    assert len(report.loras) == 2
    again = engine.ask(tokens, 4, lora="words")
    engine.run()
    assert again.cached == 32


@pytest.mark.features("LoRA", "pipeline parallel")
def test_two_stages_have_their_layers_of_each_adapter(ranks: RankProcesses, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    references = {"": model, **adapters(model, tmp_path)}
    folders = tuple((name, str(each.path)) for name, each in references.items() if name)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=6)
    engine = ranks.serve(model.path, tp=1, stages=2, ops="torch", limits=limits, loras=folders, max_loras=5)
    asked = {name: engine.ask(prompt(12), 10, lora=name) for name in references}
    engine.run()
    for name, request in asked.items():
        assert request.tokens == references[name].greedy(prompt(12), 10), name


@pytest.mark.features("LoRA", "states", "tensor parallel", "pipeline parallel", "prefix cache")
@pytest.mark.parametrize(
    ("family", "tp", "stages"),
    [("granite-hybrid-moe", 2, 1), ("qwen3.5", 1, 2), ("qwen3-next", 2, 1), ("deepseek-v3", 2, 1)],
)
def test_ranks_have_their_rows_and_layers_of_each_adapter(
    ranks: RankProcesses, tmp_path: Path, family: str, tp: int, stages: int
) -> None:
    """A prompt that is asked again goes on behind a checkpoint of its own adapter's states, and of no other's."""
    heads = {"linear_num_key_heads": 2} if family == "qwen3-next" else {}
    model = make_model(family, tmp_path / "model", **heads)
    references = {"": model, **of_mixers(model, tmp_path)}
    folders = tuple((name, str(each.path)) for name, each in references.items() if name)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=6)
    engine = ranks.serve(
        model.path, tp=tp, stages=stages, ops="native", limits=limits, loras=folders, kv_memory=16 << 20
    )
    for cached in (0, 32):
        asked = {name: engine.ask(prompt(12, 40), 10, lora=name) for name in references}
        engine.run()
        for name, request in asked.items():
            assert request.tokens == references[name].greedy(prompt(12, 40), 10), name
            assert request.cached == cached, name


@pytest.mark.features("LoRA", "tensor parallel", "pipeline parallel")
@pytest.mark.parametrize(
    ("architecture", "tp", "stages"), [("Starcoder2", 2, 1), ("Phi3", 2, 1), ("Falcon", 2, 1), ("Olmo2", 1, 2)]
)
def test_ranks_of_what_transformers_computes_have_their_share_of_each_adapter(
    ranks: RankProcesses, tmp_path: Path, architecture: str, tp: int, stages: int
) -> None:
    """Some of a layer's outputs or inputs; layers of one stage, and the head of the last."""
    model = library_model(architecture, tmp_path / "model")
    every = (*linear_layers(model), "lm_head") if architecture == "Olmo2" else linear_layers(model)
    made = {name: write_adapter(model, tmp_path / name, modules=every, r=r, seed=r) for name, r in (("a", 4), ("b", 9))}
    folders = tuple((name, str(each.path)) for name, each in made.items())
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=6)
    engine = ranks.serve(model.path, tp=tp, stages=stages, ops="native", limits=limits, loras=folders)
    references = {"": model, **made}
    asked = {name: engine.ask(prompt(12, 40), 10, lora=name) for name in references}
    engine.run()
    for name, request in asked.items():
        assert request.tokens == references[name].greedy(prompt(12, 40), 10), name
    assert len({tuple(request.tokens) for request in asked.values()}) == len(asked)
