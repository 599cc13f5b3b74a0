"""Norms, gates, rotations, masks and copies of blocks on a real GPU, at the sizes of served models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.kv.copier import RankKvCache
from services.worker.kv.cuda_copier import Caches
from services.worker.kv.transfers import Transfers
from services.worker.ops.torch_ops import TorchOps
from services.worker.ops.triton.rotary import rope_and_store
from services.worker.ops.triton.row_ops import add_rms_norm, gated_act, rms_norm
from services.worker.sampling.masks import apply_mask, apply_mask_by_kernel
from services.worker.sampling.token_bits import mask_words
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from tests.support.kv.ranks import BLOCKS, make_arena, make_layout, reserve, transfer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CUDA = torch.device("cuda")
EPS = 1e-5
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6}


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("hidden", [1024, 4096, 5120, 16384, 20480])
@pytest.mark.parametrize("rows", [1, 700])
def test_norms_equal_float64_within_a_rounding(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = _random(rows, hidden, dtype=dtype), _random(rows, hidden, dtype=dtype, seed=1)
    weight = _random(hidden, dtype=torch.float32, seed=2)

    def exactly(row: Tensor) -> Tensor:
        row = row.double()
        return row / (row.square().mean(dim=1, keepdim=True) + EPS).sqrt() * weight.double()

    bounds = {"rtol": 1.01 * ROUNDING[dtype], "atol": 1e-5}
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), exactly(x), **bounds)
    wanted = residual + x
    normed, added = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(added, wanted)
    torch.testing.assert_close(normed.double(), exactly(wanted), **bounds)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 600])
def test_gates_equal_float64_within_two_roundings(rows: int, dtype: torch.dtype) -> None:
    gate_up = _random(rows, 2 * 14336, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, dim=1)
    bounds = {"rtol": 2.1 * ROUNDING[dtype] + 2e-6, "atol": 1e-5}
    torch.testing.assert_close(gated_act(gate_up, "silu").double(), F.silu(gate) * up, **bounds)
    gelu = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gated_act(gate_up, "gelu_tanh").double(), gelu, **bounds)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (32, 32, 80), (8, 4, 256)])
def test_rotated_rows_are_stored_where_they_belong(heads: int, kv_heads: int, dim: int, cache: torch.dtype) -> None:
    if cache == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 before 8.9")
    rows, blocks = 400, 64
    qkv = _random(rows, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16) * 4
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:rows].int()
    slots[5] = -1
    positions = torch.arange(rows, dtype=torch.int32) * 7
    angles = torch.arange(rows * 7)[:, None] / 10000 ** (torch.arange(0, dim, 2)[None] / dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(CUDA)
    caches = [torch.zeros(blocks, kv_heads, BLOCK_SIZE, dim, device=CUDA).to(cache) for _ in range(2)]
    scale = torch.full((1,), 0.25, device=CUDA)
    scales = {"k_scale": scale, "v_scale": scale} if cache == torch.float8_e4m3fn else {}
    q = rope_and_store(
        *(qkv, slots.to(CUDA), positions.to(CUDA), cos_sin, *caches),
        heads=heads,
        q_norm=None,
        k_norm=None,
        eps=EPS,
        **scales,
    )
    parts = torch.split(qkv.double().view(rows, -1, dim), [heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions.long().to(CUDA)].double().unsqueeze(1).chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    torch.testing.assert_close(q.double(), rotated(parts[0]), rtol=2.0**-8, atol=1e-5)
    there = slots >= 0
    kept = slots[there].long().to(CUDA)
    for written, exact in zip(caches, (rotated(parts[1]), parts[2]), strict=True):
        wanted = exact[there.to(CUDA)]
        got = written.float()[kept // BLOCK_SIZE, :, kept % BLOCK_SIZE].double()
        if scales:
            torch.testing.assert_close(got, (wanted / 0.25).clamp(-448, 448), rtol=2.0**-4, atol=2.0**-9)
        else:
            torch.testing.assert_close(got, wanted, rtol=2.0**-8, atol=1e-5)
        assert int(written.float().any(dim=-1).sum()) <= int(there.sum()) * kv_heads, "padding stored nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_put_upon_a_vocabulary(dtype: torch.dtype) -> None:
    vocab, chance = 128256, np.random.default_rng(0)
    logits = _random(5, vocab, dtype=dtype)
    rows = np.array([1, 4], dtype=np.intp)
    bits = chance.integers(-(2**31), 2**31, (2, mask_words(vocab)), dtype=np.int32)
    wanted = logits.cpu()
    wanted[rows] = apply_mask(wanted[rows], torch.from_numpy(bits))
    apply_mask_by_kernel(logits, rows, bits)
    assert torch.equal(logits.cpu(), wanted)


LAYOUT = make_layout("bfloat16", layers=6, kv_heads=8, head_dim=128)


def _caches(heads: int, seed: int) -> Caches:
    shape = (BLOCKS, heads, BLOCK_SIZE, LAYOUT.head_dim)
    seeds = range(2 * seed * LAYOUT.layers, 2 * (seed + 1) * LAYOUT.layers)
    made = [_random(*shape, dtype=torch.bfloat16, seed=seed) for seed in seeds]
    return list(zip(made[::2], made[1::2], strict=True))


def _transfers(caches: Caches, directory: Path, first: int = 0) -> Transfers:
    copier = TorchOps(caches[0][0].device, torch.bfloat16).kv_copier(caches, LAYOUT.head_dim)
    return Transfers(
        RankKvCache(LAYOUT, first, caches[0][0].shape[1], True, BLOCKS, copier, 0, LAYOUT.layers), directory
    )


@pytest.mark.parametrize("heads", [(0, 8), (2, 4)])
def test_blocks_go_to_an_arena_and_come_back(tmp_path: Path, heads: tuple[int, int]) -> None:
    arena = make_arena(tmp_path, LAYOUT)
    first, count = heads[0], heads[1] - heads[0]
    one, other = _caches(count, 1), _caches(count, 100)
    before = [[cache.clone() for cache in halves] for halves in other]
    saved, places, slots = [5, 0, 9, 3, 7], [1, 2, 8, 0, 11], [2, 7, 1, 10, 4]
    assert _transfers(one, tmp_path, first).run(transfer("save", saved, slots), lambda: False) == "done"
    assert all(arena.is_written(slot) and arena.is_sound(slot) for slot in slots) == (count == LAYOUT.kv_heads)
    assert _transfers(other, tmp_path, first).run(transfer("load", places, slots), lambda: False) == "done"
    rest = [block for block in range(BLOCKS) if block not in places]
    for mine, theirs, old in zip(one, other, before, strict=True):
        for source, target, untouched in zip(mine, theirs, old, strict=True):
            assert torch.equal(target[places], source[saved])
            assert torch.equal(target[rest], untouched[rest])


def test_a_slot_whose_memory_was_given_back_and_taken_anew_is_written_where_all_see_it(tmp_path: Path) -> None:
    arena = make_arena(tmp_path, LAYOUT)
    one, other = _caches(LAYOUT.kv_heads, 1), _caches(LAYOUT.kv_heads, 100)
    writing, reading = _transfers(one, tmp_path), _transfers(other, tmp_path)
    for save in ("first", "again"):
        assert writing.run(transfer("save", [5], [3]), lambda: False) == "done", save
        assert reading.run(transfer("load", [2], [3]), lambda: False) == "done", save
        assert all(torch.equal(to[2], of[5]) for to, of in zip(sum(other, ()), sum(one, ()), strict=True)), save
        assert arena.is_sound(3)
        assert arena.payload(3)[: 1 << 10] == bytes(one[0][0][5, 0].view(torch.uint8).cpu().numpy().ravel()[: 1 << 10])
        arena.give_memory_back(3, 1000)
        assert arena.take_memory(3)
        reserve(arena, 3, 4)
        for cache in sum(one, ()):
            cache[5] += 1
        torch.cuda.synchronize()  # as a step is over before what it computed is copied
