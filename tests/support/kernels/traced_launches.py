"""What Triton would compile for our launches of a step's kernels, where there is no GPU: nothing is compiled or run.

`python -m tests.support.kernels.traced_launches` prints what a worker's start has compiled, and what serving then
compiles anew,
which its users would wait for. It must run in a process that does not interpret kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from services.worker.batch.rows import RowRuns, rows_of
from services.worker.batch.staging import packed
from services.worker.graphs.decode_inputs import DecodeInputs, capture_sizes
from services.worker.ops.interface import (
    BatchMeta,
    LatentCache,
    RecurrentUnit,
    Routing,
    SelectiveSpace,
    StateRows,
    StateSpace,
)
from services.worker.ops.low_rank import AdapterRows, AdapterSpan, LowRankPart, LowRankShape
from services.worker.ops.quantized import quantize
from services.worker.ops.torch_mixers.convolution import CHUNK, lay_out
from services.worker.ops.torch_mixers.delta import DeltaChunks
from services.worker.ops.triton import rounded_linear
from services.worker.ops.triton.attention.indexer import choose_slots
from services.worker.ops.triton.attention.latent_decode import latent_decode, latent_tile
from services.worker.ops.triton.attention.paged_attention import paged_attention
from services.worker.ops.triton.attention.tiles import decode_splits
from services.worker.ops.triton.codes import numbers
from services.worker.ops.triton.low_rank import GatheredLowRank, RowTiling
from services.worker.ops.triton.moe.mixture import choose_experts, compile_all, mixture
from services.worker.ops.triton.quantized_linear import MAX_ROWS, compile_tiles, quantized_linear
from services.worker.ops.triton.rotary import rope_and_store
from services.worker.ops.triton.row_ops import add_rms_norm, gated_act, rms_norm
from services.worker.ops.triton.states.chunks import hand_on, scan_delta
from services.worker.ops.triton.states.convolution import convolve
from services.worker.ops.triton.states.one_token import step_decodes
from services.worker.ops.triton.states.recurrent import recur
from services.worker.ops.triton.states.selective import select
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE

CONTEXT, MOST_ROWS, CAPTURED = 131072, 4096, 64
HEADS, KV_HEADS, DIM, HIDDEN = 16, 4, 64, 1024
CPU = torch.device("cpu")
WEIGHT = quantize(torch.ones(192, HIDDEN), "int8")

ADAPTED = GatheredLowRank(LowRankShape(2, 16, HIDDEN, (128, 64, 64)), CPU, torch.bfloat16, RowTiling())
ADAPTED.put(1, [None, LowRankPart(torch.ones(8, HIDDEN), torch.ones(64, 8)), None])


class Seen(msgspec.Struct):
    """Names of kernels, each as often as it was compiled, and the greatest grid of each."""

    at_start: list[str]
    when_serving: list[str]
    grids: dict[str, tuple[int, int, int]]


class Launches:
    """Replaces the driver of a GPU and for Triton's compiler."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.grids: dict[str, tuple[int, int, int]] = {}

    def install(self) -> None:
        target = GPUTarget("cuda", 90, 32)
        driver.set_active(
            SimpleNamespace(
                get_current_device=lambda: 0,
                get_current_stream=lambda _device: 0,
                get_current_target=lambda: target,
            )
        )
        launches = self

        def compiled(kernel: Any, key: str, signature: object, device: int, *_: object) -> object:
            launches.compiled.append(kernel.__name__)
            made = kernel.device_caches[device][0][key] = launches._made(kernel.__name__)
            return made

        JITFunction._do_compile = compiled

    def _made(self, name: str) -> SimpleNamespace:
        def run(*arguments: Any) -> None:
            before = self.grids.get(name, (0, 0, 0))
            self.grids[name] = tuple(map(max, before, arguments[:3]))

        made = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=lambda *_: None, run=run)
        made.result = lambda: made
        return made


