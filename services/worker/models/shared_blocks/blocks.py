"""What a block that layers at several depths share makes of rows. Knows tensors and `Ops`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.distributed.residual_rows import ResidualRows
from services.worker.models.weights import DenseMlp, LayerWeights, LowRankInputs
from services.worker.ops.interface import Ops


def with_low_rank(ops: Ops, product: Tensor, x: Tensor, added: LowRankInputs | None) -> Tensor:
    """`product` of rows x, and what is added to it at this depth; may overwrite it."""
    if added is None:
        return product
    parts = ops.linear(x, added.down).chunk(len(added.ups), dim=1)
    ups = [ops.linear(part.contiguous(), up) for part, up in zip(parts, added.ups, strict=True)]
    return product.add_(ups[0] if len(ups) == 1 else torch.cat(ups, dim=1))


def block_output(ops: Ops, rows: ResidualRows, layer: LayerWeights, x: Tensor, eps: float) -> Tensor:
    """What attention gives, [n, hidden] → what is added to what the next layer reads; of both this rank's rows."""
    depth, mlp = layer.depth, layer.mlp
    assert depth is not None, "the layer has a shared block"
    assert isinstance(mlp, DenseMlp)
    assert layer.mlp_norm is not None
    x = rows.gathered(ops.rms_norm(x, layer.mlp_norm, eps))
    gates, ups = with_low_rank(ops, ops.linear(x, mlp.gate_up), x, depth.gate_up).chunk(2, dim=1)
    # A product of the sum is the sum of products: what ranks have is added up once, behind both.
    return rows.summed(ops.linear(ops.linear(functional.gelu(gates).mul_(ups), mlp.down), depth.output))
