"""The linear layers of the library's models, as our operations multiply them."""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from services.worker.models.fallback.adapters import PLAIN_PRODUCTS, WEIGHT_READERS
from services.worker.models.fallback.tensor_parallel import WHOLE, RoundedShare
from services.worker.models.quantization.quantized_checkpoint import QuantizedCheckpoint
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
            packed, dtype, shape = module.pack(ops), module.weight.dtype, (module.out_features, module.in_features)
        elif (weight := _weight_of(module)) is not None:
            own: Any = module
            code: Scheme | None = "int8" if quantization and name == head else quantization
            packed, dtype, shape = _pack(ops, weight, own.bias, code), weight.dtype, (len(weight), weight.shape[1])
        else:
            continue
        made = PackedProduct(ops, packed, dtype, shape, next(module.parameters()).device)
        made.share = getattr(module, "baton_share", WHOLE)
        setattr(model.get_submodule(parent), last, made)


class _Unread(nn.Module):
    """In the place of a linear layer whose weight the checkpoint has as codes, until these are read."""

    def __init__(self, own: nn.Linear) -> None:
        super().__init__()
        self.shape = (own.out_features, own.in_features)
        self.bias = own.bias


def class_of_codes(kind: type[PreTrainedModel], checkpoint: QuantizedCheckpoint) -> type[PreTrainedModel]:
    """`kind`, of which the library makes and fills all but the linear layers that the `checkpoint` has as codes. Making
    one raises ModelError where these are misshapen."""
    headers = checkpoint.headers()

    def build(self: Any, *settings: Any, **named: Any) -> None:
        kind.__init__(self, *settings, **named)
        for name, module in list(self.named_modules()):
            parent, _, last = name.rpartition(".")
            owner = self.get_submodule(parent)
            if not _is_plain(module) or type(owner).__name__ in WEIGHT_READERS:
                continue
            if headers.has_codes(name, (module.out_features, module.in_features)):
                setattr(owner, last, _Unread(module))

    # Of the same name and module: the library looks things up by both.
    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def unread(model: nn.Module) -> list[str]:
    """The names of the linear layers whose codes are to be read."""
    return [name for name, module in model.named_modules() if isinstance(module, _Unread)]


def read_codes(model: nn.Module, checkpoint: QuantizedCheckpoint) -> None:
    """Reads what `class_of_codes` left. Raises ModelError."""
    for name in unread(model):
        module = cast(_Unread, model.get_submodule(name))
        made = RoundedShare(checkpoint.read_linear(name, module.shape), module.bias, checkpoint.dtype)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and (type(module) is nn.Linear or type(module).__name__ in PLAIN_PRODUCTS)


def _weight_of(module: nn.Module) -> Tensor | None:
    """[out, in] of a linear layer; None: it is none, or has no numbers for weights."""
    if _is_plain(module):
        weight = module.weight.detach()
    elif type(module) is Conv1D:
        weight = module.weight.detach().T
    else:
        return None
    return weight if weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def _pack(ops: Ops, weight: Tensor, bias: Tensor | None, code: Scheme | None) -> PackedLinear:
    weight, own = weight.contiguous(), None if bias is None else bias.detach()
    return ops.pack_linear(weight, own) if code is None else ops.pack_quantized(quantize(weight, code), own)
