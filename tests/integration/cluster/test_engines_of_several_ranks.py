"""Engines of several real ranks under the real scheduler's core say what `transformers` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from services.scheduler.core.limits import EngineLimits
from services.worker.models.expert_parallel.settings import ExpertSettings
from services.worker.ops.interface import OpsName
from services.worker.ops.quantized import Code
from services.worker.speculation.settings import Method, SpeculationSettings
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from tests.support.models.embedded_prompts import greedy_of_rows, prompt_embeds, random_rows
from tests.support.models.library_models import library_model
from tests.support.models.rounded_models import SIZES, assert_same_steps, rounded
from tests.support.models.tiny_drafters import make_eagle, make_eagle3, make_medusa
from tests.support.models.tiny_gemma import make_gemma_model
from tests.support.models.tiny_glm_vl import make_glm_model
from tests.support.models.tiny_images import picture
from tests.support.models.tiny_models import FAMILIES, STATE_FAMILIES, TinyModel, make_model
from tests.support.models.tiny_qwen_vl import make_qwen_model
from tests.support.worker.image_chats import ImageChat
from tests.support.worker.plan_driver import GREEDY
from tests.support.worker.rank_processes import EngineOfRanks, RankProcesses, rank_processes

OUTPUT = 6
OUTPUT_OF_DRAFTS = 12
WORDS = 159
"""Divide by neither 2 nor 4: one rank's share of embedding and head is padded."""
SEEDED = SamplingOptions(seed=77, temperature=0.8, top_p=0.9)
SILENT = 1.0
"""Seconds in which a rank that computes would have answered."""
MOVING = ExpertSettings(parallel=True, balanced=True, redundant=2, window=3, interval=2)
PREEMPTING = 10
"""Blocks in which the requests below do not fit together."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(4, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """Family and KV heads → a checkpoint of three layers, made once."""

    @cache
    def make(family: str, kv_heads: int = 2, **more: int) -> TinyModel:
        folder = tmp_path_factory.mktemp(family)
        return make_model(family, folder, vocab_size=WORDS, num_key_value_heads=kv_heads, **more)

    return make


def prompt(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, WORDS - 1) for _ in range(length)]


COMMON = prompt(40, 1)
PROMPTS = [COMMON + prompt(30, 2), prompt(5, 3), prompt(33, 4), COMMON + prompt(3, 5), prompt(16, 6)]
"""Longer than a step's tokens; beginning alike; ending at a block's edge."""


def say_what_the_reference_says(engine: EngineOfRanks, model: TinyModel) -> None:
    """Chunks, a shared prefix that comes once it is computed, and a mixed batch."""
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS[:3]]
    while not requests[0].tokens:
        engine.step()
    requests += [engine.ask(tokens, OUTPUT) for tokens in PROMPTS[3:]]
    engine.run()
    assert [request.tokens for request in requests] == [model.greedy(tokens, OUTPUT) for tokens in PROMPTS]
    size = engine.serving[0].card.block_size
    assert requests[3].cached >= len(COMMON) // size * size or engine.serving[0].state_bytes


@pytest.mark.parametrize(
    ("family", "kv_heads", "tp", "stages", "layers", "ops", "run_ahead", "block_size"),
    [
        ("llama-biased-tied", 1, 4, 1, (), "torch", 1, 16),
        ("qwen3", 2, 4, 1, (), "native", 0, 32),
        ("qwen2", 2, 1, 2, (1, 2), "torch", 0, 16),
        ("gemma2", 2, 1, 3, (), "native", 2, 64),
        ("mistral", 1, 2, 2, (), "native", 1, 32),
        ("gemma3", 2, 2, 2, (1, 2), "torch", 2, 64),
        ("mixtral", 1, 4, 1, (), "torch", 0, 16),
        ("qwen2-moe", 2, 1, 3, (), "torch", 2, 16),
        ("qwen3-moe", 2, 2, 2, (1, 2), "native", 1, 32),
    ],
)
def test_greedy_output_is_the_reference_s(
    ranks: RankProcesses,
    models: Callable[..., TinyModel],
    family: str,
    kv_heads: int,
    tp: int,
    stages: int,
    layers: tuple[int, ...],
    ops: OpsName,
    run_ahead: int,
    block_size: int,
) -> None:
    model = models(family, kv_heads)
    limits = EngineLimits(run_ahead=run_ahead, plan_late=False, max_batch_tokens=48, max_running=4)
    engine = ranks.serve(model.path, tp=tp, stages=stages, layers=layers, ops=ops, limits=limits, block_size=block_size)
    say_what_the_reference_says(engine, model)


@pytest.mark.features("tensor parallel", "pipeline parallel", "prefix cache", "chunked prefill")
@pytest.mark.parametrize(("architecture", "tp", "stages"), [("Cohere2", 2, 2), ("Bloom", 1, 3), ("Glm4Moe", 2, 2)])
def test_what_the_library_computes_is_split_into_stages(
    ranks: RankProcesses, tmp_path: Path, architecture: str, tp: int, stages: int
) -> None:
    """A tied head on the last stage; windows; outputs of layers in tuples, and heads' slopes; experts of which each
    rank has some columns. Others are `extras`: tests/integration/worker/test_library_stages.py and
    test_library_ranks.py."""
    model = library_model(architecture, tmp_path, vocab_size=WORDS)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    say_what_the_reference_says(ranks.serve(model.path, tp=tp, stages=stages, ops="native", limits=limits), model)


@pytest.mark.features("expert parallel", "tensor parallel", "pipeline parallel", "prefix cache", "chunked prefill")
@pytest.mark.parametrize(("family", "tp", "stages"), [("qwen3-moe", 4, 1), ("deepseek-v3", 4, 1), ("qwen2-moe", 2, 2)])
def test_ranks_may_have_unlike_numbers_of_experts(
    ranks: RankProcesses, models: Callable[..., TinyModel], family: str, tp: int, stages: int
) -> None:
    """The first model has six experts: of four ranks two have two of them, and two one."""
    model = models(family, 4 if family == "deepseek-v3" else 2)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    parallel = ExpertSettings(parallel=True)
    engine = ranks.serve(model.path, tp=tp, stages=stages, ops="native", limits=limits, experts=parallel)
    say_what_the_reference_says(engine, model)


@pytest.mark.features("sequence parallel", "tensor parallel", "expert parallel", "chunked prefill", "prefix cache")
@pytest.mark.features("sequence parallel", "states")
@pytest.mark.features("sequence parallel", "hybrid KV cache")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("gemma2", {"tp": 2}),
        ("qwen3-moe", {"tp": 4, "experts": ExpertSettings(parallel=True)}),
        ("granite-hybrid-moe", {"tp": 2}),
        ("falcon-h1", {"tp": 2}),
        pytest.param("zamba2", {"tp": 2}, marks=pytest.mark.extras),
        pytest.param("zamba2", {"tp": 2, "stages": 2}, marks=pytest.mark.extras),
        ("deepseek-v3", {"tp": 2, "experts": MOVING}),
        ("mixtral", {"tp": 2, "stages": 2, "hybrid": "on"}),
    ],
)
def test_ranks_that_share_rows_say_the_same(
    ranks: RankProcesses, models: Callable[..., TinyModel], family: str, how: dict[str, Any]
) -> None:
    """Steps of 1 to 48 rows, which seldom divide over ranks, or are fewer. Where experts stay, to the last bit what all
    say that have all rows, whether all steps are shared or only larger ones."""
    heads = 4 if family == "zamba2" else 2  # whose adapters are of as many keys as queries
    model = models(family, heads, **({"sliding_window": 24} if "hybrid" in how else {}))
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    logits = []
    for shared_rows in (1,) if "hybrid" in how or how.get("experts") is MOVING else (1, 4, None):
        engine = ranks.serve(model.path, ops="native", limits=limits, shared_rows=shared_rows, **how)
        say_what_the_reference_says(engine, model)
        logits.append(engine.logits)
        if how.get("experts") is MOVING:
            asked = engine.run_until_experts_move(PROMPTS, OUTPUT)
            assert [request.tokens for _, request in asked] == [model.greedy(tokens, OUTPUT) for tokens, _ in asked]
            say_what_the_reference_says(engine, model)
    assert all(each == logits[0] for each in logits)


@pytest.mark.features("context parallel", "chunked prefill", "prefix cache")
@pytest.mark.features("context parallel", "hybrid KV cache")
@pytest.mark.parametrize(
    ("family", "how"),
    [("llama", {"block_size": 32}), ("mixtral", {"hybrid": "on"}), ("deepseek-v3", {})],
)
def test_ranks_that_share_prompts_say_the_same(
    ranks: RankProcesses, models: Callable[..., TinyModel], family: str, how: dict[str, Any]
) -> None:
    """Pieces that end within blocks; steps of few rows, which every rank computes; and those of more ranks than rows.
    To the last bit what one rank says, but where sums over latents depend on the rows beside."""
    model = models(family, **({"sliding_window": 24} if "hybrid" in how else {}))
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    logits = []
    for count, context_rows in ((1, None), (2, 1), (4, 6)):
        engine = ranks.serve(model.path, ops="native", limits=limits, tp=count, context_rows=context_rows, **how)
        say_what_the_reference_says(engine, model)
        logits.append(engine.logits)
    if family != "deepseek-v3":
        assert all(each == logits[0] for each in logits)


@pytest.mark.features("context parallel", "chunked prefill", "prefix cache")
def test_ranks_that_share_prompts_have_the_same_bits_in_bfloat16(
    ranks: RankProcesses, models: Callable[..., TinyModel]
) -> None:
    """Products and experts of other kernels than in float32; keys and values go between ranks as they are kept."""
    model = models("mixtral", 2)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    logits = []
    for count, context_rows in ((1, None), (2, 1), (4, 6)):
        how: dict[str, Any] = {"tp": count, "context_rows": context_rows, "dtype": "bfloat16"}
        engine = ranks.serve(model.path, ops="native", limits=limits, **how)
        requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS]
        engine.run()
        assert all(len(request.tokens) == OUTPUT for request in requests)
        logits.append(engine.logits)
    assert logits[1] == logits[0] == logits[2]


@pytest.mark.features("tensor parallel", "preemption")
@pytest.mark.parametrize("tp", [1, 2])
def test_launched_ahead_of_what_is_known_they_say_what_they_would_have_said(
    ranks: RankProcesses, models: Callable[..., TinyModel], tp: int
) -> None:
    """Chunks, prefixes, preemption and seeds: the scheduler plans, and ranks begin, steps ahead of their tokens."""
    model = models("llama", 2)
    alone = ranks.serve(model.path)
    expected = [alone.ask(tokens, 40, SEEDED) for tokens in PROMPTS]
    alone.run()
    limits = EngineLimits(run_ahead=2, plan_late=False, max_batch_tokens=48, max_running=4)
    block = alone.serving[0].block_bytes
    engine = ranks.serve(model.path, tp=tp, limits=limits, kv_memory=PREEMPTING * block // tp, launched=True)
    requests = [engine.ask(tokens, 40, SEEDED) for tokens in PROMPTS]
    engine.run()
    assert engine.preemptions > 0
    assert engine.most_in_flight > 1
    assert [request.tokens for request in requests] == [request.tokens for request in expected]
    say_what_the_reference_says(ranks.serve(model.path, tp=tp, limits=limits, launched=True), model)


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize(
    ("tp", "stages", "layers"),
    [(2, 1, ()), (4, 1, ()), (1, 2, ()), (1, 2, (1, 2)), (1, 3, ()), (2, 2, ()), (2, 2, (1, 2))],
)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in STATE_FAMILIES])
def test_every_family_in_every_shape(
    ranks: RankProcesses,
    models: Callable[..., TinyModel],
    family: str,
    tp: int,
    stages: int,
    layers: tuple[int, ...],
    run_ahead: int,
) -> None:
    if family in ("glm-5", "hy4") and (stages == 3 or layers):
        pytest.skip("a stage would begin with a layer that takes the choice of the one before it, which is refused")
    if family == "mistral-large-4" and (stages == 3 or layers):
        pytest.skip("it has six layers, of which the latter half attends to none of the former's latents")
    if family == "deepseek-v4" and (tp == 4 or layers):
        pytest.skip("it has two groups of heads, and four layers")
    model = models(family)
    limits = EngineLimits(run_ahead=run_ahead, plan_late=False, max_batch_tokens=48, max_running=4)
    engine = ranks.serve(model.path, tp=tp, stages=stages, layers=layers, ops="auto", limits=limits)
    say_what_the_reference_says(engine, model)


@pytest.mark.parametrize(("tp", "stages"), [(4, 1), (2, 2)])
def test_logits_are_the_reference_s(
    ranks: RankProcesses, models: Callable[..., TinyModel], tp: int, stages: int
) -> None:
    model = models("llama", 2)
    engine = ranks.serve(model.path, tp=tp, stages=stages)
    request = engine.ask(PROMPTS[0], OUTPUT)
    engine.run()
    expected = model.logits(PROMPTS[0] + request.tokens)[len(PROMPTS[0]) - 1 : -1]
    assert torch.tensor(engine.logits).sub(expected).abs().max() < 1e-3
    assert expected.std() > 0.3, "a reference this flat would agree with anything"


@pytest.mark.parametrize(
    ("code", "tp", "stages", "ops"),
    [("int8", 2, 2, "native"), ("int4", 2, 1, "native"), ("int4", 4, 1, "torch"), ("fp8", 4, 1, "native")],
)
def test_ranks_share_the_weights_that_one_would_have_rounded(
    ranks: RankProcesses, tmp_path: Path, code: Code, tp: int, stages: int, ops: OpsName
) -> None:
    """Shares of int4's groups: of 32 inputs on two ranks; of 16 on four, which are numbers."""
    model = make_model("qwen2", tmp_path, **SIZES)
    exact = model.logits(PROMPTS[0])
    rounded(model.reference, code)
    engine = ranks.serve(model.path, tp=tp, stages=stages, ops=ops, quantization=code)
    request = engine.ask(PROMPTS[0], OUTPUT)
    engine.run()
    expected = model.logits(PROMPTS[0] + request.tokens)[len(PROMPTS[0]) - 1 : -1]
    assert torch.tensor(engine.logits).sub(expected).abs().max() < 1e-3
    assert (model.logits(PROMPTS[0]) - exact).abs().max() > 1e-2, "weights that were not rounded would agree, too"


