"""Profiles of imagined engines for tests of the planner, and what such engines report."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from services.planner.core.load_meter import FleetObservation
from services.planner.core.profile import EngineProfile
from shared.ids import EngineId
from shared.messages.lifecycle import EngineReport, LatencySums, Role
from shared.models.profile_file import DecodePoint, MeasuredEngine, PrefillPoint, ProfileFile
from tests.support.engines.coordinator_events import engine

PROFILE = EngineProfile(
    model="m",
    device="imagined",
    max_num_seqs=64,
    max_batch_tokens=2048,
    kv_tokens=200_000,
    prompt_lengths=(16, 1024, 4096),
    prefill_seconds=(0.005, 0.035, 0.125),
    batch_sizes=(1, 64),
    context_lengths=(128, 4096),
    itl_seconds=((0.005, 0.006), (0.008, 0.02)),
)
"""Steps of 5 ms at least; a prompt token costs 30 µs."""

PROFILE_FILE = ProfileFile(
    engine=MeasuredEngine(
        model="m", device="sim", gpus=2, block_size=16, max_num_seqs=64, max_batch_tokens=2048, kv_tokens=200_000
    ),
    prefill=tuple(
        PrefillPoint(prompt_tokens=tokens, seconds=seconds)
        for tokens, seconds in ((4096, 0.125), (16, 0.006), (128, 0.005), (1024, 0.035))
    ),
    decode=tuple(
        DecodePoint(batch_size=batch, context_tokens=context, itl_seconds=seconds)
        for batch, context, seconds in (
            (1, 128, 0.005), (1, 2048, 0.006), (1, 4096, 0.008), (8, 128, 0.004), (8, 2048, 0.016), (64, 128, 0.02)
        )
    ),
)  # fmt: skip
"""A measurement in which a longer prompt and a larger batch seemed to be quicker, and some did not fit in memory."""


def report(
    requests: int, *, waiting: int = 0, role: Role = "mixed", prompt: int = 1024, output: int = 100, **latency: Any
) -> EngineReport:
    """Of an engine that has answered so many requests; each waited 80 ms, and 8 ms for each later token."""
    life = engine("engine-1", waiting=waiting, role=role)
    sums = LatencySums(
        first_tokens=requests,
        first_token_seconds=requests * latency.get("ttft", 0.08),
        later_tokens=requests * (output - 1),
        later_token_seconds=requests * (output - 1) * latency.get("itl", 0.008),
    )
    assert life.engine is not None
    return replace(life.engine, tokens=requests * output, prompt_tokens=requests * prompt, latency=sums)


def seen(*reports: EngineReport, starting: int = 0, queued: int = 0) -> FleetObservation:
    """A fleet of such engines; those that start are plain ones."""
    present: dict[Role, int] = {"mixed": starting}
    for each in reports:
        present[each.role] = present.get(each.role, 0) + 1
    return FleetObservation(
        {EngineId(f"engine-{number + 1}"): each for number, each in enumerate(reports)}, present, queued
    )