def layer(meta: BatchMeta) -> None:
    """The launches of two layers, one of which has a window."""
    rows = len(meta.positions)
    x, norm = torch.empty((rows, HIDDEN), dtype=torch.bfloat16), torch.empty(HIDDEN)
    caches = [torch.empty((4, KV_HEADS, BLOCK_SIZE, DIM), dtype=torch.bfloat16) for _ in range(2)]
    qkv = torch.empty((rows, (HEADS + 2 * KV_HEADS) * DIM), dtype=torch.bfloat16)
    how = {"heads": HEADS, "q_norm": None, "k_norm": None, "eps": 1e-5}
    rms_norm(x, norm, 1e-5)
    q = rope_and_store(qkv, meta.slots, meta.positions, torch.empty((4, DIM)), *caches, **how)
    for window in (None, 1000):
        paged_attention(q, *caches, meta, scale=DIM**-0.5, window=window, softcap=None)
    add_rms_norm(x, x.clone(), norm, 1e-5)
    gated_act(torch.empty((rows, 2 * HIDDEN), dtype=torch.bfloat16), "silu")
    through_experts(mixture, rows)
    order = torch.arange(rows, dtype=torch.int32)
    adapted = AdapterRows(torch.ones_like(order), order, (AdapterSpan(1, 0, rows),))
    ADAPTED.add(torch.empty((rows, 256), dtype=torch.bfloat16), x, adapted)
    if rows <= MAX_ROWS:
        quantized_linear(x, WEIGHT, None)
    else:
        numbers(WEIGHT, torch.bfloat16)
    rounded_linear.rounded_linear(x, WEIGHT, None)
    through_states(meta)


def through_states(meta: BatchMeta) -> None:
    """A selective space behind its convolution, a recurrent unit, and the decodes of a state space of 4 heads of 16
    elements."""
    states, rows, channels, dim = meta.states, len(meta.positions), 64, 16
    assert states is not None
    space = SelectiveSpace(torch.empty(4, channels), *(torch.empty(channels, *n) for n in ((), (dim,), (), ())))
    wide = torch.empty((rows, 3 * channels + 2 * dim), dtype=torch.bfloat16)
    convolve(wide[:, channels:][:, :channels], space.convolution, torch.empty(1, 3, channels), meta, states, wide.dtype)
    select(wide, space, torch.empty(1, channels, 1, dim), meta, states)
    unit = RecurrentUnit(space.conv_weight, space.conv_bias, torch.empty(channels))
    recur(wide[:, : 3 * channels], unit, torch.empty(1, channels, 1, 1), meta, states)
    if meta.num_decodes:
        of_heads = torch.empty(4)
        weights = (torch.empty(4, 96), torch.empty(96), of_heads, of_heads.clone(), of_heads.clone())
        other = StateSpace(4, 16, 1, dim, *weights, None, 1e-5)
        step_decodes(torch.empty(rows, 96), wide[:, 160:164], other, torch.empty(1, 4, 16, dim), meta, states)
    if meta.prefills:
        through_chunks(states, meta)


def through_chunks(rows: StateRows, meta: BatchMeta) -> None:
    """What goes from chunk to chunk of prompts, of 2 heads of 16 elements with states of 16 numbers."""
    prompts = lay_out(rows.slots[meta.num_decodes :], meta.prefills, 4)
    chunks, state = sum(prompts.turns), torch.empty(len(meta.prefills), 2, 16, 16)
    hand_on(torch.empty(chunks, 2, 1, 1), torch.empty(chunks, 2, 16, 16), state, prompts)
    sizes = ((CHUNK, 16), (CHUNK, 16), (CHUNK, 16), (CHUNK, CHUNK), (CHUNK, 16), (1, 1))
    scan_delta(DeltaChunks(*(torch.empty(chunks, 2, *size) for size in sizes)), state, prompts)


