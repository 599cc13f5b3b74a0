"""Routing and grouped products in Triton against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.measure.roofline.kernel_traffic import mixture_bytes, mixture_flops
from services.worker.models.expert_parallel.local_experts import LocalExperts
from services.worker.models.expert_parallel.placement import ExpertPlacement
from services.worker.ops.gpu import HOPPER
from services.worker.ops.interface import Routing
from services.worker.ops.triton.moe import mixture as moe
from services.worker.ops.triton.moe.grouped_products import mix_tiles
from services.worker.ops.triton.moe.mixture import choose_experts, mix_rows, mixture, unroll_factor
from services.worker.ops.triton.moe.routing import (
    TILE_ROWS,
    SortedPicks,
    expert_tile,
    most_tiles,
    one_by_one,
    route,
    sort_picks,
    tile_rows,
)
from services.worker.ops.triton_ops import TritonOps
from tests.support.kernels.kernel_device import DEVICE
from tests.support.models.expert_mixtures import MixedExperts, Shape

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def by_rows(mixed: MixedExperts) -> Tensor:
    picks = route(mixed.logits, chosen=mixed.shape.chosen, renormalised=mixed.shape.renormalised)
    return mix_rows(mixed.x, picks, mixed.gate_up, mixed.down, mixed.biases, kind=mixed.shape.kind)


def by_tiles(mixed: MixedExperts) -> Tensor:
    picks = route(mixed.logits, chosen=mixed.shape.chosen, renormalised=mixed.shape.renormalised)
    return mix_tiles(mixed.x, picks, mixed.gate_up, mixed.down, mixed.biases, kind=mixed.shape.kind)


@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (60, 4), (3, 3), (1, 1)])
@pytest.mark.parametrize("renormalised", [False, True])
def test_a_row_goes_to_the_experts_of_greatest_chance(experts: int, chosen: int, renormalised: bool) -> None:
    mixed = MixedExperts(Shape(experts=experts, chosen=chosen, renormalised=renormalised), rows=2)
    chances, numbers = mixed.routed()
    found = route(mixed.logits, chosen=chosen, renormalised=renormalised)
    assert torch.equal(found.experts, numbers.int())
    assert torch.allclose(found.chances.double(), chances, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_chances_the_lower_number_is_taken(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]]).to(DEVICE, dtype)
    assert route(logits, chosen=3, renormalised=False).experts.tolist() == [[1, 2, 3], [0, 1, 2]]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_logits_that_are_not_numbers_still_name_experts_that_there_are() -> None:
    logits = torch.full((1, 3), float("nan"), device=DEVICE)
    assert set(route(logits, chosen=2, renormalised=True).experts.flatten().tolist()) <= {0, 1, 2}


def laid_out(order: SortedPicks, picks: int, tile: int) -> list[tuple[int, list[int]]]:
    """(expert, picks) of each tile that is used."""
    tiles = int(order.tiles)
    rows = order.picks[: tiles * tile].view(tiles, tile).tolist()
    return [
        (expert, [pick for pick in row if pick < picks])
        for expert, row in zip(order.tile_experts[:tiles].tolist(), rows, strict=True)
    ]


@settings(max_examples=12, deadline=None)
@given(
    experts=st.integers(1, 6),
    tile=st.sampled_from([16, 32]),
    picks=st.lists(st.integers(0, 5), min_size=1, max_size=150),
)
def test_every_pick_is_in_one_tile_of_its_expert_and_experts_have_no_more_tiles_than_they_need(
    experts: int, tile: int, picks: list[int]
) -> None:
    picks = [pick % experts for pick in picks]
    found = laid_out(
        sort_picks(torch.tensor(picks, dtype=torch.int32, device=DEVICE).unsqueeze(1), experts, tile), len(picks), tile
    )
    wanted = []
    for expert in range(experts):
        own = [number for number, pick in enumerate(picks) if pick == expert]
        wanted += [(expert, own[start : start + tile]) for start in range(0, len(own), tile)]
    assert found == wanted
    assert len(found) <= most_tiles(len(picks), experts, tile)


def test_picks_may_be_more_than_a_program_looks_at_in_one_go() -> None:
    picks = torch.randint(0, 3, (5000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    found = laid_out(sort_picks(picks.view(-1, 2).to(DEVICE), 3, 64), len(picks), 64)
    for expert in range(3):
        own = [number for tile, numbers in found if tile == expert for number in numbers]
        assert own == (picks == expert).nonzero().flatten().tolist()


def test_no_fewer_tiles_than_the_worst_case_are_launched() -> None:
    assert [most_tiles(picks, 8, 16) for picks in (1, 8, 9, 16, 17, 128)] == [1, 8, 8, 8, 8, 15]
    # Seven experts with one pick each and one with the rest.
    assert most_tiles(128, 8, 16) >= 7 + -(-121 // 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [by_rows, by_tiles])
def test_a_mixture_is_what_it_is_in_float64(way: object, dtype: torch.dtype) -> None:
    assert callable(way)
    mixed = MixedExperts(Shape(dtype=dtype), rows=3)
    mixed.check(way(mixed))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(kind="gelu_tanh"),
        Shape(size=40, kind="swigluoai", biased=True),
        Shape(experts=4, chosen=4, hidden=32, renormalised=False),
        Shape(experts=3, chosen=1, hidden=40, size=72),
        Shape(experts=4, chosen=3, size=40),
        Shape(chosen=1, hidden=640, size=24),
    ],
    ids=lambda shape: f"{shape.chosen} of {shape.experts}, {shape.hidden} to {shape.size}, {shape.kind}",
)
def test_any_number_of_experts_and_any_size_will_do(shape: Shape) -> None:
    mixed = MixedExperts(shape, rows=2)
    mixed.check(by_rows(mixed))
    mixed.check(by_tiles(mixed))


@pytest.mark.parametrize("most", TILE_ROWS)
def test_each_size_of_tiles_gives_the_same(most: int) -> None:
    mixed = MixedExperts(Shape(experts=2, chosen=1, hidden=80, dtype=torch.bfloat16), rows=most // 2 + 9)
    picks = route(mixed.logits, chosen=1, renormalised=True)
    mixed.check(mix_tiles(mixed.x, picks, mixed.gate_up, mixed.down, kind="silu", most=most))


def test_no_turn_of_a_loop_is_left_over_whose_loads_would_go_alone() -> None:
    found = [int(unroll_factor(256 * turns, 256)) for turns in (1, 3, 4, 5, 6, 8, 9)]
    assert found == [1, 3, 4, 3, 3, 4, 3]


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("gated", [False, True])
def test_two_programs_of_few_rows_fit_on_an_sm_of_hopper(rows: int, gated: bool) -> None:
    tile = expert_tile(rows, 2, HOPPER, gated=gated)
    of_a_program = tile.num_stages * (tile.rows + tile.columns * (2 if gated else 1)) * tile.depth * 2 + 1024
    assert 2 * of_a_program <= 228 * 1024


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    assert [tile_rows(rows * 8, 128) for rows in (8, 128, 256, 512, 1024, 8192)] == [16, 16, 32, 64, 128, 128]


def test_all_sizes_of_tiles_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, sizes = MixedExperts(Shape(), rows=2), []
    monkeypatch.setattr(moe, "mix_tiles", lambda *_, most, **__: sizes.append(most))
    picks = choose_experts(mixed.logits, Routing(2, True))
    moe.compile_all(mixed.x, picks, mixed.gate_up, mixed.down, kind=mixed.shape.kind)
    assert sizes == [16, 32, 64, 128]


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    """Its weights are NaNs."""
    mixed = MixedExperts(Shape(experts=4, chosen=1), rows=3)
    mixed.logits[:, 2] = -100.0
    expected = mixed.expected()
    mixed.gate_up[2] = float("nan")
    mixed.down[2] = float("nan")
    for found in (by_rows(mixed), by_tiles(mixed)):
        assert found.double().sub(expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [mix_rows, mix_tiles])
def test_what_ranks_with_some_of_the_experts_make_of_rows_adds_up(
    way: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    """One of them has an expert that no row has picked, and so nothing to do."""
    mixed = MixedExperts(Shape(experts=5, dtype=dtype), rows=3)
    mixed.logits[:, 4] = -100.0
    picks = choose_experts(mixed.logits, Routing(2, True))
    total = torch.zeros(mixed.x.shape, dtype=dtype, device=DEVICE)
    for rank, experts in enumerate(((0, 3), (1, 2), (4,))):
        local = LocalExperts.of(ExpertPlacement(((0, 3), (1, 2), (4,))), rank, DEVICE)
        numbers = torch.tensor(experts, device=DEVICE)
        own = local.own_picks(picks, mixed.logits)
        part = way(mixed.x, own, mixed.gate_up[numbers], mixed.down[numbers], kind="silu")
        assert bool(part.any()) == (rank != 2)
        total += part
    mixed.check(total)


def test_few_rows_go_one_by_one_and_both_ways_agree() -> None:
    assert one_by_one(1, 2, 8)
    assert not one_by_one(2, 2, 8)
    assert [rows for rows in range(1, 9) if one_by_one(rows, 8, 128)] == [1, 2, 3, 4]
    for rows, way in ((1, by_rows), (2, by_tiles)):
        mixed = MixedExperts(Shape(), rows)
        weights = (mixed.gate_up, mixed.down)
        found = mixture(mixed.x, choose_experts(mixed.logits, Routing(2, True)), *weights, kind="silu")
        assert torch.equal(found, way(mixed))
        mixed.check(found)


def test_experts_without_gates_are_multiplied_one_after_the_other() -> None:
    mixed, ops = MixedExperts(Shape(kind="relu2"), rows=3), TritonOps(DEVICE, torch.float32)
    picks = ops.choose_experts(mixed.logits, Routing(2, True))
    mixed.check(ops.mixture(mixed.x, picks, ops.pack_experts(mixed.gate_up, mixed.down), kind="relu2"))


def test_what_a_token_of_qwen_3_30b_must_move_and_multiply_in_a_layer() -> None:
    """Eight experts of three matrices of 768 × 2048."""
    weights = 8 * 3 * 768 * 2048
    assert mixture_bytes(1, 8, experts=128, hidden=2048, size=768, itemsize=2) == 2 * (weights + 2 * 2048 + 128)
    assert mixture_flops(1, chosen=8, hidden=2048, size=768) == 2 * weights
