"""How many bytes an engine's ranks give to each other in a step. Run by hand:

    python -m tests.benchmarks.collective_bytes MODEL_DIR TP STAGES [experts]

`experts`: ranks have whole experts of a mixture.
Prints, for a step of one long prompt and for a step of eight decodes, what each rank hands to torch.distributed.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.scheduler.core.limits import EngineLimits
from services.worker.models.expert_parallel.settings import ExpertSettings
from tests.support.worker import rank_process as engine_rank
from tests.support.worker.rank_processes import RankProcesses

COUNTED = ("all_reduce", "gather", "broadcast", "isend")
PROMPT = 64
DECODES = 8


def counting(name: str, counts: Counter[str]) -> Callable[..., Any]:
    function = getattr(dist, name)

    def call(tensor: Any, *args: Any, **options: Any) -> Any:
        counts[f"{name} {tensor.nbytes} B"] += 1
        return function(tensor, *args, **options)

    return call


def rank(number: str) -> None:
    counts: Counter[str] = Counter()
    for name in COUNTED:
        setattr(dist, name, counting(name, counts))
    step = engine_rank.Rank.step

    def counted(self: engine_rank.Rank, plan: Any) -> Any:
        counts.clear()
        drew = step(self, plan)
        rows = sum(work.count for work in plan.work)
        print(f"rank {number}, {rows} rows: {dict(counts)}", file=sys.stderr)
        return drew

    engine_rank.Rank.step = counted  # type: ignore[method-assign]
    engine_rank.main(number)


def main(model: str, tp: str, stages: str, experts: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = RankProcesses(int(tp) * int(stages), Path(folder), rank)
        try:
            limits = EngineLimits(run_ahead=0, max_batch_tokens=PROMPT, max_running=DECODES)
            placed = ExpertSettings(parallel=bool(experts))
            how = {"tp": int(tp), "stages": int(stages)}
            engine = ranks.serve(Path(model), **how, ops="native", limits=limits, experts=placed)
            for number in range(DECODES):
                engine.ask([5 + number] * (PROMPT // DECODES), 4)
            engine.run()
        finally:
            ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
