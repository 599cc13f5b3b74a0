"""Norms, gated activations and rotation as Triton kernels, against double precision and PyTorch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.ops.activation import LimitedActivation
from services.worker.ops.interface import Activation, BatchMeta
from services.worker.ops.torch_ops import TorchOps
from services.worker.ops.triton.rotary import rope_and_store
from services.worker.ops.triton.row_ops import MAX_HIDDEN, add_rms_norm, gated_act, rms_norm
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from tests.support.kernels.kernel_device import DEVICE
from tests.support.models.expert_mixtures import exactly_gated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_BFLOAT16 = 2.0**-8 if DEVICE.type == "cuda" else 2.0**-7
"""The interpreter cuts the digits off."""
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: _BFLOAT16, torch.float16: 2.0**-11}
EPS = 1e-6


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within one rounding to `dtype`."""
    torch.testing.assert_close(got.double(), wanted.double(), rtol=1.01 * _ROUNDING[dtype], atol=1e-5)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 48, 128, 1000])
def test_rows_are_normed_in_single_precision(hidden: int, dtype: torch.dtype) -> None:
    x, weight = _random(3, hidden, dtype=dtype) * 7, _random(hidden, seed=1)
    _close(rms_norm(x, weight, EPS), _normed(x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [80, 256])
def test_what_is_normed_is_the_rounded_sum(hidden: int, dtype: torch.dtype) -> None:
    x, residual = _random(2, hidden, dtype=dtype), _random(2, hidden, dtype=dtype, seed=1)
    weight = _random(hidden, seed=2)
    summed = residual + x
    normed, added = add_rms_norm(x, residual, weight, EPS)
    _close(added, summed, dtype)
    assert added is residual
    _close(normed, _normed(added, weight), dtype)


def test_a_row_of_zeros_stays_zeros() -> None:
    zeros = torch.zeros(1, 64, device=DEVICE)
    assert torch.equal(rms_norm(zeros, torch.ones(64, device=DEVICE), EPS), zeros)


def test_a_row_too_long_for_a_program_is_refused() -> None:
    hidden = MAX_HIDDEN + 1
    with pytest.raises(ValueError, match=str(hidden)):
        rms_norm(torch.zeros(1, hidden), torch.ones(hidden), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", ["silu", "gelu_tanh", "swigluoai", "silu_limited", LimitedActivation("swiglustep", 1.5)]
)
@pytest.mark.parametrize("width", [24, 1300])
def test_gates_are_as_pytorchs(width: int, kind: Activation, dtype: torch.dtype) -> None:
    gate_up = _random(2, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=1)
    # Rounded twice: the gate, and the product.
    got = gated_act(gate_up, kind)
    torch.testing.assert_close(got.double(), exactly_gated(gate, up, kind), rtol=2.1 * _ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gates_far_from_zero_are_open_or_shut(kind: Activation) -> None:
    gate_up = torch.tensor([[200.0, -200.0, 2.0, 2.0]], device=DEVICE)
    torch.testing.assert_close(gated_act(gate_up, kind).cpu(), torch.tensor([[400.0, 0.0]]))


class _Heads:
    """Some rows of queries, keys and values, and caches to put them into."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.positions = torch.tensor([0, 5, 36], dtype=torch.int32, device=DEVICE)
        self.slots = torch.tensor([3 * BLOCK_SIZE + 15, 2, BLOCK_SIZE], dtype=torch.int32, device=DEVICE)
        self.qkv = _random(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        angles = torch.arange(40)[:, None] / 100 ** (torch.arange(0, head_dim, 2)[None] / head_dim)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
        self.q_norm, self.k_norm = _random(head_dim, seed=1), _random(head_dim, seed=2)
        self.dtype = dtype

    def caches(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = (4, self.kv_heads, BLOCK_SIZE, self.head_dim)
        return torch.zeros(shape, dtype=dtype, device=DEVICE), torch.zeros(shape, dtype=dtype, device=DEVICE)

    def by_kernel(self, k_cache: Tensor, v_cache: Tensor, *, norms: bool, **scales: Tensor) -> Tensor:
        return rope_and_store(
            *(self.qkv, self.slots, self.positions, self.cos_sin, k_cache, v_cache),
            heads=self.heads,
            q_norm=self.q_norm if norms else None,
            k_norm=self.k_norm if norms else None,
            eps=EPS,
            **scales,
        )

    def by_torch(self, k_cache: Tensor, v_cache: Tensor, *, norms: bool) -> Tensor:
        meta = BatchMeta(
            *(self.slots, self.slots, self.slots.view(1, -1), self.slots, self.positions, self.slots),
            num_decodes=3,
            prefills=(),
            max_query=1,
            max_context=40,
            block_size=BLOCK_SIZE,
        )
        return TorchOps(DEVICE, self.dtype).rope_and_store(
            *(self.qkv.clone(), meta, self.cos_sin, k_cache, v_cache),
            heads=self.heads,
            q_norm=self.q_norm if norms else None,
            k_norm=self.k_norm if norms else None,
            eps=EPS,
        )

    def exactly(self, *, norms: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [n, heads, D] in double precision."""
        by_head = self.qkv.double().view(len(self.qkv), -1, self.head_dim)
        q, k, v = torch.split(by_head, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if norms:
            q, k = _normed(q, self.q_norm), _normed(k, self.k_norm)
        cos, sin = self.cos_sin[self.positions.long()].double().unsqueeze(1).chunk(2, dim=-1)

        def rotated(x: Tensor) -> Tensor:
            low, high = x.chunk(2, dim=-1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

        return rotated(q), rotated(k), v

    def stored(self, cache: Tensor) -> Tensor:
        """[n, KV, D]"""
        slots = self.slots.long()
        return cache.float()[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]


_SHAPES = [(4, 2, 64), (5, 5, 80), (12, 3, 96), (8, 1, 128), (2, 1, 256)]


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), _SHAPES)
def test_heads_are_rotated_and_stored_in_one_pass(heads: int, kv_heads: int, head_dim: int, norms: bool) -> None:
    rows = _Heads(heads, kv_heads, head_dim, torch.float32)
    k_cache, v_cache = rows.caches(torch.float32)
    got = rows.by_kernel(k_cache, v_cache, norms=norms)
    q, k, v = rows.exactly(norms=norms)
    for mine, exact in ((got, q), (rows.stored(k_cache), k), (rows.stored(v_cache), v)):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    assert int(k_cache.any(dim=-1).sum()) == int(v_cache.any(dim=-1).sum()) == 3 * kv_heads, "nothing else is written"


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_is_pytorchs_within_a_rounding(dtype: torch.dtype, norms: bool) -> None:
    rows = _Heads(6, 2, 64, dtype)
    mine, theirs = rows.caches(dtype), rows.caches(dtype)
    _near(rows.by_kernel(*mine, norms=norms), rows.by_torch(*theirs, norms=norms))
    _near(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])


def _near(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=2.1 * _ROUNDING[mine.dtype], atol=4 * _ROUNDING[mine.dtype])


def test_a_padded_row_stores_nothing() -> None:
    rows = _Heads(4, 2, 64, torch.float32)
    rows.slots[1] = -1
    k_cache, v_cache = rows.caches(torch.float32)
    rows.by_kernel(k_cache, v_cache, norms=True)
    assert int(k_cache.any(dim=-1).sum()) == int(v_cache.any(dim=-1).sum()) == 2 * 2


def test_caches_of_fp8_hold_scaled_numbers_and_never_more_than_they_can() -> None:
    rows = _Heads(4, 2, 64, torch.bfloat16)
    rows.positions.zero_()
    # Numbers that the type has: the interpreter does not round to it as a GPU does (tests/gpu has others).
    rows.qkv = torch.randint(-8, 9, rows.qkv.shape).to(rows.qkv)
    rows.qkv[0] *= 4096
    k_cache, v_cache = rows.caches(torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor([0.5], device=DEVICE), "v_scale": torch.tensor([4.0], device=DEVICE)}
    rows.by_kernel(k_cache, v_cache, norms=False, **scales)
    _, k, v = rows.exactly(norms=False)
    assert torch.equal(rows.stored(k_cache).double(), (k / 0.5).clamp(-448, 448))
    assert torch.equal(rows.stored(v_cache).double(), (v / 4.0).clamp(-448, 448))
