"""What is measured, in which order, and how long each may take. Nothing is run here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal, NamedTuple

from tests.support.paths import REPOSITORY

StageName = Literal["tests", "roofline", "kernels", "serve", "peers", "idle", "graphs"]
Size = Literal["full", "tiny"]


class Run(NamedTuple):
    """One process: arguments of this Python. What it writes is called as the run, with an ending."""

    name: str
    argv: tuple[str, ...]


class Stage(NamedTuple):
    name: StageName
    runs: tuple[Run, ...]
    seconds: float
    """For all of its runs together."""


BIG, MIXED, SMALL = "llama-3.1-8b", "qwen3-30b-a3b", "qwen3-0.6b"


def stages(size: Size, folder: Path) -> tuple[Stage, ...]:
    """Results are to be written to `folder`. `serve` is the part of `peers` that needs no transformers."""
    return _full(folder) if size == "full" else _tiny(folder)


def left_to_itself(name: StageName) -> bool:
    """Whether a stage is run only if it is named: another one measures the same and more."""
    return name == "serve"


def _full(folder: Path) -> tuple[Stage, ...]:
    targets = ("--batch=1,16,256", "--context=1024", "--prefill=8192", "--dtype=bfloat16", "--device=cuda")
    wide = ("--batch=1,16,64,256,512", "--context=128,1024,8192,32768", "--prefill=512,2048,8192", "--dtype=bfloat16")
    decodes = ("--batch=1,16,64,256", "--context=1024", "--prefill=none", "--dtype=bfloat16", "--device=cuda")
    return (
        Stage("tests", (_tests(folder, *_in_processes(_PROCESSES), *_on_gpus()),), 560),
        Stage(
            "roofline",
            (
                _roofline(folder, "roofline-8b", f"--shape={BIG}", *wide, "--device=cuda", "--seconds=75"),
                _roofline(folder, "roofline-small", f"--shape={SMALL}", *targets, "--seconds=20"),
                _roofline(folder, "roofline-mixture", f"--shape={MIXED}", *targets, "--seconds=30"),
            ),
            420,
        ),
        Stage(
            "kernels",
            (
                _kernels(folder, "kernels-8b", f"--shape={BIG}", "--device=cuda", "--seconds=75"),
                _kernels(folder, "kernels-mixture", f"--shape={MIXED}", "--device=cuda", "--only=moe", "--seconds=20"),
            ),
            300,
        ),
        Stage("serve", (_peers(folder, "serve", *_BIG_LOAD, "--peer=none"),), 300),
        Stage("peers", (_peers(folder, "peers", *_BIG_LOAD),), 480),
        Stage(
            "idle",
            (
                _idle(folder, "idle-8b", *("--model", BIG, "--load-format=dummy"), "--run-ahead=2,0", *_SEQUENCES),
                _idle(folder, "idle-demo", "--run-ahead=2,1,0", *_SEQUENCES),
            ),
            300,
        ),
        Stage(
            "graphs",
            (
                _roofline(folder, "graphs-on", f"--shape={BIG}", *decodes, "--seconds=15", plot=False),
                _roofline(
                    folder, "graphs-off", f"--shape={BIG}", *decodes, "--seconds=15", "--enforce-eager", plot=False
                ),
            ),
            180,
        ),
    )


_SEQUENCES = ("--sequences=1,16,64,256", "--seconds=3", "--max-model-len=4096", "--devices=cuda")
_BIG_LOAD = (
    *("--model", BIG, "--load-format=dummy", "--device=cuda", "--dtype=bfloat16"),
    *("--max-concurrency=256,inf", "--num-prompts=1000", "--random-input-len=512", "--random-output-len=128"),
    "--warmup=32",
)
_BIG_UP = "--max-num-seqs 512 --max-model-len 4096 --max-batch-tokens 8192"


def _tiny(folder: Path) -> tuple[Stage, ...]:
    """Every stage on this machine's processor, to see that all of it works."""
    steps = ("--shape=demo", "--device=cpu", "--threads=1", "--batch=1,2", "--context=64", "--seconds=2")
    load = (
        *("--device=cpu", "--threads=1", "--max-concurrency=2,inf", "--num-prompts=4", "--random-input-len=16"),
        *("--random-output-len=8", "--compare=2"),
    )
    kernels = ("--shape=demo", "--device=cpu", "--threads=1", "--rows=1", "--context=32", "--seconds=1")
    return (
        Stage("tests", (_tests(folder, "tests/gpu/test_roofline_on_gpu.py"),), 300),
        Stage("roofline", (_roofline(folder, "roofline-demo", *steps, "--prefill=32"),), 300),
        Stage("kernels", (_kernels(folder, "kernels-demo", *kernels, "--only=norms,decode-attention"),), 300),
        Stage("serve", (_peers(folder, "serve", *load, "--peer=none"),), 300),
        Stage("peers", (_peers(folder, "peers", *load),), 300),
        Stage(
            "idle",
            (_idle(folder, "idle-sim", "--devices=sim", "--run-ahead=2,0", "--sequences=1,2", "--seconds=0.5"),),
            300,
        ),
        Stage(
            "graphs",
            (
                _roofline(folder, "graphs-on", *steps, "--prefill=none", plot=False),
                _roofline(folder, "graphs-off", *steps, "--prefill=none", "--enforce-eager", plot=False),
            ),
            300,
        ),
    )


_PROCESSES = 8
"""Of tests side by side: most of their time is the compiler's."""
_KERNELS = "tests.support.kernels.kernel_device"


def _tests(folder: Path, *chosen: str) -> Run:
    flags = ("-q", "-p", "no:cacheprovider", "--durations=10", f"--junitxml={folder / 'tests'}.xml")
    return Run("tests", ("-m", "pytest", *flags, *chosen))


def _in_processes(count: int) -> tuple[str, ...]:
    """Where pytest-xdist is there. Processes whose GPU is of no use any more are replaced
    (tests/support/worker/broken_devices.py)."""
    if not _is_there("xdist"):
        return ()
    return (f"--numprocesses={count}", "--dist=worksteal", "--max-worker-restart=100")


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _on_gpus() -> list[str]:
    """All tests of a GPU, and those of kernels, which run in an interpreter elsewhere."""
    paths = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    needed = (path for path in paths if path.parent.name == "gpu" or _KERNELS in path.read_text())
    return [str(path.relative_to(REPOSITORY)) for path in needed]


def _roofline(folder: Path, name: str, *flags: str, plot: bool = True) -> Run:
    drawn = (f"--plot={folder / name}.png",) if plot and _is_there("matplotlib") else ()
    return Run(name, (*_bench("roofline"), *flags, *drawn, *_written(folder, name)))


def _kernels(folder: Path, name: str, *flags: str) -> Run:
    return Run(name, (*_bench("kernels"), *flags, *_written(folder, name)))


def _peers(folder: Path, name: str, *flags: str) -> Run:
    up = ("--up", _BIG_UP) if BIG in flags else ()
    log = f"--output-log={folder / name}.log"
    return Run(name, (*_bench(*up, "peers"), *flags, log, *_written(folder, name)))


def _idle(folder: Path, name: str, *flags: str) -> Run:
    return Run(name, (*_bench("idle"), *flags, *_written(folder, name)))


def _bench(*command: str) -> tuple[str, ...]:
    return ("-m", "deploy.cli", "bench", *command)


def _written(folder: Path, name: str) -> tuple[str, ...]:
    return (f"--output-json={folder / name}.json",)
