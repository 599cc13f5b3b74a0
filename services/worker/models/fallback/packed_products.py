"""The linear layers of the library's models, as our operations multiply them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.worker.models.fallback.adapters import PLAIN_PRODUCTS, WEIGHT_READERS
from services.worker.models.fallback.tensor_parallel import WHOLE, RoundedShare
from services.worker.models.weights import NamedProduct
from services.worker.ops.interface import Ops, PackedLinear
from services.worker.ops.quantized import Scheme, quantize


class PackedProduct(nn.Module):
    """A linear layer whose weight `ops` multiplies."""

    def __init__(
        self, ops: Ops, packed: PackedLinear, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
    ) -> None:
        """`shape`: (out, in)."""
        super().__init__()
        self.ops = ops
        self.packed = packed
        self.outputs, self.inputs = shape
        self.share = WHOLE
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
        """Empty: some modules ask for its dtype."""

    def named(self) -> NamedProduct:
        """For adapters."""
        rows = (0, self.outputs) if self.share.rows is None else self.share.rows
        outputs = self.share.outputs or self.outputs
        columns, inputs = self.share.columns or (0, self.inputs), self.share.inputs or self.inputs
        return NamedProduct(self.packed, outputs, inputs, rows, columns)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out], in x's dtype."""
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_empty(*x.shape[:-1], self.outputs)
        return self.ops.linear(rows.contiguous(), self.packed).to(x.dtype).view(*x.shape[:-1], self.outputs)


def pack_products(model: nn.Module, ops: Ops, quantization: Scheme | None, output: nn.Module | None = None) -> None:
    """Replaces the linear layers by such as `ops` computes: batch invariant and faster where those are native. A
    weight that others share, as a tied head's, stays where it is, and is copied. `output`:
    the head among them, which is rounded to int8 at least."""
    head = next((name for name, each in model.named_modules() if each is output), None)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if type(model.get_submodule(parent)).__name__ in WEIGHT_READERS:
            continue
        if isinstance(module, RoundedShare):
            packed, dtype, shape = module.pack(ops), module.weight.dtype, (module.outputs, module.inputs)
        elif (weight := _weight_of(module)) is not None:
            own: Any = module
            code: Scheme | None = "int8" if quantization and name == head else quantization
            packed, dtype, shape = _pack(ops, weight, own.bias, code), weight.dtype, (len(weight), weight.shape[1])
        else:
            continue
        made = PackedProduct(ops, packed, dtype, shape, next(module.parameters()).device)
        made.share = getattr(module, "baton_share", WHOLE)
        setattr(model.get_submodule(parent), last, made)


def _weight_of(module: nn.Module) -> Tensor | None:
    """[out, in] of a linear layer; None: it is none, or has no numbers for weights."""
    if isinstance(module, nn.Linear) and (type(module) is nn.Linear or type(module).__name__ in PLAIN_PRODUCTS):
        weight = module.weight.detach()
    elif type(module) is Conv1D:
        weight = module.weight.detach().T
    else:
        return None
    return weight if weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def _pack(ops: Ops, weight: Tensor, bias: Tensor | None, code: Scheme | None) -> PackedLinear:
    weight, own = weight.contiguous(), None if bias is None else bias.detach()
    return ops.pack_linear(weight, own) if code is None else ops.pack_quantized(quantize(weight, code), own)
