"""A model of `transformers` shared among the ranks of a stage, by the plan that the library has for it (`tp_plan`).

Its styles are those of Megatron-LM (arXiv:1909.08053): `colwise` layers compute a share of their outputs, `rowwise`
ones a share of the sum over their inputs. Layers whose plan gathers their outputs, or splits their inputs, stay whole
on each rank: what they compute is the same. So does what the plan does not name. Of a mixture's experts, which lie in
one tensor for all, each rank has some columns of every one; what it adds up for a row is summed up behind them.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from services.worker.distributed.communicator import Communicator
from services.worker.models.config import ModelError
from services.worker.ops.interface import Ops, PackedLinear
from services.worker.ops.quantized import QuantizedWeight, Scheme, quantize

_WHOLE = frozenset(
    {
        "colwise_gather_output",
        "colwise_rep",
        "rowwise_split_input",
        "rowwise_rep",
        "replicated_with_grad_allreduce",
        "replicate",
        "embedding_rowwise",
        "embedding_colwise",
        "mla_kv_a_proj",
        "local_params",
    }
)
"""Styles whose layers may stay whole: they take and give what they would without ranks."""

_SUMMED = "moe_tp_experts"
"""The style of experts of which each rank has some columns."""
_CUTS = {"colwise": (-2, 1), "rowwise": (-1, 1), "packed_colwise": (-2, 2), "packed_rowwise": (-1, 2)}
"""Of a tensor that no linear layer has, by style: which of its dimensions is split, and how many matrices, one behind
the other, are."""
PARTIAL = ".partial"
"""Behind the name of a layer that is split by its inputs: what a rank has of it."""
_OF_FIRST = "first_rank"
"""A style of ours: what is added once."""

_PLANS = {
    "gpt_oss": {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "self_attn.sinks": "colwise",
        "self_attn": "local_params",
        # Transposed; a gate's column is beside the one that it gates.
        "mlp.experts.gate_up_proj": "rowwise",
        "mlp.experts.gate_up_proj_bias": "rowwise",
        "mlp.experts.down_proj": "colwise",
        "mlp.experts.down_proj_bias": _OF_FIRST,
        "mlp.experts": _SUMMED,
    },
}
"""By `model_type`, of layers of families that the library has no plan for."""

_KEYS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
"""Names of layers that compute keys, alone or with others."""


def shard_model(model: nn.Module, communicator: Communicator, quantization: Scheme | None = None) -> bool:
    """Leaves this rank's share of the weights in `model`, and has partial sums added up. Returns whether key heads are
    split, too. `quantization`: what weights will be rounded to; those that are split by their inputs are rounded here,
    as a whole, so that every number of ranks has the same weights. Raises ModelError where the library has no plan for
    the model, or its sizes do not divide."""
    own: Any = model
    plan, name, ranks = _plan_of(model), type(model).__name__, communicator.world_size
    if not any(style in ("colwise", "rowwise") for style in plan.values()):
        raise ModelError(f"tp {ranks}: transformers has no plan for {name} (tp_plan) that splits layers")
    _check_heads(own.config.get_text_config(decoder=True), ranks)
    split_keys = False
    for path, module in list(model.named_modules()):
        style = plan.get(re.sub(r"\d+", "*", path))
        if style == "colwise":
            _check_linear(path, style, module)
            _split_outputs(path, module, communicator)
            split_keys |= path.endswith(_KEYS)
        elif style == "rowwise":
            _check_linear(path, style, module)
            parent, _, last = path.rpartition(".")
            share = _split_inputs(path, module, communicator, quantization)
            setattr(model.get_submodule(parent), last, SummedProduct(share, communicator))
        elif style == _SUMMED:
            if getattr(module, "baton_whole", False):
                continue  # they add up themselves
            module.register_forward_hook(lambda _module, _inputs, rows: communicator.sum(rows.contiguous()))
        elif style is not None and style not in _WHOLE:
            raise ModelError(f"tp {ranks}: {path} is to be split by {style!r}, which is not supported")
    for path, weight in list(model.named_parameters()):
        style = plan.get(re.sub(r"\d+", "*", path))
        if style is None or style in _WHOLE:
            continue
        owner, _, last = path.rpartition(".")
        if plan.get(re.sub(r"\d+", "*", owner)) not in (_SUMMED, "local_params"):
            raise ModelError(f"tp {ranks}: {path} is to be split by {style!r}, which is not supported")
        setattr(model.get_submodule(owner), last, _own(_split_tensor(path, style, weight, communicator)))
    return split_keys


def mixtures_of(model: nn.Module) -> list[str]:
    """The names of the modules that have all experts of a layer each, in the order of a pass."""
    plan = _plan_of(model)
    return [path for path, _ in model.named_modules() if plan.get(re.sub(r"\d+", "*", path)) == _SUMMED]


def _plan_of(model: nn.Module) -> dict[str, str]:
    """Styles by the names of modules and tensors, with a star for numbers."""
    own: Any = model
    plan = dict(getattr(own, "_tp_plan", None) or {})
    layers = {
        f"{own.base_model_prefix}.layers.*.{name}": style
        for name, style in _PLANS.get(own.config.model_type, {}).items()
    }
    return layers | plan


class LinearShare(NamedTuple):
    """What a rank has of a linear layer; None: all."""

    rows: tuple[int, int] | None = None
    """Outputs, from and to."""
    outputs: int | None = None
    """Of the whole layer, as `inputs`."""
    columns: tuple[int, int] | None = None
    """Inputs, from and to."""
    inputs: int | None = None


WHOLE = LinearShare()


class RoundedShare(nn.Module):
    """Some inputs of a linear layer that was rounded before it was split: not to be computed, but to be packed."""

    def __init__(self, rounded: QuantizedWeight | Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`rounded`: [out, this rank's inputs]; numbers where codes could not be split so."""
        super().__init__()
        self.outputs, self.inputs = (rounded.codes if isinstance(rounded, QuantizedWeight) else rounded).shape
        self._rounded = rounded
        self.baton_share = WHOLE
        self.bias = bias
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        """Empty: it shows the dtype, and where the model was moved to."""

    def pack(self, ops: Ops) -> PackedLinear:
        """Ready for `ops.linear`, where the model is."""
        device = self.weight.device
        bias = None if self.bias is None else self.bias.detach().to(device)
        if isinstance(self._rounded, QuantizedWeight):
            return ops.pack_quantized(self._rounded.to(device), bias)
        return ops.pack_linear(self._rounded.to(device), bias)


