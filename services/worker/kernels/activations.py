"""The gated activation of an MLP: act(gate) · up, out of what one product gave both.

Bytes moved, n rows of I elements of b bytes: 3·n·I·b.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops import Activation

BLOCK = 1024


def gated_act(gate_up: Tensor, kind: Activation) -> Tensor:
    """gate_up [n, 2 * I] (gate, then up) → act(gate) * up [n, I]; act(gate) is rounded to its dtype, as in PyTorch."""
    rows, both = gate_up.shape
    width = both // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    gated_act_kernel[(rows, triton.cdiv(width, BLOCK))](gate_up, out, WIDTH=width, KIND=kind, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """act(gate), float32."""
    if KIND == "silu":
        logit = gate
    else:
        # gelu's 0.5 · (1 + tanh(u)) is the logistic function of 2u, with u = sqrt(2 / π) · (x + 0.044715 · x³).
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # Below -88 the power would overflow, and the quotient is 0 all the same.
    return gate / (1.0 + tl.exp(-tl.maximum(logit, -88.0)))


@triton.jit
def gated_act_kernel(gate_up, out, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    active = activated(gate, KIND).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (active * up).to(out.dtype.element_ty), mask=inside)
