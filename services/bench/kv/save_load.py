"""Blocks from a device to an arena and back: measured by the worker, whose code does it, in its own process."""

from __future__ import annotations

import subprocess
import sys

import msgspec
from msgspec import Struct

from services.bench.kv.blocks import KvShape
from services.bench.kv.rates import KvTransferRate, NotMeasured

MODULE = "services.worker.measure.kv_bench"
SAVE, LOAD = "save", "load"
MEASURE_TIMEOUT = 600.0
WORDS_SHOWN = 300


class _Rounds(Struct):
    seconds: list[float]


class _Reported(Struct):
    """The output of that process."""

    bytes: int
    copy_seconds: list[float]
    save: _Rounds
    load: _Rounds


def measure(shape: KvShape, rounds: int, device: str) -> list[KvTransferRate | NotMeasured]:
    """Blocks saved from `device` and loaded to it, `rounds` times, measured in a worker's process."""
    flags = {
        "layers": shape.layers,
        "kv-heads": shape.kv_heads,
        "head-dim": shape.head_dim,
        "dtype": shape.dtype,
        "blocks": shape.blocks,
        "rounds": rounds,
        "device": device,
    }
    command = [sys.executable, "-m", MODULE, "--json", *(f"--{flag}={value}" for flag, value in flags.items())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return _missing(f"not done within {MEASURE_TIMEOUT:.0f} s")
    if done.returncode != 0:
        return _missing(last_words(done.stderr))
    said = msgspec.json.decode(done.stdout, type=_Reported)
    return [
        KvTransferRate(name, said.bytes, moved.seconds, said.copy_seconds)
        for name, moved in ((SAVE, said.save), (LOAD, said.load))
    ]


def last_words(text: str) -> str:
    """The end of a process's last line, which is what an exception or an explanation says."""
    lines = text.strip().splitlines()
    return lines[-1][:WORDS_SHOWN] if lines else "it ended without a word"


def _missing(reason: str) -> list[KvTransferRate | NotMeasured]:
    return [NotMeasured(SAVE, reason), NotMeasured(LOAD, reason)]
