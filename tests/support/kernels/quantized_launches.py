"""Launches of products with weights that stay codes, for `kernel_launches`: of the shapes of Llama 3.1 8B, and of the
experts of Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.ops.quantized import INT4_GROUP, Code
from services.worker.ops.triton.moe.coded_experts import coded_down_row_kernel, coded_up_row_kernel, numbers_kernel
from services.worker.ops.triton.moe.routing import down_row_tile, up_row_tile
from services.worker.ops.triton.quantized_linear import TILE_ROWS, code_tile, coded_linear_kernel
from services.worker.ops.triton.rounded_linear import TILE_ROWS as ROUNDED_TILE_ROWS
from services.worker.ops.triton.rounded_linear import rounded_linear_kernel, rounded_tile
from services.worker.ops.triton.row_ops import norm_shape, round_rows_kernel
from tests.support.kernels.kernel_launches import Launch

_STORED = {"int8": "*i8", "fp8": "*fp8e4nv", "int4": "*u8"}
_ITEM = {"bf16": 2, "fp32": 4}
_OUTPUTS, _INPUTS = 6144, 4096
_HIDDEN, _SIZE, _CHOSEN = 2048, 768, 8


def products() -> Iterator[Launch]:
    """fp8 is for compute capability 8.9 and above."""
    for code in ("int8", "int4", "fp8"):
        for rows in TILE_ROWS:
            yield from _launches(code, rows, "bf16")
    yield from _launches("int4", TILE_ROWS[-1], "fp32")
    yield from _launches("int4", TILE_ROWS[0], "bf16", offsets=True)


def _launches(code: Code, rows: int, kind: str, *, offsets: bool = False) -> Iterator[Launch]:
    group = INT4_GROUP if code == "int4" else _INPUTS
    for target in (80, 90):
        if code == "fp8" and target < 89:
            continue
        tile = code_tile(rows, _ITEM[kind], target // 10, group)
        arguments = {"x": f"*{kind}", "codes": _STORED[code], "scales": "*fp32", "out": f"*{kind}", "rows": "i32"}
        constants: dict[str, object] = {
            "bias": None,
            "INPUTS": _INPUTS,
            "OUTPUTS": _OUTPUTS,
            "GROUP": group,
            "CODE": code,
        }
        of_groups = {"zeros": "*u8"} if code == "int4" and not offsets else {"offsets": "*fp32"} if offsets else {}
        arguments |= of_groups
        constants |= {name: None for name in ("zeros", "offsets") if name not in of_groups}
        yield Launch(
            f"coded_linear_kernel {code} {kind} tiles of {rows} rows{' with offsets' if offsets else ''}",
            coded_linear_kernel,
            {name: arguments[name] for name in coded_linear_kernel.arg_names if name in arguments},
            constants | {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "SWAPPED": tile.swapped},
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            targets=(target,),
            must=frozenset({"cp.async16"} | ({"mma"} if target == 80 else set())),
            must_on_hopper=frozenset({"wgmma"}),
            loads_ahead=True,
            rare=target < 90 or kind == "fp32" or offsets,
        )


def rounded() -> Iterator[Launch]:
    """Products of whole numbers, and what rounds rows for them."""
    block, warps = norm_shape(_INPUTS)
    yield Launch(
        "round_rows_kernel",
        round_rows_kernel,
        {"x": "*bf16", "codes": "*i8", "scales": "*fp32"},
        {"INPUTS": _INPUTS, "BLOCK": block},
        num_warps=warps,
        must=frozenset({"load16"}),
    )
    for rows in ROUNDED_TILE_ROWS:
        for target in (80, 90):
            tile = rounded_tile(rows, target // 10)
            pointers = {"codes": "*i8", "row_scales": "*fp32", "weights": "*i8", "scales": "*fp32", "out": "*bf16"}
            sizes = {"INPUTS": _INPUTS, "OUTPUTS": _OUTPUTS, "ROWS": tile.rows, "COLUMNS": tile.columns}
            yield Launch(
                f"rounded_linear_kernel tiles of {rows} rows",
                rounded_linear_kernel,
                pointers | {"rows": "i32"},
                sizes | {"DEPTH": tile.depth, "SWAPPED": tile.swapped, "bias": None},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                targets=(target,),
                must=frozenset({"cp.async16"} | ({"mma"} if target == 80 else set())),
                must_on_hopper=frozenset({"wgmma"}),
                loads_ahead=True,
                rare=target < 90 or rows != ROUNDED_TILE_ROWS[-1],
            )


def experts() -> Iterator[Launch]:
    """Of few rows, and numbers of all. fp8 is for compute capability 8.9 and above."""
    for code in ("int8", "int4", "fp8"):
        yield from _experts_of(code)


def _experts_of(code: Code) -> Iterator[Launch]:
    arguments = dict.fromkeys(("x", "gated", "out", "numbers"), "*bf16")
    arguments |= {"codes": _STORED[code], "scales": "*fp32", "chances": "*fp32", "experts": "*i32"}
    if code == "int4":
        arguments["zeros"] = "*u8"
    shape = {"HIDDEN": _HIDDEN, "SIZE": _SIZE, "CHOSEN": _CHOSEN, "biases": None}
    up, down = up_row_tile(2), down_row_tile(2)
    for kernel, inputs, own, num_warps in (
        (coded_up_row_kernel, _HIDDEN, shape | {"KIND": "silu", "COLUMNS": up.columns, "DEPTH": up.depth}, 1),
        (coded_down_row_kernel, _SIZE, shape | {"COLUMNS": down.columns, "DEPTH": down.depth}, 1),
        (numbers_kernel, _HIDDEN, {"INPUTS": _HIDDEN, "AT_ONCE": 1024}, 4),
    ):
        constants = own | {"GROUP": INT4_GROUP if code == "int4" else inputs, "CODE": code, "offsets": None}
        yield Launch(
            f"{kernel.__name__} {code}",
            kernel,
            {name: arguments[name] for name in kernel.arg_names if name in arguments},
            constants | ({} if code == "int4" else {"zeros": None}),
            num_warps=num_warps,
            targets=(90,) if code == "fp8" else (80, 90),
            must_not=frozenset() if code == "int4" else frozenset({"barrier"}),
            rare=code != "int8",
        )