@pytest.mark.features("quantization", "tensor parallel", "pipeline parallel")
def test_each_rank_rounds_its_own_share_of_activations(ranks: RankProcesses, tmp_path: Path) -> None:
    """By the greatest of its share, as vLLM's do: no rank has to ask the others."""
    model = make_model("qwen2", tmp_path, **SIZES)
    rounded(model.reference, "int8")
    weights_alone = model.logits(PROMPTS[0])
    rounded(model.reference, "w8a8_int8", ranks=2)
    assert (model.logits(PROMPTS[0]) - weights_alone).abs().median() > 1e-2, "such a reference would agree with int8"
    engine = ranks.serve(model.path, tp=2, stages=2, ops="native", quantization="w8a8_int8")
    prompts = [PROMPTS[0][first : first + 10] for first in range(0, 15, 3)]
    for prompt in prompts:
        engine.ask(prompt, 1)
        engine.run()
    found = [torch.tensor(logits) for logits in engine.logits]
    assert_same_steps(found, [model.logits(prompt)[-1] for prompt in prompts])


@pytest.mark.features(
    "prompt embeds",
    "tensor parallel",
    "pipeline parallel",
    "preemption",
    "prefix cache",
    "chunked prefill",
    "speculative",
)
@pytest.mark.parametrize(("tp", "stages", "drafts"), [(1, 1, 3), (2, 2, 0)])
def test_rows_of_clients_are_what_the_first_stage_begins_with(
    ranks: RankProcesses, models: Callable[..., TinyModel], tp: int, stages: int, drafts: int
) -> None:
    """Chunks, preemption, blocks that are found by what the rows are, and tokens beside them whose ids are the same."""
    model = models("llama", 2)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    alone = ranks.serve(model.path).serving[0].block_bytes
    engine = ranks.serve(
        model.path,
        tp=tp,
        stages=stages,
        limits=limits,
        kv_memory=PREEMPTING * alone // (tp * stages),
        drafts=drafts,
        prompt_embeds=True,
        shared_rows=1 if tp > 1 else None,
    )
    common = random_rows(model.reference, 33, 1)
    rows = [torch.cat((common, random_rows(model.reference, count, count))) for count in (4, 20)]
    rows += [random_rows(model.reference, 16, 3)]
    requests = [engine.ask([0] * len(each), 40, embeds=prompt_embeds(each)) for each in rows]
    plain = engine.ask([0] * 37, 40)
    engine.run()
    assert engine.preemptions > 0
    later = []
    for each in (rows[0], rows[0], rows[1]):
        later.append(engine.ask([0] * len(each), 40, embeds=prompt_embeds(each)))
        engine.run()
    expected = [greedy_of_rows(model.reference, each, 40) for each in rows]
    assert [each.tokens for each in (*requests, *later)] == [*expected, expected[0], *expected[:2]]
    assert plain.tokens == model.greedy([0] * 37, 40)
    assert (plain.cached, later[1].cached, later[2].cached) == (0, 32, 32)


