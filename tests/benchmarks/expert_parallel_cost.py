"""What a rank's share of a mixture costs: half of the columns of all experts, and half of the experts. Run by hand:

    python -m tests.benchmarks.expert_parallel_cost

Processor time of routing and of the experts' products, by the native operations on one thread, by turns; weights, rows
and picks are random.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.models.expert_parallel.local_experts import LocalExperts
from services.worker.models.expert_parallel.placement import spread_evenly
from services.worker.ops.interface import Routing
from services.worker.ops.native.native_ops import NativeOps

CPU = torch.device("cpu")
EXPERTS, CHOSEN, HIDDEN, SIZE = 64, 8, 1024, 512
ROWS = {1: 60, 4: 60, 16: 60, 64: 15, 512: 15}
"""Rows of a step, and how often it is computed."""


def measure(dtype: torch.dtype, rows: int, turns: int) -> dict[str, float]:
    """Seconds of a call, by the kind of parallelism."""
    ops, generator = NativeOps(CPU, dtype, threads=1), torch.Generator().manual_seed(0)
    gate_up = (torch.randn(EXPERTS, 2 * SIZE, HIDDEN, generator=generator) / HIDDEN**0.5).to(dtype)
    down = (torch.randn(EXPERTS, HIDDEN, SIZE, generator=generator) / SIZE**0.5).to(dtype)
    gates, ups = (part[:, : SIZE // 2] for part in gate_up.split(SIZE, dim=1))
    columns = ops.pack_experts(torch.cat((gates, ups), dim=1), down[:, :, : SIZE // 2].contiguous())
    whole = ops.pack_experts(gate_up[: EXPERTS // 2].contiguous(), down[: EXPERTS // 2].contiguous())
    local, routing = LocalExperts.of(spread_evenly(EXPERTS, 2), 0, CPU), Routing(CHOSEN, True)

    def tensor_parallel(x: Tensor, logits: Tensor) -> Tensor:
        return ops.mixture(x, ops.choose_experts(logits, routing), columns, kind="silu")

    def expert_parallel(x: Tensor, logits: Tensor) -> Tensor:
        picks = local.own_picks(ops.choose_experts(logits, routing), logits)
        return ops.mixture(x, picks, whole, kind="silu")

    kinds: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"tensor": tensor_parallel, "expert": expert_parallel}
    spent = dict.fromkeys(kinds, 0.0)
    for turn in range(turns + 1):
        x, logits = (torch.randn(rows, size, generator=generator) for size in (HIDDEN, EXPERTS))
        for name, compute in kinds.items():
            begun = time.process_time()
            compute(x, logits)
            spent[name] += (time.process_time() - begun) * bool(turn)
    return {name: seconds / turns for name, seconds in spent.items()}


def main() -> None:
    """Prints a row for each number of rows and data type."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows, turns in ROWS.items():
            found = measure(dtype, rows, turns)
            print(
                f"{dtype}, {rows} rows: tensor parallel {found['tensor'] * 1e6:.0f} µs, "
                f"expert parallel {found['expert'] * 1e6:.0f} µs, {found['expert'] / found['tensor']:.2f}"
            )


if __name__ == "__main__":
    main()