def through_indexer(meta: BatchMeta) -> None:
    """Of 4 heads of 32 elements, which chooses 64 tokens, and attention to these."""
    if meta.max_context <= (count := 64):
        return
    rows, halves = len(meta.positions), [torch.empty((4, 1, BLOCK_SIZE, n), dtype=torch.bfloat16) for n in (64, 48)]
    cache = LatentCache.of((halves[0], halves[1]), 16)
    assert cache.index_keys is not None
    topk = torch.Tensor.topk
    torch.Tensor.topk = lambda scores, *_, **__: SimpleNamespace(values=scores[:, :1])  # type: ignore[assignment]
    try:
        chosen = choose_slots(
            torch.empty((rows, 4, 32), dtype=torch.bfloat16), torch.empty(rows, 4), cache.index_keys, meta, count
        )
    finally:
        torch.Tensor.topk = topk  # type: ignore[method-assign]
    q, lengths = torch.empty((rows, HEADS, 80), dtype=torch.bfloat16), (meta.positions + 1).clamp_(max=count)
    splits = decode_splits(rows, HEADS, 1, count, latent_tile(2), 132)
    latent_decode(q, cache, chosen, lengths, scale=1.0, splits=splits, chosen=True)


def through_experts(way: Callable[..., object], rows: int) -> None:
    """As many experts as Qwen1.5-MoE has: no power of two, so that tiles do not grow where numbers of rows double."""
    x, logits, gate_up, down = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, 64), (rows, 60), (60, 128, 64), (60, 64, 64))
    )
    way(x, choose_experts(logits, Routing(4, True)), gate_up, down, kind="silu")


def step(*sequences: tuple[int, int]) -> None:
    """Of (rows, context), as a worker packs them."""
    counts, contexts = np.array(sequences, dtype=np.int32).T
    indices = np.arange(len(sequences))
    tables = np.zeros((len(sequences), CONTEXT // BLOCK_SIZE), dtype=np.int32)
    rows = rows_of(
        RowRuns(indices, indices, contexts - counts, counts),
        tables,
        np.zeros((len(indices), CONTEXT), np.int32),
        BLOCK_SIZE,
    )
    together = packed(rows, rows.last_rows)
    meta = together.tensors(torch.empty(together.length, dtype=torch.int32))[1]
    layer(replace(meta, states=StateRows(torch.zeros(len(sequences), dtype=torch.int64), None)))
    through_indexer(meta)  # which no captured step has


def start() -> None:
    """As `torch_backend` does: eagerly first, then captures, then rehearsals of prefills."""
    through_experts(compile_all, 1)
    ADAPTED.compile()
    row = torch.empty((1, HIDDEN), dtype=torch.bfloat16)
    compile_tiles(row, WEIGHT, None)
    numbers(WEIGHT, torch.bfloat16)
    rounded_linear.compile_tiles(row, WEIGHT, None)
    step((1, 1))
    inputs = DecodeInputs(CPU, CAPTURED, CONTEXT // BLOCK_SIZE, CONTEXT, BLOCK_SIZE, states=True)
    for size in reversed(capture_sizes(CAPTURED)):
        layer(inputs.views(size)[1])
    for rows in (1 << power for power in range(1, MOST_ROWS.bit_length())):
        step((rows, rows))
        step((rows, CONTEXT))


def serve(steps: int = 100) -> None:
    """Steps of any sequences, as they come."""
    chance = random.Random(0)
    contexts = (2, 5, 15, 16, 17, 63, 64, 65, 500, 999, 4000, 9999, CONTEXT)
    for _ in range(steps):
        decodes = [(1, chance.choice(contexts)) for _ in range(chance.choice((0, 1, 2, 3, 7, 16, 17)))]
        lengths = [chance.choice(contexts) for _ in range(chance.choice((0, 1, 2, 5)))]
        prefills = [(chance.randint(2, min(length, MOST_ROWS // 5)), length) for length in lengths]
        if decodes or prefills:
            step(*decodes, *prefills)


def main() -> None:
    launches = Launches()
    launches.install()
    start()
    count = len(launches.compiled)
    serve()
    found = Seen(launches.compiled[:count], launches.compiled[count:], launches.grids)
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