@pytest.mark.features(
    "prompt embeds",
    "images",
    "tensor parallel",
    "pipeline parallel",
    "preemption",
    "prefix cache",
    "chunked prefill",
)
@pytest.mark.features("images", "expert parallel")
@pytest.mark.features("images", "speculative")
@pytest.mark.features("images", "hybrid KV cache")
@pytest.mark.features("images", "sequence parallel")
@pytest.mark.features("images", "context parallel")
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (
            "qwen3-moe",
            {"tp": 2, "stages": 2, "layers": (1, 2), "experts": ExpertSettings(parallel=True), "shared_rows": 1},
        ),
        ("qwen2.5", {"launched": True, "drafts": 2}),
        ("qwen3-moe", {"tp": 2, "context_rows": 4, "ops": "native", "drafts": 2}),
        ("gemma3", {"hybrid": "on", "ops": "native"}),
        ("qwen3.5-moe", {"tp": 2, "stages": 2, "layers": (1, 2)}),
        pytest.param("glm4v", {"tp": 2, "stages": 2, "layers": (1, 2)}, marks=pytest.mark.extras),
        pytest.param("glm4v-moe", {"tp": 2, "ops": "native", "drafts": 2}, marks=pytest.mark.extras),
    ],
)
def test_images_say_the_same_on_any_ranks(ranks: RankProcesses, tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
    """Positions of three axes, rows that join behind layers of both stages, drafts that are taken back on a device that
    is launched ahead, tokens that see each other in layers with tables of their own, and a stage in which nothing
    attends; in little memory."""
    make = make_glm_model if kind.startswith("glm") else make_qwen_model
    model = make_gemma_model(tmp_path) if kind == "gemma3" else make(tmp_path, kind)
    chats = [
        ImageChat("Compare ", picture(1, (40, 160)), " with ", picture(2, (90, 90)), picture(0, (150, 40))),
        ImageChat(picture(0, (150, 40)), "What is it?"),
        ImageChat("No image at all, only a question."),
    ]
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=32, max_running=4)
    blocks, length = {"gemma3": (36, 60), "qwen3.5-moe": (15, 30)}.get(kind, (9, 30))
    memory = blocks * max(each.block_bytes for each in ranks.serve(model.path, **how).serving)
    engine = ranks.serve(model.path, limits=limits, kv_memory=memory, **how)
    prompts = [chat.prompt(model) for chat in chats]
    requests = [engine.ask(ids, length, embeds=embeds) for ids, embeds in prompts]
    engine.run()
    for _ in range(2):
        requests.append(engine.ask(prompts[0][0], length, embeds=prompts[0][1]))
        engine.run()
    expected = [chat.expected(model, length) for chat in chats]
    assert [each.tokens for each in requests] == [*expected, expected[0], expected[0]]
    little = kind in ("gemma3", "qwen3.5-moe")
    assert requests[-1].cached >= 32 or little, "groups of layers, and states, need more memory to keep any"
    assert engine.preemptions > 0


