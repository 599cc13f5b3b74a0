"""Launches of the kernels that copy and mask, for models that are served; see
tests/support/kernels/kernel_launches.py."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from services.worker.ops.triton.kv_blocks import WARPS, kv_blocks_kernel
from services.worker.ops.triton.sampling import WORDS, bitmask_kernel
from tests.support.kernels.kernel_launches import Launch


def copies() -> Iterator[Launch]:
    yield Launch(
        "bits put upon 128256 logits",
        bitmask_kernel,
        {"logits": "*fp32", "bits": "*i32", "rows": "*i64"},
        {"VOCAB": 128256, "BITS": 4008, "WORDS": WORDS},
        must=frozenset({"store"}),
    )
    for head_dim, heads, layers in ((128, 8, 32), (80, 32, 32), (256, 4, 34)):
        words = 16 * head_dim * 2 // 4
        for gather in (True, False):
            yield Launch(
                f"blocks {'gathered' if gather else 'scattered'} {head_dim}",
                kv_blocks_kernel,
                {"addresses": "*i64", "blocks": "*i32", "staged": "*i32"},
                {"HEADS": heads, "LAYERS": layers, "KEY_WORDS": words, "VALUE_WORDS": words}
                | {"BLOCK": triton.next_power_of_2(words), "GATHER": gather},
                num_warps=WARPS,
                must=frozenset({"load16", "store16"}),
                rare=head_dim != 128 or not gather,
            )
