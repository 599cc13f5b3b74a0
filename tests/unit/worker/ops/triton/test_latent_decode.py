"""Decodes over latents by Triton's kernel, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.models.rope import PlainRope, cos_sin_table
from services.worker.ops.interface import LatentCache
from services.worker.ops.triton.attention.latent_decode import latent_decode
from services.worker.ops.triton_ops import TritonOps
from tests.support.kernels.kernel_device import DEVICE
from tests.support.kernels.latent_reference import EPS, LatentRows, LatentShape
from tests.support.worker.native_batches import Rows, meta_of, on_device, scattered_blocks

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
CONTEXTS = [1, 37, 150]


LITE = LatentShape(16, 512, 64)


@pytest.mark.parametrize(
    ("shape", "splits", "block_size", "dtype"),
    [
        (LITE, 3, 32, torch.bfloat16),
        (LITE, 1, 16, torch.float32),
        (LatentShape(20, 40, 6), 1, 16, torch.bfloat16),
        (LatentShape(20, 40, 6), 8, 64, torch.float32),
        (LatentShape(3, 32, 8), 8, 16, torch.float32),
    ],
    ids=str,
)
def test_decodes_are_what_they_are_in_float64(
    shape: LatentShape, splits: int, block_size: int, dtype: torch.dtype
) -> None:
    cos_sin = cos_sin_table(PlainRope(10000.0), shape.rope_dim, max(CONTEXTS))
    norm = torch.ones(shape.rank)
    rows = [LatentRows(shape, context, cos_sin, 10 + 5 * number) for number, context in enumerate(CONTEXTS)]
    blocks = scattered_blocks(CONTEXTS, block_size=block_size)
    ops = TritonOps(DEVICE, dtype, block_size=block_size)
    cache = LatentCache(*ops.latents.allocate(sum(map(len, blocks)) + 1, shape.rank, shape.rope_dim))
    for cached in (cache.latents, cache.rotated):
        cached[0] = float("nan")  # of a block that is nobody's
    for each, own in zip(rows, blocks, strict=True):
        count = len(each.latents)
        meta = on_device(meta_of([Rows(count, count, own)], block_size), DEVICE)
        q, latents = each.q.to(DEVICE, dtype), each.latents.to(DEVICE, dtype)
        ops.latents.rope_and_store(q, latents, meta, cos_sin.to(DEVICE), cache, norm=norm.to(DEVICE), eps=EPS)
    q = torch.stack([each.queries()[-1] for each in rows] + [rows[0].queries()[0] * 0]).to(DEVICE, dtype)
    meta = meta_of([Rows(1, context, own) for context, own in zip(CONTEXTS, blocks, strict=True)], block_size)
    tables = torch.cat((meta.block_tables, torch.zeros_like(meta.block_tables[:1]))).to(DEVICE)
    lengths = torch.cat((meta.context_lens, torch.zeros(1, dtype=torch.int32))).to(DEVICE)
    found = latent_decode(q, cache, tables, lengths, scale=shape.scale, splits=splits)
    for number, context in enumerate(CONTEXTS):
        expected = rows[number].expected(norm, dtype, context - 1, context)[0]
        torch.testing.assert_close(found[number].double().cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not found[-1].any(), "a padded row has no tokens"
