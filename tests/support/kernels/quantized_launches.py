"""Launches of products with weights that stay codes, for `kernel_launches`: of the shapes of Llama 3.1 8B, and of the
experts of Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.ops.quantized import INT4_GROUP, Code
from services.worker.ops.triton.codes import numbers_kernel
from services.worker.ops.triton.moe.coded_experts import (
    coded_down_row_kernel,
    coded_row_tile,
    coded_up_row_kernel,
)
from services.worker.ops.triton.moe.grouped_products import MAX_INT4_ROWS, down_tile_kernel, up_tile_kernel
from services.worker.ops.triton.moe.routing import TILE_ROWS as EXPERT_TILE_ROWS
from services.worker.ops.triton.moe.routing import coded_tile
from services.worker.ops.triton.quantized_linear import (
    TILE_ROWS,
    CodedProduct,
    code_row_tile,
    code_tile,
    coded_linear_kernel,
    coded_row_kernel,
)
from services.worker.ops.triton.rounded_linear import TILED_ROWS, rounded_linear_kernel, rounded_tile
from services.worker.ops.triton.row_ops import norm_shape, round_rows_kernel
from tests.support.kernels.kernel_launches import Launch

_STORED = {"int8": "*i8", "fp8": "*fp8e4nv", "int4": "*u8"}
_ITEM = {"bf16": 2, "fp32": 4}
_OUTPUTS, _INPUTS = 6144, 4096
_HIDDEN, _SIZE, _CHOSEN = 2048, 768, 8


_SPLIT = ("sums", "arrived")


def _split(splits: int, kind: str) -> dict[str, str]:
    return {"sums": kind, "arrived": "*i32"} if splits > 1 else {}


def products() -> Iterator[Launch]:
    """fp8 is for compute capability 8.9 and above."""
    for code in ("int8", "int4", "fp8"):
        for rows in (1, *TILE_ROWS):
            yield from _launches(code, rows, "bf16")
    yield from _launches("int4", TILE_ROWS[-1], "fp32")
    yield from _launches("int4", TILE_ROWS[0], "bf16", offsets=True)


def _launches(code: Code, rows: int, kind: str, *, offsets: bool = False) -> Iterator[Launch]:
    """Of so many rows; one is multiplied without tensor cores."""
    product = CodedProduct(code, _INPUTS, _OUTPUTS, INT4_GROUP if code == "int4" else _INPUTS)
    of_groups = {"zeros": "*u8"} if code == "int4" and not offsets else {"offsets": "*fp32"} if offsets else {}
    arguments = {"x": f"*{kind}", "codes": _STORED[code], "scales": "*fp32", "out": f"*{kind}"} | of_groups
    constants = product.constants | dict.fromkeys({"bias", "zeros", "offsets"} - set(of_groups))
    for target in (80, 90):
        if code == "fp8" and target < 89:
            continue
        if rows == 1:
            row = code_row_tile(product, zeros=code == "int4")
            yield Launch(
                f"coded_row_kernel {code} {kind}",
                coded_row_kernel,
                {name: arguments[name] for name in coded_row_kernel.arg_names if name in arguments},
                constants | {"COLUMNS": row.columns, "DEPTH": row.depth, "UNROLL": row.unroll},
                num_warps=row.num_warps,
                targets=(target,),
                must=frozenset({"load16"} if code != "int4" else {"load"}),
                must_not=frozenset({"mma", "wgmma"}),
                rare=target < 90 or code == "fp8",
            )
            continue
        tile = code_tile(rows, _ITEM[kind], target // 10, product)
        words = arguments | _split(tile.splits, "*fp32") | {"rows": "i32"}
        yield Launch(
            f"coded_linear_kernel {code} {kind} tiles of {rows} rows{' with offsets' if offsets else ''}",
            coded_linear_kernel,
            {name: words[name] for name in coded_linear_kernel.arg_names if name in words},
            constants
            | {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "SWAPPED": tile.swapped}
            | {"SPLITS": tile.splits}
            | ({} if tile.splits > 1 else dict.fromkeys(_SPLIT)),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            targets=(target,),
            must=frozenset({"cp.async16"} | ({"mma"} if target == 80 else set())),
            must_on_hopper=frozenset({"wgmma" if tile.columns >= 64 else "mma"}),
            loads_ahead=True,
            rare=target < 90 or kind == "fp32" or offsets,
        )


def rounded() -> Iterator[Launch]:
    """Products of codes with codes, and what rounds rows for them. fp8 is for compute capability 8.9 and above."""
    yield from _rounded_to("int8", (80, 90))
    yield from _rounded_to("fp8", (90,))


def _rounded_to(code: Code, targets: tuple[int, ...]) -> Iterator[Launch]:
    block, warps = norm_shape(_INPUTS)
    yield Launch(
        f"round_rows_kernel {code}",
        round_rows_kernel,
        {"x": "*bf16", "codes": _STORED[code], "scales": "*fp32"},
        {"INPUTS": _INPUTS, "BLOCK": block},
        num_warps=warps,
        targets=targets,
        must=frozenset({"load16"}),
    )
    for rows in TILED_ROWS:
        for target in targets:
            tile = rounded_tile(rows, _OUTPUTS, target // 10)
            pointers = dict.fromkeys(("codes", "weights"), _STORED[code]) | {"out": "*bf16"}
            pointers |= dict.fromkeys(("row_scales", "scales"), "*fp32")
            pointers |= _split(tile.splits, "*i32" if code == "int8" else "*fp32")
            sizes = {"INPUTS": _INPUTS, "OUTPUTS": _OUTPUTS, "ROWS": tile.rows, "COLUMNS": tile.columns}
            yield Launch(
                f"rounded_linear_kernel {code} tiles of {rows} rows",
                rounded_linear_kernel,
                {
                    name: kind
                    for name in rounded_linear_kernel.arg_names
                    if (kind := (pointers | {"rows": "i32"}).get(name))
                },
                sizes
                | {"DEPTH": tile.depth, "SPLITS": tile.splits, "SWAPPED": tile.swapped, "bias": None}
                | ({} if tile.splits > 1 else dict.fromkeys(_SPLIT)),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                targets=(target,),
                must=frozenset({"cp.async16"} | ({"mma"} if target == 80 else set())),
                must_on_hopper=frozenset({"wgmma"}),
                loads_ahead=True,
                rare=target < 90 or rows != TILED_ROWS[-1 if code == "int8" else 0],
            )


def experts() -> Iterator[Launch]:
    """Of few rows, and numbers of all. fp8 is for compute capability 8.9 and above."""
    for code in ("int8", "int4", "fp8"):
        yield from _experts_of(code)
        for rows in EXPERT_TILE_ROWS:
            if code != "int4" or rows <= MAX_INT4_ROWS:
                yield from _expert_tiles(code, rows)


def _experts_of(code: Code) -> Iterator[Launch]:
    arguments = dict.fromkeys(("x", "gated", "out", "numbers"), "*bf16")
    arguments |= {"codes": _STORED[code], "scales": "*fp32", "chances": "*fp32", "experts": "*i32", "lines": "i32"}
    if code == "int4":
        arguments["zeros"] = "*u8"
    shape = {"HIDDEN": _HIDDEN, "SIZE": _SIZE, "CHOSEN": _CHOSEN, "biases": None, "CODE": code, "RUN": 16}
    groups = {inputs: INT4_GROUP if code == "int4" else inputs for inputs in (_HIDDEN, _SIZE)}
    up, down = (coded_row_tile(inputs, group) for inputs, group in groups.items())
    wide = min(1024, groups[_HIDDEN])
    for kernel, own, num_warps in (
        (coded_up_row_kernel, {"KIND": "silu", "LIMIT": 0.0, "COLUMNS": up.columns, "DEPTH": up.depth}, up.num_warps),
        (coded_down_row_kernel, {"COLUMNS": down.columns, "DEPTH": down.depth}, down.num_warps),
        (numbers_kernel, {"WIDTH": groups[_HIDDEN], "WIDE": wide, "LINES": 4096 // wide}, 4),
    ):
        constants = shape | own | {"GROUP": groups[_SIZE if kernel is coded_down_row_kernel else _HIDDEN]}
        constants |= {"offsets": None} | ({} if code == "int4" else {"zeros": None})
        yield Launch(
            f"{kernel.__name__} {code}",
            kernel,
            {name: arguments[name] for name in kernel.arg_names if name in arguments},
            {name: value for name, value in constants.items() if name in kernel.arg_names},
            num_warps=num_warps,
            targets=(90,) if code == "fp8" else (80, 90),
            rare=code != "int8",
        )


def _expert_tiles(code: Code, rows: int) -> Iterator[Launch]:
    """Of so many sorted rows."""
    pointers = dict.fromkeys(("x", "gated", "parts"), "*bf16") | dict.fromkeys(("gate_up", "down"), _STORED[code])
    pointers |= dict.fromkeys(("scales", "chances"), "*fp32") | ({"zeros": "*u8"} if code == "int4" else {})
    order = dict.fromkeys(("sorted_picks", "tile_experts", "tiles"), "*i32") | {"picks": "i32"}
    for kernel, inputs in ((up_tile_kernel, _HIDDEN), (down_tile_kernel, _SIZE)):
        gated = kernel is up_tile_kernel
        group = INT4_GROUP if code == "int4" else inputs
        tile = coded_tile(rows, 2, 9, code, group, gated=gated)
        constants: dict[str, object] = {"HIDDEN": _HIDDEN, "SIZE": _SIZE, "CODE": code, "GROUP": group, "RUN": 16}
        constants |= dict.fromkeys(("row_scales", "offsets", "biases", *(() if code == "int4" else ("zeros",))))
        constants |= {"CHOSEN": _CHOSEN, "KIND": "silu", "LIMIT": 0.0} if gated else {}
        yield Launch(
            f"{kernel.__name__} {code} codes, tiles of {rows} rows",
            kernel,
            {name: kind for name, kind in (pointers | order).items() if name in kernel.arg_names},
            constants | {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "SWAPPED": tile.swapped},
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            targets=(90,),
            must=frozenset({"cp.async16", "wgmma"}),
            rare=code == "fp8" or rows not in (EXPERT_TILE_ROWS[0], EXPERT_TILE_ROWS[-1]),
        )
