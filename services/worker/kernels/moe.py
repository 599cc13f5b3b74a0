"""A mixture of experts: routing, and products of each row with the experts that were chosen for it.

Two ways: few rows (`one_by_one`) each read their own experts (`moe_rows.py`), many are sorted by expert first
(`moe_products.py`). Neither asks the device anything, and no sum depends on which program ends first.

Bytes and FLOPs of n rows that meet m different experts, see `traffic.mixture_bytes` and `traffic.mixture_flops`:

    3 · m · I · hidden · itemsize  +  n · (2 · hidden · itemsize + E · itemsize)
    6 · n · chosen · I · hidden
"""

from __future__ import annotations

from torch import Tensor

from services.worker.kernels.moe_products import mix_tiles
from services.worker.kernels.moe_rows import mix_rows
from services.worker.kernels.moe_tiles import TILE_ROWS, one_by_one
from services.worker.kernels.routing import AT_ONCE, route, sort_picks
from services.worker.ops import Activation


def mixture(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, *, chosen: int, renormalised: bool, kind: Activation
) -> Tensor:
    """See `Ops.mixture`. gate_up [E, 2 * I, hidden], down [E, hidden, I], all of x's dtype."""
    picks = route(logits, chosen=chosen, renormalised=renormalised)
    if one_by_one(len(x), chosen, len(down)):
        return mix_rows(x, picks, gate_up, down, kind=kind)
    return mix_tiles(x, picks, gate_up, down, kind=kind)


def compile_all(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, *, chosen: int, renormalised: bool, kind: Activation
) -> None:
    """Runs every kernel on x's first row, in all sizes of tiles and of sorting: what is compiled now holds nobody up
    later."""
    picks = route(logits[:1], chosen=chosen, renormalised=renormalised)
    mix_rows(x[:1], picks, gate_up, down, kind=kind)
    for most in TILE_ROWS:
        mix_tiles(x[:1], picks, gate_up, down, kind=kind, most=most)
        for at_once in AT_ONCE:
            sort_picks(picks.experts, len(down), most, at_once)