@pytest.mark.features("pipeline parallel", "preemption")
def test_preemption_and_seeds_change_nothing_in_a_pipeline(
    ranks: RankProcesses, models: Callable[..., TinyModel]
) -> None:
    model = models("qwen2", 2)
    alone = ranks.serve(model.path)
    expected = [alone.ask(tokens, 40, SEEDED) for tokens in PROMPTS]
    alone.run()
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    block = alone.serving[0].block_bytes
    engine = ranks.serve(model.path, tp=2, stages=2, limits=limits, kv_memory=PREEMPTING * block // 3)
    requests = [engine.ask(tokens, 40, SEEDED) for tokens in PROMPTS]
    engine.run()
    assert engine.preemptions > 0
    assert [request.tokens for request in requests] == [request.tokens for request in expected]


@pytest.mark.parametrize(("tp", "stages", "launched"), [(2, 1, False), (2, 1, True), (2, 2, False)])
def test_every_stage_drafts_the_same(
    ranks: RankProcesses, models: Callable[..., TinyModel], tp: int, stages: int, launched: bool
) -> None:
    model = models("llama", 2)
    limits = EngineLimits(run_ahead=1, plan_late=False, speculation="fixed")
    engine = ranks.serve(model.path, tp=tp, stages=stages, limits=limits, drafts=3, launched=launched)
    # What follows a prompt is put behind it twice: what was looked up is then often right.
    prompts = [3 * (tokens + model.greedy(tokens, 8)) for tokens in (prompt(5, 1), prompt(7, 2), prompt(9, 3))]
    requests = [engine.ask(tokens, 20) for tokens in prompts]
    engine.run()
    assert [request.tokens for request in requests] == [model.greedy(tokens, 20) for tokens in prompts]
    assert engine.accepted > 0


def test_drafters_of_two_ranks_are_those_of_one(
    ranks: RankProcesses, models: Callable[..., TinyModel], tmp_path: Path
) -> None:
    """Rank 0 drafts with whole weights, and tells the other; run-ahead goes on from lengths that are bounds only. By
    launches, too. And trees."""
    model = models("llama", 2)
    limits = EngineLimits(run_ahead=2, speculation="fixed")
    prompts = [prompt(5, 1), prompt(17, 2), prompt(30, 3)]
    expected = [model.greedy(tokens, OUTPUT_OF_DRAFTS) for tokens in prompts]
    medusa, eagle = make_medusa(model, tmp_path / "medusa"), make_eagle(model, tmp_path / "eagle")
    eagle3 = make_eagle3(model, tmp_path / "eagle3")
    folders: dict[Method, Path] = {"draft": model.path, "medusa": medusa, "eagle": eagle, "eagle3": eagle3}
    shapes: list[dict[str, Any]] = [
        {"tp": 1},
        {"tp": 2, "shared_rows": 1},
        {"tp": 2, "context_rows": 8},
        {"tp": 2, "launched": True},
    ]
    drafters = [(SpeculationSettings(method=method, model=str(folder)), shapes) for method, folder in folders.items()]
    trees = {"speculative_eagle_topk": 3, "speculative_eagle_min_path_prob": 0.0}
    drafters.append((SpeculationSettings(method="eagle", model=str(eagle), **trees), shapes[:2]))
    for speculation, those in drafters:
        method, accepted = speculation.method, []
        for shape in those:
            engine = ranks.serve(model.path, limits=limits, speculation=speculation, **shape)
            requests = [engine.ask(tokens, OUTPUT_OF_DRAFTS) for tokens in prompts]
            engine.run()
            assert [request.tokens for request in requests] == expected, method
            accepted.append(engine.accepted)
        assert len(set(accepted)) == 1, method
        assert accepted[0] > 0 or method != "draft"


def test_ranks_share_layers_words_and_memory(ranks: RankProcesses, models: Callable[..., TinyModel]) -> None:
    model = models("llama", 2)
    whole = ranks.serve(model.path).serving[0]
    parts = ranks.serve(model.path, tp=2, stages=2, layers=(2, 1)).serving
    assert [part.layers for part in parts] == [2, 2, 1, 1]
    assert [part.words for part in parts] == [80, 80, 0, 0], "a half each, padded, on the first stage alone"
    assert [part.block_bytes * 6 for part in parts] == [whole.block_bytes * n for n in (2, 2, 1, 1)]
    assert len({part.num_blocks for part in parts}) == 1, "the least of all"


def test_plans_in_flight_fill_the_stages(ranks: RankProcesses, models: Callable[..., TinyModel]) -> None:
    model = models("llama", 2)
    engine = ranks.serve(model.path, stages=2, limits=EngineLimits(run_ahead=0, plan_late=False))
    requests = [engine.ask(prompt(8, seed), 12) for seed in range(4)]
    while not all(request.tokens for request in requests):
        engine.step()
    before = engine.steps
    engine.run()
    assert engine.most_in_flight == 2, "one in each stage"
    # Two micro-batches of two sequences take turns: every sequence gets a token in every other step.
    assert engine.steps - before >= 2 * 10


def beginning(epoch: int, step: int, *, released: tuple[SequenceId, ...] = ()) -> StepPlan:
    """A prompt of one token, which draws the next."""
    sequence = SequenceId(step)
    new = NewSequence(
        sequence=sequence, tokens=pack([7]), prompt_length=1, computed=0, blocks=pack([0]), sampling=GREEDY
    )
    work = SequenceWork(sequence, 1, b"", True)
    return StepPlan(epoch=Incarnation(epoch), step=step, released=released, new=(new,), work=(work,))


def test_a_rank_that_missed_the_last_step_computes_nothing_with_the_others(
    ranks: RankProcesses, models: Callable[..., TinyModel]
) -> None:
    """A scheduler dies behind a plan that only one rank has received. The first plan of its successor is as large: what
    they exchange would fit together, and no token would mean anything. The last test here, as its ranks end."""
    ranks.serve(models("llama").path, tp=2)
    ranks.tell(2, beginning(1, 0))
    ranks.read(0)
    ranks.tell_one(0, beginning(1, 1, released=(SequenceId(0),)))
    ranks.tell(2, beginning(2, 0))
    assert not ranks.says_something(0, within=SILENT)
    ranks.kill(1)
    assert ranks.exit_status(0, within=60) != 0
