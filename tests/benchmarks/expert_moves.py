"""What steps wait for experts that move beside them: steps while they move, and the others of the same run.

    python -m tests.benchmarks.expert_moves --ranks 2 --turns 3

Two ranks of one thread each, or more, serve a Qwen3-MoE from a checkpoint in the page cache to four streams. Where
experts go is decided by the picks of the last two steps, which is chance, so that every decision moves some.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

from services.bench.report import Table
from services.scheduler.core.limits import EngineLimits
from services.worker.models.expert_parallel.settings import ExpertSettings
from tests.benchmarks.expert_ranks import model_config
from tests.support.worker.rank_processes import EngineOfRanks, rank_processes

STREAMS, PROMPT, OUTPUT = 4, 16, 400
INTERVAL = 60
"""Steps from a decision to the next: longer than a rearrangement takes."""


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(model_config()).to(torch.bfloat16).save_pretrained(folder)


class Steps:
    """Milliseconds of steps, by whether experts were on their way."""

    def __init__(self) -> None:
        self.moving: list[float] = []
        self.still: list[float] = []
        self.experts = 0

    def run(self, engine: EngineOfRanks, seed: int) -> None:
        """Serves the streams to their ends. A decision is made at every INTERVAL-th step, and its end is told."""
        for stream in range(STREAMS):
            engine.ask([10 + (seed * 7 + stream * 31 + place * 13) % 1900 for place in range(PROMPT)], OUTPUT)
        over, moving, before = engine.moves[0], False, engine.moves[1]
        while engine.in_flight:
            began = time.perf_counter()
            engine.step()
            took = (time.perf_counter() - began) * 1000
            moving = moving or (engine.steps % INTERVAL == 0)
            if engine.steps > STREAMS + 4:  # prompts are behind
                (self.moving if moving else self.still).append(took)
            if engine.moves[0] != over:
                over, moving = engine.moves[0], False
        self.experts += engine.moves[1] - before


def row(name: str, steps: list[float]) -> tuple[str, ...]:
    found = sorted(steps)
    last = found[int(len(found) * 0.99)]
    return (name, str(len(found)), *(f"{each:.1f}" for each in (statistics.median(found), last, found[-1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    steps = Steps()
    with tempfile.TemporaryDirectory(prefix="baton-moves-") as name:
        write_model(model := Path(name) / "model")
        with rank_processes(given.ranks, Path(name)) as ranks:
            moving = ExpertSettings(parallel=True, balanced=True, redundant=4, window=2, interval=INTERVAL)
            limits = EngineLimits(run_ahead=1, plan_late=False, max_running=STREAMS)
            how = {"tp": given.ranks, "limits": limits, "experts": moving, "kv_memory": 128 << 20}
            engine = ranks.serve(model, ops="native", **how)
            for turn in range(given.turns):
                steps.run(engine, turn)
    heads = ("steps", "number", "median ms", "p99", "longest")
    print("\n".join(Table(heads, [row("while experts move", steps.moving), row("others", steps.still)]).lines()))
    print(f"{engine.moves[0]} rearrangements, {steps.experts} experts moved")


if __name__ == "__main__":
    main()
