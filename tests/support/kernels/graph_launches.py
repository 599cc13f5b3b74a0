"""The launches around captured decodes: what they read, and where what they drew goes; see
tests/support/kernels/kernel_launches.py."""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.graphs.decode_inputs import PADDING_CONTEXT, PADDING_SLOT
from services.worker.ops.triton.decode_inputs import AT_ONCE, BLOCK, feed_kernel, pad_decodes_kernel
from tests.support.kernels.kernel_launches import Launch


def graphs() -> Iterator[Launch]:
    numbers = [name for name in pad_decodes_kernel.arg_names if name not in ("SLOT", "CONTEXT", "AT_ONCE")]
    yield Launch(
        "decodes to be replayed",
        pad_decodes_kernel,
        {name: "i32" if name in ("count", "width", "into_width") else "*i32" for name in numbers},
        {"SLOT": PADDING_SLOT, "CONTEXT": PADDING_CONTEXT, "AT_ONCE": AT_ONCE},
        num_warps=2,
        rare=True,
    )
    for tokens in ("i64", "i32"):
        yield Launch(
            f"feeding tokens in {tokens}",
            feed_kernel,
            dict.fromkeys(("table", "cells", "rows"), "*i32") | {"tokens": f"*{tokens}", "count": "i32"},
            {"NAMED": tokens == "i64", "BLOCK": BLOCK},
            num_warps=4,
            rare=True,
        )
