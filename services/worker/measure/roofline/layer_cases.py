"""Kernels of a decoder's layer, each beside torch's own: products, norms, activation, rotation, attention, mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.measure.roofline.cases import (
    Call,
    Cases,
    KernelCase,
    KernelContext,
    NoKernel,
    batch_of,
    blocks_needed,
)
from services.worker.measure.roofline.kernel_traffic import (
    decode_bytes,
    decode_flops,
    mixture_bytes,
    mixture_flops,
    prefill_bytes,
    prefill_flops,
)
from services.worker.measure.roofline.measured_rank import fill_with_noise
from services.worker.measure.roofline.traffic import experts_met
from services.worker.measure.roofline.wire import KernelWork, StepCase
from services.worker.models.config import Mixture, ModelConfig
from services.worker.models.rope import cos_sin_table
from services.worker.ops.interface import BatchMeta, Ops, Routing
from services.worker.ops.torch_ops import TorchOps

_SDPA = "torch SDPA, not paged"


def decode_attention(context: KernelContext) -> Cases:
    """Attention of one token for each sequence."""
    for length in context.contexts:
        for rows in context.rows:
            shape = _shape(context)
            work = KernelWork(
                decode_bytes([length] * rows, **shape),
                decode_flops([length] * rows, heads=context.config.num_heads, head_dim=context.config.head_dim),
            )
            yield _case(context, StepCase("decode", rows, length), work)


def prefill_attention(context: KernelContext) -> Cases:
    """Attention of whole prompts, one at a time."""
    for length in context.contexts:
        shape, rows = _shape(context), [(length, length)]
        work = KernelWork(
            prefill_bytes(rows, **shape),
            prefill_flops(rows, heads=context.config.num_heads, head_dim=context.config.head_dim),
        )
        yield _case(context, StepCase("prefill", 1, length), work)


def _shape(context: KernelContext) -> dict[str, int]:
    config = context.config
    block = context.ours.kv_block_bytes(config.num_kv_heads, config.head_dim)
    return {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "itemsize": context.dtype.itemsize,
        "cache_itemsize": block // (2 * config.num_kv_heads * context.ours.block_size * config.head_dim),
    }


def _case(context: KernelContext, case: StepCase, work: KernelWork) -> KernelCase:
    """Empty where it does not fit."""
    name = f"{case.batch} × {case.context:,}"
    if 2 * work.bytes > context.room:
        return KernelCase(name, work, [], [])
    copies = context.copies(work.bytes)
    ours = [_paged(context, case) for _ in range(copies)]
    return KernelCase(name, work, ours, [_in_one_piece(context, case) for _ in range(copies)], _SDPA)


def _paged(context: KernelContext, case: StepCase) -> Call:
    config, ops = context.config, context.ours
    blocks = blocks_needed(case, ops.block_size)
    caches = ops.allocate_kv(blocks, config.num_kv_heads, config.head_dim)
    for cache in caches:
        fill_with_noise(cache)
    _, meta = batch_of(case, blocks, 1, context.device, ops.block_size)
    return _attention(context, context.noise(len(meta.positions), config.num_heads, config.head_dim), caches, meta)


def _attention(context: KernelContext, q: Tensor, caches: tuple[Tensor, Tensor], meta: BatchMeta) -> Call:
    scale = context.config.attention_scale
    return lambda: context.ours.paged_attention(q, *caches, meta, scale=scale, window=None, softcap=None)


def _in_one_piece(context: KernelContext, case: StepCase) -> Call:
    config, dim = context.config, context.config.head_dim
    rows = 1 if case.kind == "decode" else case.context
    q = context.noise(case.batch, config.num_heads, rows, dim)
    keys, values = (_held(context, (case.batch, config.num_kv_heads, case.context, dim)) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(
        q, keys, values, is_causal=case.kind == "prefill", scale=config.attention_scale, enable_gqa=True
    )


def _held(context: KernelContext, shape: tuple[int, ...]) -> Tensor:
    memory = torch.empty(shape, dtype=context.dtype, device=context.device)
    fill_with_noise(memory)
    return memory


# Mixtures of experts: routing, and each row's products with its experts.


_CHOICES = 16
"""Calls whose rows go to other experts each: a cache might hold those of one call."""


def mixture(context: KernelContext) -> Cases:
    """Bytes: the experts that rows go to (each row's any, one as likely as another), rows in and out."""
    shape = context.config.mixture
    if shape is None:
        raise NoKernel(f"{context.config.architecture} has none")
    gate_up, down = _experts(context, shape)
    packed = [(ops, ops.pack_experts(gate_up, down)) for ops in context.implementations]
    routing = Routing(shape.chosen, shape.renormalised)
    for rows in context.rows:
        x = context.noise(rows, context.config.hidden_size)
        choices = [context.noise(rows, shape.experts) for _ in range(_CHOICES)]

        def made(ops: Ops, experts: object, logits: Tensor, x: Tensor = x) -> Call:
            return lambda: ops.mixture(
                *(x, ops.choose_experts(logits, routing), experts),  # type: ignore[arg-type]
                kind=context.config.activation,
            )

        calls = [[made(ops, experts, logits) for logits in choices] for ops, experts in packed]
        yield KernelCase(
            f"{rows} rows", _work(context, shape, rows), calls[0], calls[1] if calls[1:] else [], rival_waits=True
        )


def _experts(context: KernelContext, shape: Mixture) -> tuple[Tensor, Tensor]:
    hidden, size = context.config.hidden_size, shape.intermediate_size
    gate_up, down = torch.Size((shape.experts, 2 * size, hidden)), torch.Size((shape.experts, hidden, size))
    return context.noise(*gate_up), context.noise(*down)


def _work(context: KernelContext, shape: Mixture, rows: int) -> KernelWork:
    hidden, size = context.config.hidden_size, shape.intermediate_size
    moved = mixture_bytes(
        *(rows, experts_met(shape, rows)),
        experts=shape.experts,
        hidden=hidden,
        size=size,
        itemsize=context.dtype.itemsize,
    )
    return KernelWork(moved, float(mixture_flops(rows, chosen=shape.chosen, hidden=hidden, size=size)))


# Kernels that take rows one by one.


_EPS = 1e-6


def linears(context: KernelContext) -> Cases:
    """Bytes: the matrix, rows in and rows out; 2 operations for each row and element of the matrix."""
    config = context.config
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    columns = _mlp_columns(config)
    of_mlps = {"gate_up": (2 * columns, config.hidden_size), "down": (config.hidden_size, columns)} if columns else {}
    shapes = {
        "qkv": (heads + 2 * kv, config.hidden_size),
        "output": (config.hidden_size, heads),
        **of_mlps,
        "head": (config.vocab_size, config.hidden_size),
    }
    for name, (out, inputs) in shapes.items():
        item = context.dtype.itemsize
        weight = context.noise(out, inputs)
        count = context.copies(weight.nbytes)
        packed = [
            (ops, [ops.pack_linear(weight.clone(), None) for _ in range(count)])
            for ops in context.implementations[: 2 if _multiplies_by_itself(context.ours) else 1]
        ]
        for rows in context.rows:
            x = context.noise(rows, inputs)
            work = KernelWork(item * (out * inputs + rows * (inputs + out)), 2.0 * rows * out * inputs)
            calls = [[_product(ops, x, each) for each in weights] for ops, weights in packed]
            yield KernelCase(f"{name} {out}×{inputs}, {rows} rows", work, calls[0], calls[1] if calls[1:] else [])


def _mlp_columns(config: ModelConfig) -> int:
    """Of the widest MLP; 0: there is none."""
    return max([config.intermediate_size, *(each.columns or 0 for layer in config.layers for each in layer.following)])


def _multiplies_by_itself(ops: Ops) -> bool:
    """Or leaves it to torch."""
    return getattr(type(ops), "linear", None) is not TorchOps.linear


def _product(ops: Ops, x: Tensor, packed: object) -> Call:
    return lambda: ops.linear(x, packed)  # type: ignore[arg-type]


def norms(context: KernelContext) -> Cases:
    """add_rms_norm: row, residual in; residual, normed row out."""
    hidden = context.config.hidden_size
    weight = torch.ones(hidden, device=context.device)
    for rows in context.rows:
        x, residual = context.products(context.ours, rows, hidden), context.ours.empty_rows(rows, hidden)
        size = x.nbytes + 2 * residual.nbytes + rows * hidden * context.dtype.itemsize

        def made(ops: Ops, rows: int = rows) -> Call:
            x, residual = context.products(ops, rows, hidden), ops.empty_rows(rows, hidden).zero_()
            return lambda: ops.add_rms_norm(x, residual, weight, _EPS)

        yield KernelCase(f"{rows} rows of {hidden}", KernelWork(size, 0.0), *context.calls(size, made))


def activation(context: KernelContext) -> Cases:
    """gated_act: two halves of a row in, one out."""
    width = _mlp_columns(context.config)
    if not width:
        raise NoKernel(f"{context.config.architecture} has no MLP")
    for rows in context.rows:
        size = context.products(context.ours, rows, 2 * width).nbytes + rows * width * context.dtype.itemsize

        def made(ops: Ops, rows: int = rows) -> Call:
            gate_up = context.products(ops, rows, 2 * width)
            return lambda: ops.gated_act(gate_up, context.config.activation)

        yield KernelCase(f"{rows} rows of {width}", KernelWork(size, 0.0), *context.calls(size, made))


def rotary(context: KernelContext) -> Cases:
    """rope_and_store: queries, keys and values in; queries out, keys and values into the cache."""
    config, dim = context.config, context.config.head_dim
    width = (config.num_heads + 2 * config.num_kv_heads) * dim
    cos_sin = cos_sin_table(config.layers[0].rope, dim, 1).to(context.device)
    norm = torch.ones(dim, device=context.device) if config.qk_norm else None
    for rows in context.rows:
        _, meta = batch_of(StepCase("decode", rows, 1), rows, 1, context.device)
        item = context.dtype.itemsize
        size = context.products(context.ours, rows, width).nbytes + rows * width * item

        def made(ops: Ops, rows: int = rows, meta: object = meta) -> Call:
            qkv = context.products(ops, rows, width)
            caches = ops.allocate_kv(rows, config.num_kv_heads, dim)
            return lambda: ops.rope_and_store(
                *(qkv, meta, cos_sin, *caches),  # type: ignore[arg-type]
                heads=config.num_heads,
                q_norm=norm,
                k_norm=norm,
                eps=_EPS,
            )

        yield KernelCase(f"{rows} rows of {width}", KernelWork(size, 0.0), *context.calls(size, made))
