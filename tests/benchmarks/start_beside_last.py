"""How long `baton up` takes until it is ready, its processor time and its memory, beside the last version.

    python -m tests.benchmarks.start_beside_last [ROUNDS] [demo | larger]

The demo model, and Llama of 110 M parameters in bfloat16 with random weights, on a CPU. Versions take turns; the first
start of each, which compiles kernels, is not counted. Memory is the sum of all processes' shares (`Pss`), 5 s after
the stack was ready; an idle stack's processor time is that of the 5 s.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from transformers import AutoModelForCausalLM, LlamaConfig

from tests.benchmarks.library_cost import SHAPE
from tests.campaigns.guard import GuardOptions, checkout_of, last_version, stack_of
from tests.support.paths import DEMO_MODEL, REPOSITORY

IDLE_SECONDS = 5
_TICKS = os.sysconf("SC_CLK_TCK")


class Start(NamedTuple):
    ready_s: float
    processor_s: float
    idle_percent: float
    """Of one core."""
    memory_mib: float


def started(tree: Path, model: Path, folder: Path) -> Start:
    options = GuardOptions(1, (64,), 1, 1, model, ("--kv-memory", "256MiB"), 0.1, 0.1, 1.0, True, None)
    began = time.monotonic()
    with stack_of(tree, folder / f"run-{began}", options):
        ready, at_ready = time.monotonic() - began, _processor_seconds(tree)
        time.sleep(IDLE_SECONDS)
        idle = _processor_seconds(tree) - at_ready
        memory = sum(map(_share_kib, _processes(tree))) / 1024
    return Start(ready, at_ready, 100 * idle / IDLE_SECONDS, memory)


def _processes(tree: Path) -> Iterator[Path]:
    """Those of a stack that was started in `tree`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and (process / "cwd").resolve(strict=True) == tree.resolve():
                yield process
        except OSError:
            continue


def _processor_seconds(tree: Path) -> float:
    total = 0
    for process in _processes(tree):
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def _share_kib(process: Path) -> int:
    lines = (process / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def larger_model(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).bfloat16()
    model.save_pretrained(folder)
    for file in DEMO_MODEL.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    version = last_version((REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Not where this checkout is, as other processes may be there.
        with checkout_of("HEAD", folder / "now") as today, checkout_of(version.commit, folder / "then") as last:
            trees = {version.name: last, "this checkout": today}
            models = {"demo": DEMO_MODEL, "larger": larger_model(folder / "larger")}
            for title in sys.argv[2:] or models:
                found: dict[str, list[Start]] = {each: [] for each in trees}
                for number in range(rounds + 1):
                    for each, tree in trees.items():
                        start = started(tree, models[title], folder)
                        print(f"{title}, {each}: {start}", file=sys.stderr, flush=True)
                        if number:
                            found[each].append(start)
                for each, starts in found.items():
                    columns = zip(Start._fields, zip(*starts, strict=True), strict=True)
                    shown = (
                        f"{key} {statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"
                        for key, values in columns
                    )
                    print(f"{title}, {each}: {', '.join(shown)}, load {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    main()
