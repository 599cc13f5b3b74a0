"""Launches of adapters' low-rank products, for `kernel_launches`: of the shapes of Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.ops.triton.low_rank import (
    COLUMNS,
    SPLIT_INPUTS,
    STEP_RANKS,
    TILE_ROWS,
    expand_kernel,
    program_depth,
    program_ranks,
    shrink_kernel,
)
from tests.support.kernels.kernel_launches import Launch

_INPUTS, _OUTPUTS, _SECOND, _THIRD = 4096, 6144, 4096, 5120
_ROWS = {"ranks": "*i32", "order": "*i32", "tiles": "*i32", "gathered": "i32"}


def products() -> Iterator[Launch]:
    """Of queries, keys and values, with ranks up to 16 and up to 256."""
    for kind in ("bf16", "fp32"):
        for max_rank in (16, 256):
            yield from _launches(kind, max_rank, rare=kind == "fp32" or max_rank == 16)


def _launches(kind: str, max_rank: int, *, rare: bool) -> Iterator[Launch]:
    ranks, depth = program_ranks(max_rank), program_depth(2 if kind == "bf16" else 4)
    parts = {"PARTS": 3, "MAX_RANK": max_rank, "ROWS": TILE_ROWS}
    yield Launch(
        f"shrink_kernel {kind} ranks up to {max_rank}",
        shrink_kernel,
        _ordered(shrink_kernel, {"x": f"*{kind}", "a": f"*{kind}", "lows": "*fp32"} | _ROWS),
        parts | {"INPUTS": _INPUTS, "SPLIT": SPLIT_INPUTS, "RANKS": ranks, "DEPTH": depth},
        must=frozenset({"cp.async16", "mma"}),
        loads_ahead=True,
        rare=rare,
    )
    places = {"OUTPUTS": _OUTPUTS, "SECOND": _SECOND, "THIRD": _THIRD, "LOW_RANKS": -(-max_rank // ranks) * ranks}
    yield Launch(
        f"expand_kernel {kind} ranks up to {max_rank}",
        expand_kernel,
        _ordered(expand_kernel, {"b": f"*{kind}", "lows": "*fp32", "product": f"*{kind}"} | _ROWS),
        parts | places | {"SPLITS": _INPUTS // SPLIT_INPUTS, "COLUMNS": COLUMNS, "STEP": STEP_RANKS},
        num_stages=2,
        must=frozenset({"mma"}),
        rare=rare,
    )


def _ordered(kernel: object, arguments: dict[str, str]) -> dict[str, str]:
    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    return {name: arguments[name] for name in names if name in arguments}
