"""Launches of products of few rows, for models that are served; see tests/support/kernels/kernel_launches.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from services.worker.ops.triton.few_rows import MAX_ROWS, few_rows_kernel, gated_tile, one_row_kernel, rows_tile
from tests.support.kernels.kernel_launches import Launch

# Llama-3.1-8B's and one of Qwen2.5-0.5B, whose inputs are no multiple of a tile's.
_SHAPES = {"output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "small": (1152, 896)}


def products() -> Iterator[Launch]:
    """For Hopper only, as they are launched."""
    for name, (outputs, inputs) in _SHAPES.items():
        for rows, gated in product((1, MAX_ROWS), (None, "silu") if name == "gate_up" else (None,)):
            tile = gated_tile(rows) if gated else rows_tile(rows, outputs, inputs)
            constants: dict[str, Any] = {"INPUTS": inputs, "OUTPUTS": outputs // (2 if gated else 1), "bias": None}
            constants |= {"COLUMNS": tile.columns, "DEPTH": tile.depth, "GATED": gated, "LIMIT": 0.0}
            arguments = dict.fromkeys(("x", "weight", "out"), "*bf16")
            one = rows == 1
            yield Launch(
                f"{name}: {'gated ' if gated else ''}product of {rows} rows",
                one_row_kernel if one else few_rows_kernel,
                arguments if one else arguments | {"rows": "i32"},
                constants if one else constants | {"ROWS": tile.rows, "LINES": tile.lines},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                targets=(90,),
                must=frozenset({"load16"} if one else {"cp.async16"}),
                must_not=frozenset({"cp.async"}) if one else frozenset(),
                loads_ahead=not one,
                reads_early=one,
                rare=name == "small",
            )
