"""Kernels that take rows one by one: products with a layer's matrices, norms, the gated activation, rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.model.rope import cos_sin_table
from services.worker.ops import Ops
from services.worker.roofline.batches import batch_of
from services.worker.roofline.findings import StepCase, Work
from services.worker.roofline.kernel_case import Call, Cases, KernelCase, Situation
from services.worker.torch_ops import TorchOps

_EPS = 1e-6


def linears(situation: Situation) -> Cases:
    """Bytes: the matrix, rows in and rows out; 2 operations for each row and element of the matrix."""
    config = situation.config
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "qkv": (heads + 2 * kv, config.hidden_size),
        "output": (config.hidden_size, heads),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }
    for name, (out, inputs) in shapes.items():
        item = situation.dtype.itemsize
        weight = situation.noise(out, inputs)
        count = situation.copies(weight.nbytes)
        packed = [
            (ops, [ops.pack_linear(weight.clone(), None) for _ in range(count)])
            for ops in situation.implementations[: 2 if _multiplies_by_itself(situation.ours) else 1]
        ]
        for rows in situation.rows:
            x = situation.noise(rows, inputs)
            work = Work(item * (out * inputs + rows * (inputs + out)), 2.0 * rows * out * inputs)
            calls = [[_product(ops, x, each) for each in weights] for ops, weights in packed]
            yield KernelCase(f"{name} {out}×{inputs}, {rows} rows", work, calls[0], calls[1] if calls[1:] else [])


def _multiplies_by_itself(ops: Ops) -> bool:
    """Or leaves it to torch."""
    return getattr(type(ops), "linear", None) is not TorchOps.linear


def _product(ops: Ops, x: Tensor, packed: object) -> Call:
    return lambda: ops.linear(x, packed)  # type: ignore[arg-type]


def norms(situation: Situation) -> Cases:
    """add_rms_norm: row, residual in; residual, normed row out."""
    hidden = situation.config.hidden_size
    weight = torch.ones(hidden, device=situation.device)
    for rows in situation.rows:
        x, residual = situation.products(situation.ours, rows, hidden), situation.ours.empty_rows(rows, hidden)
        size = x.nbytes + 2 * residual.nbytes + rows * hidden * situation.dtype.itemsize

        def made(ops: Ops, rows: int = rows) -> Call:
            x, residual = situation.products(ops, rows, hidden), ops.empty_rows(rows, hidden).zero_()
            return lambda: ops.add_rms_norm(x, residual, weight, _EPS)

        yield KernelCase(f"{rows} rows of {hidden}", Work(size, 0.0), *situation.calls(size, made))


def activation(situation: Situation) -> Cases:
    """gated_act: two halves of a row in, one out."""
    width = situation.config.intermediate_size
    for rows in situation.rows:
        size = situation.products(situation.ours, rows, 2 * width).nbytes + rows * width * situation.dtype.itemsize

        def made(ops: Ops, rows: int = rows) -> Call:
            gate_up = situation.products(ops, rows, 2 * width)
            return lambda: ops.gated_act(gate_up, situation.config.activation)

        yield KernelCase(f"{rows} rows of {width}", Work(size, 0.0), *situation.calls(size, made))


def rotary(situation: Situation) -> Cases:
    """rope_and_store: queries, keys and values in; queries out, keys and values into the cache."""
    config, dim = situation.config, situation.config.head_dim
    width = (config.num_heads + 2 * config.num_kv_heads) * dim
    cos_sin = cos_sin_table(config.layers[0].rope, dim, 1).to(situation.device)
    norm = torch.ones(dim, device=situation.device) if config.qk_norm else None
    for rows in situation.rows:
        _, meta = batch_of(StepCase("decode", rows, 1), rows, 1, situation.device)
        item = situation.dtype.itemsize
        size = situation.products(situation.ours, rows, width).nbytes + rows * width * item

        def made(ops: Ops, rows: int = rows, meta: object = meta) -> Call:
            qkv = situation.products(ops, rows, width)
            caches = ops.allocate_kv(rows, config.num_kv_heads, dim)
            return lambda: ops.rope_and_store(
                *(qkv, meta, cos_sin, *caches),  # type: ignore[arg-type]
                heads=config.num_heads,
                q_norm=norm,
                k_norm=norm,
                eps=_EPS,
            )

        yield KernelCase(f"{rows} rows of {width}", Work(size, 0.0), *situation.calls(size, made))
