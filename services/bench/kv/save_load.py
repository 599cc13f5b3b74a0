"""Blocks from a device to an arena and back: measured by the worker, whose code does it, in its own process."""

from __future__ import annotations

import subprocess
import sys

import msgspec
from msgspec import Struct

from services.bench.kv.blocks import KvOptions
from services.bench.kv.rates import KvTransferRate, PathFailed

MODULE = "services.worker.measure.kv_bench"
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


def measure(options: KvOptions) -> list[KvTransferRate]:
    """Blocks saved from a device and loaded to it, round by round, in a worker's process. Raises PathFailed."""
    shape = options.shape._asdict() | {"rounds": options.rounds, "device": options.device}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in shape.items()]
    command = [sys.executable, "-m", MODULE, "--json", *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise PathFailed(f"not done within {MEASURE_TIMEOUT:.0f} s") from None
    if done.returncode != 0:
        raise PathFailed(last_words(done.stderr))
    said = msgspec.json.decode(done.stdout, type=_Reported)
    return [
        KvTransferRate(name, said.bytes, moved.seconds, said.copy_seconds)
        for name, moved in (("save", said.save), ("load", said.load))
    ]


def last_words(text: str) -> str:
    """The end of a process's last line, which is what an exception or an explanation says."""
    lines = text.strip().splitlines()
    return lines[-1][:WORDS_SHOWN] if lines else "it ended without a word"
