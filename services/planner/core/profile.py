"""What one engine takes for prompts and for decode steps: measured tables, read with linear interpolation.

NVIDIA Dynamo's SLA planner interpolates the same two tables (prefill time by prompt length, ITL by load and context).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from msgspec import Struct

from shared.messages.lifecycle import EngineReport, WorkerReport
from shared.messages.supervisor import ProfileSource
from shared.models.profile_file import ProfileFile

REACH = 1.5
"""Up to so many times its last place a measured table is continued; what is behind that is not known."""


class ProfileMismatch(Exception):
    """A profile is of other engines than those that run. The text says what differs."""


class EngineProfile(Struct, frozen=True, kw_only=True):
    """The measured tables of one kind of engine. Raises ValueError for tables that cannot be interpolated."""

    model: str
    device: str
    gpus: int = 1
    """Devices of each engine."""
    max_num_seqs: int
    """Most sequences that run at a time."""
    max_batch_tokens: int
    """Most tokens of one step: longer prompts are computed in chunks of it."""
    kv_tokens: int
    """Tokens that the engine's KV memory holds."""
    prompt_lengths: tuple[int, ...]
    """Ascending; at least two."""
    prefill_seconds: tuple[float, ...]
    """Of a prompt of each length, on an engine that does nothing else."""
    batch_sizes: tuple[int, ...]
    """Ascending; at least two."""
    context_lengths: tuple[int, ...]
    """Ascending; at least two."""
    itl_seconds: tuple[tuple[float, ...], ...]
    """From token to token: a row for each batch size, in it a value for each context length."""
    reach: float = inf
    """Up to so many times its last place each table is continued with its last slope."""
    source: ProfileSource = "measured"

    def __post_init__(self) -> None:
        for name in ("prompt_lengths", "batch_sizes", "context_lengths"):
            values = getattr(self, name)
            if len(values) < 2 or values[0] < 0 or any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"{name} = {values}: at least two numbers from 0 up are needed, in ascending order")
        if len(self.prefill_seconds) != len(self.prompt_lengths):
            raise ValueError(f"prefill_seconds: {len(self.prompt_lengths)} values are needed, one per prompt length")
        wide = all(len(row) == len(self.context_lengths) for row in self.itl_seconds)
        if len(self.itl_seconds) != len(self.batch_sizes) or not wide:
            shape = f"{len(self.batch_sizes)} rows of {len(self.context_lengths)}"
            raise ValueError(f"itl_seconds: {shape} values are needed, one per batch size and context length")
        if min(self.prefill_seconds) < 0 or min(min(row) for row in self.itl_seconds) < 0:
            raise ValueError("prefill_seconds and itl_seconds must not be negative")
        if min(self.gpus, self.max_num_seqs, self.max_batch_tokens, self.kv_tokens) < 1:
            raise ValueError("gpus, max_num_seqs, max_batch_tokens and kv_tokens must be at least 1")

    def prefill(self, tokens: float) -> float:
        """Seconds for a prompt of so many tokens that no cache holds."""
        return max(0.0, _interpolated(self.prompt_lengths, self.prefill_seconds, tokens))

    def itl(self, batch: float, context: float) -> float:
        """Seconds from token to token in a batch of so many sequences of so many tokens each, without prompts."""
        at_context = [_interpolated(self.context_lengths, row, context) for row in self.itl_seconds]
        return max(0.0, _interpolated(self.batch_sizes, at_context, batch))

    def unknown(self, prompt: float, context: float) -> str:
        """Which of these lengths is behind what the tables reach, for people; empty where none is."""
        for name, length, places in (
            ("prompts", prompt, self.prompt_lengths),
            ("contexts", context, self.context_lengths),
        ):
            last, end = places[-1], places[-1] * self.reach
            if length > end:
                return f"{name} of {length:,.0f} tokens: measured up to {last:,}, continued up to {end:,.0f}"
        return ""

    @property
    def most_sequences(self) -> float:
        """That run at a time, as far as the tables reach."""
        return min(self.max_num_seqs, self.batch_sizes[-1] * self.reach)

    @property
    def step_seconds(self) -> float:
        """What any step takes, however little is in it."""
        return min(self.prefill_seconds[0], self.itl_seconds[0][0])


def measured_profile(file: ProfileFile, engine: EngineReport, worker: WorkerReport) -> EngineProfile:
    """The tables of a file, for running engines with such reports. Raises ProfileMismatch where these are others.

    What takes less than something smaller did is taken to take as long: noise of the measurement, in which more work
    would seem to be quicker. What did not fit into the measured engine's memory is continued by the slope of the next
    smaller batch, in proportion.
    """
    measured = file.engine
    batch_tokens = worker.max_batch_tokens or measured.max_batch_tokens
    for name, is_so, was in (
        ("model", engine.model.name, measured.model),
        ("device", worker.device, measured.device),
        ("devices of an engine", worker.world_size, measured.gpus),
        ("block size", engine.model.block_size, measured.block_size),
        ("tokens of a step", batch_tokens, measured.max_batch_tokens),
    ):
        if is_so != was:
            raise ProfileMismatch(f"{name}: {was} was profiled, {is_so} runs")
    prefill = sorted((point.prompt_tokens, point.seconds) for point in file.prefill)
    batches = sorted({point.batch_size for point in file.decode})
    contexts = sorted({point.context_tokens for point in file.decode})
    return EngineProfile(
        model=measured.model,
        device=measured.device,
        gpus=measured.gpus,
        max_num_seqs=engine.max_running,
        max_batch_tokens=batch_tokens,
        kv_tokens=engine.blocks_total * engine.model.block_size,
        prompt_lengths=tuple(tokens for tokens, _ in prefill),
        prefill_seconds=tuple(accumulate((seconds for _, seconds in prefill), max)),
        batch_sizes=tuple(batches),
        context_lengths=tuple(contexts),
        itl_seconds=_monotone_rows(file, batches, contexts),
        reach=REACH,
    )


def _monotone_rows(file: ProfileFile, batches: Sequence[int], contexts: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Of each batch size; never less than in a smaller batch or with shorter contexts."""
    measured = {(point.batch_size, point.context_tokens): point.itl_seconds for point in file.decode}
    rows: list[tuple[float, ...]] = []
    smaller, before = batches[0], (0.0,) * len(contexts)
    for batch in batches:
        row: list[float] = []
        for at, context in enumerate(contexts):
            seconds = measured.get((batch, context))
            if seconds is None:  # never of the first batch size
                seconds = row[-1] + (before[at] - before[at - 1]) * batch / smaller
            row.append(max(seconds, before[at], row[-1] if row else 0.0))
        rows.append(tuple(row))
        smaller, before = batch, rows[-1]
    return tuple(rows)


def _interpolated(places: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear between the places; the first value before them, the last slope behind them."""
    if at <= places[0]:
        return values[0]
    right = min(bisect_right(places, at), len(places) - 1)
    left = right - 1
    share = (at - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])
