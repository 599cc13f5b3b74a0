"""Engines that share the experts of a mixture say what `transformers` says, whatever the others of their group do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from services.scheduler.core.limits import EngineLimits
from services.worker.distributed.all2all import All2AllBackend
from services.worker.models.expert_parallel.settings import ExpertSettings
from tests.support.models.tiny_images import picture
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.models.tiny_qwen_vl import make_qwen_model
from tests.support.worker.image_chats import ImageChat
from tests.support.worker.library_situations import prompt
from tests.support.worker.rank_processes import EngineOfRanks, RankProcesses, rank_processes

OUTPUT = 6
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=40, max_running=4)
"""Prompts are cut into chunks, and decodes run beside them."""
PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 15, 16, 17, 33, 71))]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with rank_processes(4, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return cache(lambda family: make_model(family, tmp_path_factory.mktemp(family)))


def run(*engines: EngineOfRanks) -> None:
    """Until nothing is in flight, each engine at its own pace."""
    while any(engine.in_flight for engine in engines):
        for engine in engines:
            if engine.in_flight:
                engine.step()


@pytest.mark.parametrize(
    ("family", "tp", "shared_rows"),
    [
        ("mixtral", 1, None),
        ("qwen2-moe", 2, 1),
        ("deepseek-v2", 1, None),
        ("deepseek-v3", 2, 1),
    ],
)
@pytest.mark.features("data parallel", "expert parallel", "tensor parallel", "chunked prefill", "prefix cache")
@pytest.mark.features("sequence parallel", "data parallel")
def test_engines_of_a_group_say_what_the_library_does(
    family: str, tp: int, shared_rows: int | None, ranks: RankProcesses, models: Callable[[str], TinyModel]
) -> None:
    """Both work, then the first alone, then the second joins it in the middle; none has the other's blocks."""
    model = models(family)
    first, second = ranks.serve_group(model.path, engines=2, tp=tp, limits=LIMITS, shared_rows=shared_rows)
    together = [first.ask(tokens, OUTPUT) for tokens in PROMPTS[::2]]
    together += [second.ask(tokens, OUTPUT) for tokens in PROMPTS[1::2]]
    run(first, second)
    alone = first.ask(PROMPTS[-1], OUTPUT)
    first.step()
    late = second.ask(PROMPTS[-1], OUTPUT)
    run(first, second)
    expected = [model.greedy(tokens, OUTPUT) for tokens in (*PROMPTS[::2], *PROMPTS[1::2], PROMPTS[-1], PROMPTS[-1])]
    assert [request.tokens for request in (*together, alone, late)] == expected
    assert (alone.cached, late.cached) == (0, 64)


@pytest.mark.parametrize(
    ("family", "engines", "tp", "all2all"),
    [
        ("deepseek-v3", 4, 1, "low_latency"),
        ("qwen2-moe", 4, 1, "high_throughput"),
        ("qwen2-moe", 2, 2, "high_throughput"),
        ("qwen3-moe", 4, 1, "auto"),
        ("mixtral", 2, 2, "low_latency"),
    ],
)
@pytest.mark.features("data parallel", "expert parallel", "chunked prefill")
def test_rows_travel_in_each_mode(
    family: str,
    engines: int,
    tp: int,
    all2all: All2AllBackend,
    ranks: RankProcesses,
    models: Callable[[str], TinyModel],
) -> None:
    """All engines work, then the last alone, then a late one beside it."""
    model = models(family)
    experts = ExpertSettings(parallel=True, all2all=all2all)
    group = ranks.serve_group(model.path, engines=engines, tp=tp, limits=LIMITS, experts=experts)
    asked = [(tokens, engine.ask(tokens, OUTPUT)) for tokens in PROMPTS[:3] for engine in group]
    run(*group)
    asked += [(tokens, group[-1].ask(tokens, OUTPUT)) for tokens in PROMPTS[3:]]
    group[-1].step()
    asked.append((PROMPTS[-1], group[0].ask(PROMPTS[-1], OUTPUT)))
    run(*group)
    assert [request.tokens for _, request in asked] == [model.greedy(tokens, OUTPUT) for tokens, _ in asked]


