"""A model of `transformers` shared among the ranks of a stage, by the plan that the library has for it (`tp_plan`), or
by one of ours.

Its styles are those of Megatron-LM (arXiv:1909.08053): `colwise` layers compute a share of their outputs, `rowwise`
ones a share of the sum over their inputs. Layers whose plan gathers their outputs, or splits their inputs, stay whole
on each rank: what they compute is the same. So does what the plan does not name. Of a mixture's experts, which lie in
one tensor for all, each rank has some columns of every one; what it adds up for a row is summed up behind them.
"""

from __future__ import annotations

import re
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.worker.distributed.communicator import Communicator
from services.worker.models.config import ModelError
from services.worker.models.weights import Rows
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
_ONE_KEY = "q_colwise"
"""A style of ours: queries of which a rank has a share, behind them the only key and value, which all ranks have."""
_FUSED = ("qkv_colwise", "packed_colwise", _ONE_KEY)
"""Styles of linear layers that compute several matrices' outputs, one behind the other, of each of which a rank has a
share: queries, keys and values (a style of ours), or gates and ups."""


class _Plan(NamedTuple):
    """How one family's layers are split."""

    styles: dict[str, str]
    """By the names of modules and tensors in a layer."""
    layers: str = "layers"
    """What the library calls the list of them."""
    counts: tuple[str, ...] = ()
    """Attributes of attention modules that count heads, or elements of all heads: they become a rank's. `config` stands
    for `num_attention_heads` of the module's configuration."""
    attention: tuple[str, ...] = ("self_attn",)
    """The names of these modules."""
    kv_heads: str = "num_key_value_heads"
    """What the configuration calls the key heads that are split; where it has none, there is one for each head."""


