"""Launches of the kernels of mixtures of experts, for `kernel_launches`: those of models that there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from services.worker.ops.triton.moe.grouped_products import SUMMED_AT_ONCE, down_tile_kernel, sum_kernel, up_tile_kernel
from services.worker.ops.triton.moe.mixture import down_row_kernel, up_row_kernel
from services.worker.ops.triton.moe.routing import (
    TILE_ROWS,
    count_kernel,
    down_row_tile,
    expert_tile,
    place_kernel,
    route_kernel,
    up_row_tile,
)
from tests.support.kernels.kernel_launches import Launch

_ITEM = {"bf16": 2, "fp32": 4, "i8": 1, "fp8e4nv": 1}


@dataclass(frozen=True)
class _Shape:
    name: str
    hidden: int
    size: int
    experts: int
    chosen: int

    @property
    def constants(self) -> dict[str, Any]:
        return {"HIDDEN": self.hidden, "SIZE": self.size}


_QWEN3 = _Shape("Qwen3-30B-A3B", 2048, 768, 128, 8)
_MIXTRAL = _Shape("Mixtral-8x7B", 4096, 14336, 8, 2)
_QWEN2 = _Shape("Qwen2-57B-A14B", 3584, 2560, 64, 8)
_OF_8_RANKS = _Shape("Qwen3-30B-A3B of 8 ranks", 2048, 96, 128, 8)


def mixtures() -> Iterator[Launch]:
    for launch in _launches():
        for target in launch.targets:
            yield replace(launch, targets=(target,), rare=launch.rare or target < 90)


def _launches() -> Iterator[Launch]:
    yield from _routing(_QWEN3)
    for shape in (_QWEN3, _MIXTRAL, _QWEN2, _OF_8_RANKS):
        yield from _few_rows(shape)
        for rows in TILE_ROWS:
            yield from _tiles(shape, rows, "bf16")
    yield from _tiles(_QWEN3, TILE_ROWS[-1], "fp32")
    for rows in TILE_ROWS:
        yield from _tiles(_QWEN3, rows, "i8")
        yield from _tiles(_QWEN3, rows, "fp8e4nv")


def _routing(shape: _Shape) -> Iterator[Launch]:
    experts = {"EXPERTS": shape.experts, "PADDED": shape.experts, "CHOSEN": shape.chosen}
    yield Launch(
        "routing",
        route_kernel,
        {"logits": "*bf16", "chances": "*fp32", "experts": "*i32"},
        experts | {"PLACES": shape.chosen, "RENORMALISED": True},
        num_warps=1,
        must=frozenset({"load"}),
    )
    yield Launch(
        "picks counted",
        count_kernel,
        {"experts": "*i32", "counts": "*i32", "rows": "i32"},
        {"CHOSEN": shape.chosen, "AT_ONCE": 4096},
        num_warps=8,
        must=frozenset({"load16"}),
    )
    yield Launch(
        "picks placed",
        place_kernel,
        dict.fromkeys(("experts", "counts", "sorted_picks", "tile_experts", "tiles"), "*i32") | {"rows": "i32"},
        experts | {"TILE": 128, "AT_ONCE": 4096},
        num_warps=8,
        must=frozenset({"load16"}),
    )
    yield Launch(
        "picks summed",
        sum_kernel,
        {"parts": "*bf16", "experts": "*i32", "out": "*bf16"},
        {"HIDDEN": shape.hidden, "CHOSEN": shape.chosen, "AT_ONCE": SUMMED_AT_ONCE},
        must=frozenset({"load16", "store16"}),
    )


def _few_rows(shape: _Shape) -> Iterator[Launch]:
    up, down = up_row_tile(2), down_row_tile(2)
    for tile, kernel, own in (
        (up, up_row_kernel, {"CHOSEN": shape.chosen, "KIND": "silu", "LIMIT": 0.0, "biases": None}),
        (down, down_row_kernel, {"CHOSEN": shape.chosen, "biases": None}),
    ):
        pointers = dict.fromkeys(("x", "gate_up", "down", "gated", "out"), "*bf16")
        arguments = pointers | {"chances": "*fp32", "experts": "*i32"}
        yield Launch(
            f"{kernel.__name__} {shape.name}",
            kernel,
            {name: kind for name, kind in arguments.items() if name in kernel.arg_names},
            shape.constants | own | {"COLUMNS": tile.columns, "DEPTH": tile.depth},
            num_warps=1,
            must=frozenset({"load16"}),
            must_not=frozenset({"barrier"}),
            rare=shape is not _QWEN3,
        )


def _tiles(shape: _Shape, rows: int, kind: str) -> Iterator[Launch]:
    """Of so many rows. `kind`: of one byte where rows are rounded, and come out as bfloat16."""
    coded = _ITEM[kind] == 1
    scales = ("row_scales", "scales")
    order = dict.fromkeys(("sorted_picks", "tile_experts", "tiles"), "*i32") | {"picks": "i32", "chances": "*fp32"}
    order |= dict.fromkeys(scales, "*fp32") if coded else {}
    for gated, kernel in ((True, up_tile_kernel), (False, down_tile_kernel)):
        pointers = dict.fromkeys(("x", "gate_up", "gated", "down", "parts"), f"*{kind}")
        pointers |= {"gated" if gated else "parts": "*bf16"} if coded else {}
        for target in (80, 90) if kind != "fp8e4nv" else (90,):
            tile = expert_tile(rows, _ITEM[kind], target // 10, gated=gated)
            looped = (shape.hidden if gated else shape.size) > tile.depth
            yield Launch(
                f"{kernel.__name__} {shape.name} {kind} tiles of {rows} rows",
                kernel,
                {name: word for name, word in (pointers | order).items() if name in kernel.arg_names},
                shape.constants
                | {"biases": None}
                | dict.fromkeys(("zeros", "offsets", "CODE", *(() if coded else scales)))
                | {"GROUP": 1, "RUN": 16}
                | ({"CHOSEN": shape.chosen, "KIND": "silu", "LIMIT": 0.0} if gated else {})
                | {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "SWAPPED": tile.swapped},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                targets=(target,),
                must=frozenset({"cp.async16"} if looped else ()) | frozenset({"mma"} if target == 80 else ()),
                must_on_hopper=frozenset({"mma" if kind == "fp32" else "wgmma"}),
                rare=shape is not _QWEN3 or kind in ("fp32", "fp8e4nv") or rows in TILE_ROWS[1 - coded : -1],
            )