class SummedProduct(nn.Module):
    """A linear layer of which each rank has some inputs."""

    def __init__(self, partial: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.partial = partial
        self._communicator = communicator

    @property
    def weight(self) -> Any:
        """This rank's share: some modules ask for its dtype."""
        return self.partial.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., this rank's inputs] → the sum of all ranks' products [..., out]."""
        return self._communicator.sum(self.partial(x).contiguous())


def _check_heads(config: Any, ranks: int) -> None:
    heads = config.num_attention_heads
    for key, count in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", getattr(config, "num_key_value_heads", None) or heads),
    ):
        if count % ranks:
            raise ModelError(f"{key} {count} does not divide over {ranks} tensor-parallel ranks")


def _check_linear(path: str, style: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear):
        raise ModelError(f"tp: {path} is a {type(module).__name__}, which cannot be split by {style!r}")


def _part(path: str, size: int, communicator: Communicator) -> slice:
    ranks = communicator.world_size
    if size % ranks:
        raise ModelError(f"{path} has {size} columns, which do not divide over {ranks} tensor-parallel ranks")
    share = size // ranks
    return slice(communicator.rank * share, (communicator.rank + 1) * share)


def _split_outputs(path: str, module: Any, communicator: Communicator) -> None:
    part = _part(path, module.out_features, communicator)
    module.baton_share = LinearShare(rows=(part.start, part.stop), outputs=module.out_features)
    module.out_features = part.stop - part.start
    module.weight = _own(module.weight[part])
    if module.bias is not None:
        module.bias = _own(module.bias[part])


def _split_inputs(path: str, module: Any, communicator: Communicator, quantization: Scheme | None) -> nn.Module:
    """What takes the place of `module`."""
    part = _part(path, module.in_features, communicator)
    module.baton_share = share = LinearShare(columns=(part.start, part.stop), inputs=module.in_features)
    if module.bias is not None and communicator.rank:
        module.bias = None  # added once, by the first rank
    if quantization is not None:
        weight = module.weight.detach()
        rounded = quantize(weight, quantization).part(slice(None), (part.start, part.stop), weight.dtype)
        made = RoundedShare(rounded, module.bias, weight.dtype)
        made.baton_share = share
        return made
    module.in_features = part.stop - part.start
    module.weight = _own(module.weight[:, part])
    own: nn.Module = module
    return own


def _split_tensor(path: str, style: str, weight: Tensor, communicator: Communicator) -> Tensor:
    """This rank's share of a tensor that is no linear layer's."""
    if style == _OF_FIRST:
        return torch.zeros_like(weight) if communicator.rank else weight
    if style not in _CUTS:
        raise ModelError(f"tp: {path} is to be split by {style!r}, which is not supported")
    dim, matrices = _CUTS[style]
    dim = max(dim, -weight.ndim)
    size = weight.shape[dim] // matrices
    part = _part(path, size, communicator)
    shares = [weight.narrow(dim, size * number + part.start, part.stop - part.start) for number in range(matrices)]
    return torch.cat(shares, dim=dim)


def _own(share: Tensor) -> nn.Parameter:
    """A copy, so that the whole tensor can go."""
    return nn.Parameter(share.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
