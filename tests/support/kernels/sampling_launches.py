"""Launches of the kernels that draw tokens, for vocabularies that models have; see
tests/support/kernels/kernel_launches.py."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from services.worker.ops.triton import decode_inputs as moving_back
from services.worker.ops.triton import verification
from services.worker.ops.triton.sampling import AT_ONCE, CHUNK, REGISTERS, WARPS, chunk_kernel, draw_kernel
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from tests.support.kernels.kernel_launches import Instruction, Launch

_WIDE = frozenset[Instruction]({"load16"})


def draws() -> Iterator[Launch]:
    """Of logits as they come from the model, and of those that were changed first."""
    for vocab in (128256, 2048, 32000, 151936, 262144):
        for kind in ("bf16", "fp32"):
            yield from _draws(vocab, kind, rare=(vocab, kind) != (128256, "bf16"))
    yield from _verifications()
    yield from _moves_back()


def _verifications() -> Iterator[Launch]:
    arguments = {"drawn": "*i64", "ids": "*i32", "rows": "*i32", "first": "*i32", "counts": "*i32", "outcome": "*i32"}
    yield Launch(
        "drafts verified",
        verification.verify_kernel,
        arguments | {"sequences": "i32", "places": "i32", "named": "u1"},
        {"BLOCK": verification.BLOCK},
    )


def _moves_back() -> Iterator[Launch]:
    arguments = dict.fromkeys(("short", "positions", "slots", "contexts", "tables", "cells"), "*i32")
    yield Launch(
        "decodes moved back",
        moving_back.move_back_kernel,
        arguments | dict.fromkeys(("count", "stride", "width"), "i32") | {"celled": "u1"},
        {"TOKENS": BLOCK_SIZE, "ROWS": moving_back.ROWS},
    )


def _draws(vocab: int, kind: str, *, rare: bool) -> Iterator[Launch]:
    chunks = -(-vocab // CHUNK)
    sizes = {"VOCAB": vocab, "CHUNKS": chunks, "CHUNK": CHUNK}
    own = {"logits": f"*{kind}"} | dict.fromkeys(("temperature", "peaks", "sums"), "*fp32")
    own |= {"top_k": "*i64", "top_p": "*fp32", "min_p": "*fp32", "keys": "*i64", "listed": "*i32"}
    yield Launch(
        f"chunks of {vocab} logits {kind}",
        chunk_kernel,
        own,
        sizes | {"AT_ONCE": AT_ONCE},
        must=_WIDE,
        rare=rare,
    )
    yield Launch(
        f"draw of {vocab} {kind}",
        draw_kernel,
        own | {"tokens": "*i64"},
        sizes | {"ALL": triton.next_power_of_2(chunks), "AT_ONCE": AT_ONCE},
        num_warps=WARPS,
        maxnreg=REGISTERS,
        must=_WIDE,
        rare=rare,
    )
