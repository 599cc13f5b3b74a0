"""Launches of the kernels of layers with states, for models that are served; see
tests/support/kernels/kernel_launches.py."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from services.worker.ops.torch_mixers.convolution import CHUNK as TOKENS
from services.worker.ops.triton.states.chunks import (
    COLUMNS_AT_ONCE,
    DELTA_WARPS,
    ELEMENTS_AT_ONCE,
    NUMBERS_AT_ONCE,
    delta_chunks_kernel,
    hand_on_chunks_kernel,
)
from services.worker.ops.triton.states.convolution import CHANNELS_AT_ONCE, TOKENS_AT_ONCE, convolution_kernel
from services.worker.ops.triton.states.one_token import elements_at_once, one_token_kernel
from services.worker.ops.triton.states.recurrent import CHANNELS_OF_PROGRAM as UNITS_OF_PROGRAM
from services.worker.ops.triton.states.recurrent import recurrent_kernel
from services.worker.ops.triton.states.selective import (
    BLOCK,
    CHANNELS_OF_PROGRAM,
    CHUNK,
    hand_on_kernel,
    selective_kernel,
)
from tests.support.kernels.kernel_launches import Launch

_ROWS = {"slots": "*i64", "starts": "*i32", "lengths": "*i32"}


def states() -> Iterator[Launch]:
    # Mamba-2.8B and Falcon Mamba 7B; LFM2-1.2B's convolution; Mamba-2 2.7B; Qwen3-Next; MiniMax-Text-01.
    for channels in (5120, 8192):
        yield from _selections(channels, rare=channels != 5120)
        yield from _convolutions(channels, 4, gated=False, rare=channels != 5120)
    yield from _convolutions(2048, 3, gated=True, rare=True)
    yield Launch(
        "recurrent units 2560",  # RecurrentGemma 2B
        recurrent_kernel,
        {"projected": "*bf16", "out": "*bf16", "stride": "i32", "out_stride": "i32"}
        | dict.fromkeys(("decay", "states"), "*fp32")
        | _ROWS,
        {"CHANNELS": 2560, "BLOCK": UNITS_OF_PROGRAM},
        num_warps=1,
        rare=True,
    )
    yield from _chunks(80, 64, 128)
    yield from _chunks(32, 128, 128)
    yield _one_token("Mamba-2", 80, 64, 1, 128, delta=False)
    yield _one_token("MiniMax-Text-01", 64, 128, 64, 128, delta=False, even=True)
    yield _one_token("delta", 32, 128, 16, 128, delta=True)
    yield _one_token("Kimi-Linear", 32, 128, 32, 128, delta=True, by_element=True)
    yield _one_token("Ling 3", 32, 128, 32, 128, delta=True, by_element=True, bounded=True)


def _selections(channels: int, *, rare: bool) -> Iterator[Launch]:
    sizes = {"CHANNELS": channels, "DIM": 16}
    numbers = dict.fromkeys(("decay", "skip", "step_bias", "states", "chunks", "times"), "*fp32")
    for name, cut, reads in (("whole", None, True), ("of no state", CHUNK, False), ("of a chunk", CHUNK, True)):
        yield Launch(
            f"selective space {channels} {name}",
            selective_kernel,
            {"projected": "*bf16", "out": "*bf16", "stride": "i32", "out_stride": "i32"} | numbers | _ROWS,
            sizes | {"DIM_PAD": 16, "BLOCK": CHANNELS_OF_PROGRAM, "CHUNK": cut, "READS": reads},
            num_warps=1,
            rare=rare,
        )
    del numbers["skip"], numbers["step_bias"]
    yield Launch(
        f"selective space {channels} from chunk to chunk",
        hand_on_kernel,
        numbers | _ROWS,
        sizes | {"BLOCK": BLOCK, "CHUNK": CHUNK},
        rare=rare,
    )


def _convolutions(channels: int, kernel: int, *, gated: bool, rare: bool) -> Iterator[Launch]:
    for tokens, warps in ((1, 1), (TOKENS_AT_ONCE, 4)):
        yield Launch(
            f"convolution {channels} of {tokens} tokens",
            convolution_kernel,
            {"inputs": "*bf16", "out": "*bf16", "stride": "i32", "out_stride": "i32"}
            | dict.fromkeys(("weight", "bias", "windows"), "*fp32")
            | _ROWS,
            {"CHANNELS": channels, "KERNEL": kernel, "GATED": gated, "TOKENS": tokens, "BLOCK": CHANNELS_AT_ONCE},
            num_warps=warps,
            rare=rare,
        )


def _chunks(heads: int, dim: int, state: int) -> Iterator[Launch]:
    counted = {"turn_starts": "*i32", "chunk_counts": "*i32"}
    yield Launch(
        f"state space {heads} from chunk to chunk",
        hand_on_chunks_kernel,
        dict.fromkeys(("states", "decay_factors", "added"), "*fp32") | counted,
        {"HEADS": heads, "NUMBERS": dim * state, "BLOCK": NUMBERS_AT_ONCE},
        must=frozenset({"load16", "store16"}),
        rare=heads != 80,
    )
    matrices = ("states", "values", "forgotten", "reading", "within", "writing", "left", "out")
    for by_element in (False, True):
        yield Launch(
            f"delta net {heads} from chunk to chunk{' by element' * by_element}",
            delta_chunks_kernel,
            dict.fromkeys(matrices, "*fp32") | counted,
            {"HEADS": heads, "DIM": dim, "STATE": state, "ROWS": TOKENS, "BLOCK": ELEMENTS_AT_ONCE}
            | {"NUMBERS": COLUMNS_AT_ONCE, "BY_ELEMENT": by_element},
            num_warps=DELTA_WARPS,
            num_stages=1,
            rare=heads != 32 or by_element,
        )


def _one_token(
    name: str,
    heads: int,
    dim: int,
    groups: int,
    state: int,
    *,
    delta: bool,
    even: bool = False,
    by_element: bool = False,
    bounded: bool = False,
) -> Launch:
    return Launch(
        f"one token {name}",
        one_token_kernel,
        {
            "steps": "*bf16",
            "slots": "*i64",
            "lengths": "*i32",
            "steps_stride": "i32",
            "root": "fp32",
            "most_written": "fp32",
            "lower_bound": "fp32",
        }
        | dict.fromkeys(("seen", "decay", "step_bias", "skip", "states", "out"), "*fp32"),
        {"HEADS": heads, "GROUPS": groups, "DIM": dim, "STATE": state, "STATE_PAD": triton.next_power_of_2(state)}
        | {"BLOCK": elements_at_once(state), "DELTA": delta, "EVEN": even, "BY_ELEMENT": by_element}
        | {"BOUNDED": bounded},
        rare=even or by_element,
    )