_GPT_OSS = _Plan(
    {
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
    }
)
_PHI_3 = _Plan(
    {
        "self_attn.qkv_proj": "qkv_colwise",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_up_proj": "packed_colwise",
        "mlp.down_proj": "rowwise",
    },
    counts=("num_key_value_heads", "config"),
)
_GPT_2 = _Plan(
    {
        "attn.c_attn": "qkv_colwise",
        "attn.c_proj": "rowwise",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    },
    layers="h",
    counts=("num_heads", "split_size"),
    attention=("attn",),
)
_BLOOM = _Plan(
    {
        # A head's query, key and value lie behind each other.
        "self_attention.query_key_value": "colwise",
        "self_attention.dense": "rowwise",
        "mlp.dense_h_to_4h": "colwise",
        "mlp.dense_4h_to_h": "rowwise",
    },
    layers="h",
    counts=("num_heads",),
    attention=("self_attention",),
)
_MPT = _Plan(
    {
        "attn.Wqkv": "qkv_colwise",
        "attn.out_proj": "rowwise",
        "ffn.up_proj": "colwise",
        "ffn.down_proj": "rowwise",
    },
    layers="blocks",
    counts=("n_heads",),
    attention=("attn",),
)
# Here a key head's queries, it and its value may lie behind each other.
_FALCON = _BLOOM._replace(kv_heads="num_attention_heads")
_MLLAMA = _Plan(
    {
        **{f"{name}.{part}_proj": "colwise" for name in ("self_attn", "cross_attn") for part in "qkv"},
        "self_attn.o_proj": "rowwise",
        "cross_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    },
    layers="model.layers",
    counts=("num_heads", "num_key_value_heads"),
    attention=("self_attn", "cross_attn"),
)
_PLANS = {
    "gpt_oss": _GPT_OSS,
    "phi3": _PHI_3,
    "gpt2": _GPT_2,
    "bloom": _BLOOM,
    "mpt": _MPT,
    "falcon": _FALCON,
    "mllama_text_model": _MLLAMA,
}
"""By `model_type`, of families whose layers the library has no plan for, or one that splits none."""

_KEYS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj", "c_attn", "Wqkv")
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
    config = own.config.get_text_config(decoder=True)
    _check_heads(config, ranks, _own_plan(own.config))
    _straighten(model)
    split_keys = False
    for path, module in list(model.named_modules()):
        style = plan.get(re.sub(r"\d+", "*", path))
        if style == "colwise" or style in _FUSED:
            _check_linear(path, style, module)
            whole = 2 if style == _ONE_KEY else 0
            matrices = _matrices_of(style, int(module.out_features), config)
            _replace(model, path, _split_outputs(path, module, communicator, matrices, whole))
            split_keys |= path.endswith(_KEYS) and style != _ONE_KEY
        elif style == "rowwise":
            _check_linear(path, style, module)
            share = _split_inputs(path, module, communicator, quantization)
            _replace(model, path, SummedProduct(share, communicator))
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
    _count_own_heads(model, communicator)
    return split_keys


def mixtures_of(model: nn.Module) -> list[str]:
    """The names of the modules that have all experts of a layer each, in the order of a pass."""
    plan = _plan_of(model)
    return [path for path, _ in model.named_modules() if plan.get(re.sub(r"\d+", "*", path)) == _SUMMED]


def _plan_of(model: nn.Module) -> dict[str, str]:
    """Styles by the names of modules and tensors, with a star for numbers."""
    own: Any = model
    plan = dict(getattr(own, "_tp_plan", None) or {})
    ours = _own_plan(own.config)
    if ours is None:
        return plan
    base = "" if own.base_model is own else f"{own.base_model_prefix}."  # which some heads lack, as Mllama's
    return plan | {f"{base}{ours.layers}.*.{name}": style for name, style in ours.styles.items()}


def _own_plan(config: Any) -> _Plan | None:
    """None: the library's is enough."""
    plan = _PLANS.get(config.model_type)
    if plan is _FALCON and config.new_decoder_architecture:
        return plan._replace(counts=(*plan.counts, "num_kv_heads"), kv_heads="num_kv_heads")
    if plan is _FALCON and config.multi_query:
        return plan._replace(styles={**plan.styles, "self_attention.query_key_value": _ONE_KEY})
    return plan


def _matrices_of(style: str, outputs: int, config: Any) -> list[int]:
    """The outputs of each matrix that a linear layer of this style is made of."""
    if style == "packed_colwise":
        return [outputs // 2, outputs // 2]
    if style not in _FUSED:
        return [outputs]
    heads = config.num_attention_heads
    kv_heads = 1 if style == _ONE_KEY else getattr(config, "num_key_value_heads", None) or heads
    head_dim = outputs // (heads + 2 * kv_heads)
    return [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]


def _straighten(model: nn.Module) -> None:
    """Makes linear layers of what has their weights transposed, as GPT-2 has."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            made = nn.Linear(inputs, outputs, device="meta")
            made.weight, made.bias = _own(module.weight.T), module.bias
            _replace(model, path, made)


def _replace(model: nn.Module, path: str, made: nn.Module) -> None:
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, made)


def _count_own_heads(model: nn.Module, communicator: Communicator) -> None:
    """Has attention modules that cut what they compute by numbers of heads count this rank's."""
    own: Any = model
    plan, ranks = _own_plan(own.config), communicator.world_size
    if plan is None or not plan.counts:
        return
    modules: list[Any] = [each for path, each in model.named_modules() if path.rpartition(".")[2] in plan.attention]
    for module in modules:
        for name in plan.counts:
            if name == "config":
                module.config = copy(module.config)
                module.config.num_attention_heads //= ranks
            else:
                setattr(module, name, getattr(module, name) // ranks)
        module.baton_rank = communicator.rank


class LinearShare(NamedTuple):
    """What a rank has of a linear layer; None: all."""

    rows: Rows | None = None
    """Outputs."""
    outputs: int | None = None
    """Of the whole layer, as `inputs`."""
    columns: tuple[int, int] | None = None
    """Inputs, from and to."""
    inputs: int | None = None


WHOLE = LinearShare()


class RoundedShare(nn.Module):
    """A linear layer that a checkpoint has as codes, or a share of one that was rounded before it was split: not to be
    computed, but to be packed."""

    def __init__(self, rounded: QuantizedWeight | Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`rounded`: [out, in] of this rank; numbers where codes could not be had or split so."""
        super().__init__()
        self.out_features, self.in_features = (rounded.codes if isinstance(rounded, QuantizedWeight) else rounded).shape
        self.rounded = rounded
        self.baton_share = WHOLE
        self.bias = bias
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        """Empty: it shows the dtype, and where the model was moved to."""

    def pack(self, ops: Ops) -> PackedLinear:
        """Ready for `ops.linear`, where the model is."""
        device = self.weight.device
        bias = None if self.bias is None else self.bias.detach().to(device)
        if isinstance(self.rounded, QuantizedWeight):
            return ops.pack_quantized(self.rounded.to(device), bias)
        return ops.pack_linear(self.rounded.to(device), bias)

    def numbers(self) -> Tensor:
        """[out, in], in float32."""
        whole = self.rounded
        return whole.dequantized(torch.float32) if isinstance(whole, QuantizedWeight) else whole.float()

    def outputs(self, which: Tensor) -> QuantizedWeight | Tensor:
        """These of them."""
        whole = self.rounded
        return whole.outputs(which) if isinstance(whole, QuantizedWeight) else whole[which]

    def inputs(self, first: int, end: int) -> QuantizedWeight | Tensor:
        """From the first up to the second."""
        whole, columns = self.rounded, (first, end)
        if isinstance(whole, QuantizedWeight):
            return whole.part(slice(None), columns, self.weight.dtype)
        return whole[:, first:end].contiguous()


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


def _check_heads(config: Any, ranks: int, plan: _Plan | None) -> None:
    if getattr(config, "is_heterogeneous", False):  # transformers': it would not say one number for all layers
        raise ModelError(f"tp: {config.model_type} has layers with different heads, which one rank computes")
    heads, keys = config.num_attention_heads, "num_key_value_heads" if plan is None else plan.kv_heads
    for key, count in (("num_attention_heads", heads), (keys, getattr(config, keys, None) or heads)):
        if count % ranks:
            raise ModelError(f"{key} {count} does not divide over {ranks} tensor-parallel ranks")


def _check_linear(path: str, style: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear | RoundedShare):
        raise ModelError(f"tp: {path} is a {type(module).__name__}, which cannot be split by {style!r}")


def _part(path: str, size: int, communicator: Communicator) -> slice:
    ranks = communicator.world_size
    if size % ranks:
        raise ModelError(f"{path} has {size} columns, which do not divide over {ranks} tensor-parallel ranks")
    share = size // ranks
    return slice(communicator.rank * share, (communicator.rank + 1) * share)


def _split_outputs(path: str, module: Any, communicator: Communicator, matrices: list[int], whole: int) -> nn.Module:
    """What takes the place of `module`. `matrices`: the outputs of each, one behind the other, of which the last
    `whole` are not split."""
    parts, first = list[Tensor](), 0
    for number, outputs in enumerate(matrices):
        part = _part(path, outputs, communicator) if number < len(matrices) - whole else slice(0, outputs)
        parts.append(torch.arange(first + part.start, first + part.stop))
        first += outputs
    own = torch.cat(parts)
    rows = (int(own[0]), int(own[-1]) + 1) if len(parts) == 1 else own
    share = LinearShare(rows=rows, outputs=module.out_features)
    bias = None if module.bias is None else _own(module.bias[own])
    if isinstance(module, RoundedShare):
        module = RoundedShare(module.outputs(own), bias, module.weight.dtype)
    else:
        module.out_features, module.weight, module.bias = len(own), _own(module.weight[own]), bias
    module.baton_share = share
    made: nn.Module = module
    return made


def _split_inputs(path: str, module: Any, communicator: Communicator, quantization: Scheme | None) -> nn.Module:
    """What takes the place of `module`."""
    part = _part(path, module.in_features, communicator)
    module.baton_share = share = LinearShare(columns=(part.start, part.stop), inputs=module.in_features)
    if module.bias is not None and communicator.rank:
        module.bias = None  # added once, by the first rank
    if quantization is not None:
        module = RoundedShare(quantize(module.weight.detach(), quantization), module.bias, module.weight.dtype)
    if isinstance(module, RoundedShare):
        made = RoundedShare(module.inputs(part.start, part.stop), module.bias, module.weight.dtype)
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