@pytest.mark.slow
@pytest.mark.parametrize("all2all", ["auto", "low_latency", "high_throughput"])
def test_four_engines_of_two_ranks_say_what_the_library_does(
    all2all: All2AllBackend, tmp_path: Path, models: Callable[[str], TinyModel]
) -> None:
    """An expert on each of eight ranks, and a shared one; one engine goes on alone, and another joins it late."""
    model = models("deepseek-v3")
    with rank_processes(8, tmp_path) as eight:
        experts = ExpertSettings(parallel=True, all2all=all2all)
        group = eight.serve_group(model.path, engines=4, tp=2, limits=LIMITS, experts=experts)
        asked = [(tokens, engine.ask(tokens, OUTPUT)) for tokens in PROMPTS[:3] for engine in group]
        run(*group)
        asked.append((PROMPTS[-1], group[2].ask(PROMPTS[-1], OUTPUT)))
        group[2].step()
        asked.append((PROMPTS[3], group[1].ask(PROMPTS[3], OUTPUT)))
        run(*group)
        assert [request.tokens for _, request in asked] == [model.greedy(tokens, OUTPUT) for tokens, _ in asked]


@pytest.mark.features("data parallel", "expert parallel", "prefix cache")
@pytest.mark.parametrize("shared_rows", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_experts_move_in_a_group_while_one_of_its_engines_is_idle(
    shared_rows: int | None, ranks: RankProcesses, models: Callable[[str], TinyModel]
) -> None:
    """Its ranks change over in steps that are others'; it says the same when it works again."""
    model = models("deepseek-v3")
    moving = ExpertSettings(parallel=True, balanced=True, redundant=4, window=3, interval=2)
    first, second = ranks.serve_group(
        model.path, engines=2, tp=2, limits=LIMITS, experts=moving, shared_rows=shared_rows
    )
    asked = [(tokens, engine.ask(tokens, OUTPUT)) for tokens in PROMPTS[2:] for engine in (first, second)]
    run(first, second)
    others = [tokens for seed in range(4) for tokens in (prompt(30, 50 + seed), PROMPTS[-1])]
    asked += first.run_until_experts_move(others, OUTPUT)
    asked += [(tokens, second.ask(tokens, OUTPUT)) for tokens in PROMPTS[:3]]
    run(first, second)
    assert [request.tokens for _, request in asked] == [model.greedy(tokens, OUTPUT) for tokens, _ in asked]
    assert first.moves[1] <= second.moves[1], "the second has worked last"


@pytest.mark.features("data parallel", "expert parallel", "states")
def test_layers_with_states_are_beside_experts(ranks: RankProcesses, models: Callable[[str], TinyModel]) -> None:
    model = models("granite-hybrid-moe")
    first, second = ranks.serve_group(model.path, engines=2, limits=LIMITS)
    requests = [engine.ask(tokens, OUTPUT) for tokens in PROMPTS[2:] for engine in (first, second)]
    run(first, second)
    expected = [model.greedy(tokens, OUTPUT) for tokens in PROMPTS[2:] for _ in range(2)]
    assert [request.tokens for request in requests] == expected


@pytest.mark.features("data parallel", "expert parallel", "images", "chunked prefill", "prefix cache")
def test_engines_of_a_group_are_shown_images(ranks: RankProcesses, tmp_path: Path) -> None:
    """One has images while the other has none; then the other what the first has seen, which is no prefix of its."""
    model = make_qwen_model(tmp_path, "qwen3-moe")
    seen = ImageChat("Compare ", picture(1, (40, 160)), " with ", picture(0, (150, 40)))
    plain = ImageChat("No image at all, only a question.")
    first, second = ranks.serve_group(model.path, engines=2, limits=LIMITS)
    chats = [(first, seen), (second, plain), (second, seen), (first, seen)]
    asked = []
    for engine, chat in chats:
        ids, embeds = chat.prompt(model)
        asked.append(engine.ask(ids, OUTPUT, embeds=embeds))
        if engine is second:
            run(first, second)
    run(first, second)
    assert [each.tokens for each in asked] == [chat.expected(model, OUTPUT) for _, chat in chats]
    assert asked[2].cached == 0 < asked[3].cached


@pytest.mark.features("data parallel", "expert parallel", "speculative", "hybrid KV cache", "chunked prefill")
def test_engines_of_a_group_draft_behind_windows(
    ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = make_model("mixtral", tmp_path_factory.mktemp("windows"), sliding_window=24)
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=40, max_running=4, speculation="fixed")
    engines = ranks.serve_group(model.path, engines=2, limits=limits, hybrid="on", drafts=3)
    # What follows a prompt is put behind it twice: what was looked up is then often right.
    prompts = [3 * (tokens + model.greedy(tokens, 8)) for tokens in (prompt(8, 5), prompt(5, 6))]
    requests = [engine.ask(tokens, 20) for engine, tokens in zip(engines, prompts, strict=True)]
    run(*engines)
    assert [request.tokens for request in requests] == [model.greedy(tokens, 20) for tokens in prompts]
    assert all(engine.drafted > 0 for engine in engines)
