"""Which rank has which experts: DeepSeek's algorithm, what placements promise, and the files that they follow from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.eplb import rebalance_experts
from services.worker.models.expert_parallel.expert_balance import balance_of
from services.worker.models.expert_parallel.expert_load import ExpertLoad, load_path, read_loads
from services.worker.models.expert_parallel.local_experts import LocalExperts, count_picks
from services.worker.models.expert_parallel.placement import (
    ExpertPlacement,
    balance_experts,
    spread_evenly,
)
from services.worker.ops.interface import Picks

CPU = torch.device("cpu")
EXAMPLE = (
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
)
"""That of https://github.com/deepseek-ai/EPLB: two layers of twelve experts; and the places that it documents."""
DOCUMENTED = (
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_documented_example_is_placed_as_documented(layer: int) -> None:
    """Sixteen replicas in four groups on two nodes of four GPUs."""
    assert rebalance_experts(EXAMPLE[layer], 16, 4, 2, 8) == DOCUMENTED[layer]


def test_without_replicas_the_heaviest_go_to_the_lightest() -> None:
    """All on one node, and three groups that do not divide over two, which are not kept together then."""
    load = [8, 7, 6, 5, 4, 3]
    assert rebalance_experts(load, 6, 1, 1, 2) == [0, 3, 4, 1, 2, 5]
    assert rebalance_experts(load, 6, 3, 2, 2) == [0, 3, 4, 1, 2, 5]


@pytest.mark.parametrize(
    ("replicas", "gpus", "nodes", "groups"), [(5, 2, 1, 1), (7, 2, 1, 1), (6, 2, 4, 1), (6, 2, 1, 4)]
)
def test_numbers_that_do_not_divide_are_refused(replicas: int, gpus: int, nodes: int, groups: int) -> None:
    with pytest.raises(ValueError, match=rf"{replicas} replicas of 6 experts in {groups} groups, {nodes} nodes"):
        rebalance_experts([1.0] * 6, replicas, groups, nodes, gpus)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    """(load, ranks, redundant, groups, hosts)"""
    hosts, ranks_each, groups_each, size = (draw(st.integers(1, most)) for most in (3, 3, 2, 3))
    ranks, groups = hosts * ranks_each, hosts * groups_each
    experts = groups * size
    least = -experts % ranks
    redundant = least + ranks * draw(st.integers(0, 2))
    if experts < ranks:
        experts, groups, redundant = ranks, 1, 0
    load = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return load, ranks, redundant, groups, hosts


@given(situations())
def test_every_expert_is_somewhere_and_the_busiest_rank_has_no_more_to_do_than_before(
    situation: tuple[list[int], int, int, int, int],
) -> None:
    load, ranks, redundant, groups, hosts = situation
    found = balance_experts(load, ranks, redundant=redundant, groups=groups, hosts=hosts)
    places = Counter(expert for experts in found.ranks for expert in experts)
    assert set(places) == set(range(len(load)))
    assert len({len(experts) for experts in found.ranks}) == 1 or found == spread_evenly(len(load), ranks)
    assert sum(found.loads(load)) == pytest.approx(sum(load))
    assert max(found.loads(load)) <= max(spread_evenly(len(load), ranks).loads(load)) + 1e-9


def test_experts_that_everybody_wants_are_on_both_ranks() -> None:
    load = [60, 40, 1, 1, 1, 1]
    even, found = spread_evenly(6, 2), balance_experts(load, 2, redundant=2)
    assert balance_of(even.loads(load)) < 0.55
    assert balance_of(found.loads(load)) > 0.95
    assert (found.holders(0), found.holders(1)) == ((0, 1), (0, 1))


def test_experts_that_do_not_divide_are_spread_and_too_few_are_refused() -> None:
    assert spread_evenly(6, 4).ranks == ((0, 1), (2, 3), (4,), (5,))
    with pytest.raises(ModelError, match="enable_expert_parallel: 3 experts cannot be spread over 4 ranks"):
        spread_evenly(3, 4)
    with pytest.raises(ModelError, match="num_redundant_experts 1: 6 experts and these do not divide over 4 ranks"):
        balance_experts([1] * 6, 4, redundant=1)
    assert balance_experts([0] * 6, 2, redundant=2) == spread_evenly(6, 2), "nothing was measured"


PLACEMENTS = [
    spread_evenly(6, 4),
    ExpertPlacement(((0, 2, 5), (1, 3, 4))),
    ExpertPlacement(((0, 1, 2, 2), (0, 3, 4, 5))),
    ExpertPlacement(((0, 0, 0), (0, 1, 2), (3, 4, 5))),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_pick_is_computed_by_one_rank_whatever_the_other_rows_are(
    placement: ExpertPlacement, dtype: torch.dtype
) -> None:
    logits = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    chances, experts = logits.softmax(dim=-1).topk(2, dim=-1)
    picks = Picks(chances, experts.to(dtype))
    computed = torch.zeros_like(experts)
    busy = []
    for rank in range(len(placement.ranks)):
        local = LocalExperts.of(placement, rank, CPU)
        own = local.own_picks(picks, logits)
        assert own.experts.dtype == dtype
        here = own.experts >= 0
        numbers = torch.tensor(placement.experts_of(rank))
        assert torch.equal(numbers[own.experts[here].long()], experts[here])
        computed += here
        busy.append(int((here & (experts == 0)).sum()))
        one = local.own_picks(Picks(chances[7:8], picks.experts[7:8]), logits[7:8])
        assert torch.equal(one.experts[0], own.experts[7])
    assert computed.eq(1).all()
    share = len(experts[experts == 0]) / len(placement.holders(0))
    for rank, count in Counter(placement.holders(0)).items():
        assert busy[rank] == pytest.approx(count * share, rel=0.35), "the replicas of an expert have as much to do"


def load_of(counts: dict[int, list[int]], path: Path | None, **different: object) -> ExpertLoad:
    tensors = {layer: torch.tensor(each) for layer, each in counts.items()}
    how: dict[str, object] = {"placements": (), "model": "0" * 32, "engine": "engine-1"}
    return ExpertLoad(tensors, path=path, **(how | different))  # type: ignore[arg-type]


def test_picks_are_counted_and_each_rank_s_share_of_them() -> None:
    counts = torch.zeros(4, dtype=torch.int64)
    for _ in range(2):
        count_picks(counts, torch.tensor([[0, 1], [0, 3], [0, 1]], dtype=torch.int32))
    assert counts.tolist() == [6, 4, 0, 2]
    load = ExpertLoad({1: counts}, [spread_evenly(4, 2), ExpertPlacement(((0, 1, 3), (0, 2, 3)))])
    assert load.by_rank() == {1: [8.0, 4.0]}
    load.restart()
    assert load.layers == {1: [0, 0, 0, 0]}


def test_files_of_all_engines_and_stages_are_added_up(tmp_path: Path) -> None:
    model = "ab" * 16
    for engine, first, counts in (("a/b", 0, {0: [1, 2], 1: [3, 4]}), ("c", 0, {0: [10, 20]}), ("c", 2, {2: [5, 6]})):
        load_of(counts, load_path(tmp_path, model, engine, first), model=model, engine=engine).save()
    load_of({0: [99, 99]}, load_path(tmp_path, "cd" * 16, "a", 0), model="cd" * 16).save()
    assert read_loads(tmp_path, model, 2, 4) == [[11, 22], [3, 4], [5, 6], [0, 0]]
    assert read_loads(tmp_path / "none", model, 2, 1) == [[0, 0]]


def test_what_was_counted_before_a_restart_weighs_half(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    load_of({0: [100, 7]}, path).save()
    again = load_of({0: [0, 0]}, path)
    again.save()
    assert msgspec.json.decode(path.read_bytes())["layers"] == {"0": [100, 7]}, "nothing was counted since"
    for _ in range(2):
        load_of({0: [1, 2]}, path).save()
    assert msgspec.json.decode(path.read_bytes())["layers"] == {"0": [26, 4]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", ": "),
        ({"experts": 3}, "3 experts; the model has 2"),
        ({"model": "x"}, "is of the model x, not of"),
        ({"layers": {"0": [1]}}, "has not one count of each of 2 experts"),
        ({"layers": {"0": [1, -1]}}, "has not one count of each of 2 experts"),
        ({"layers": {"4": [1, 1]}}, "a layer that the model does not have; it has 4"),
    ],
)
def test_a_file_that_says_nothing_of_this_model_is_named(tmp_path: Path, content: object, complaint: str) -> None:
    model = "ab" * 16
    path = load_path(tmp_path, model, "a", 0)
    good = {"model": model, "engine": "a", "experts": 2, "layers": {"0": [1, 1]}}
    path.write_text(content if isinstance(content, str) else msgspec.json.encode(good | content).decode())  # type: ignore[operator]
    with pytest.raises(ModelError, match="expert_load_dir: ") as error:
        read_loads(tmp_path, model, 2, 4)
    assert str(path) in str(error.value)
    assert complaint in str(error.value)
