"""What one engine takes for prompts and for decode steps: measured tables, read with linear interpolation.

NVIDIA Dynamo's SLA planner interpolates the same two tables (prefill time by prompt length, ITL by load and context).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct


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

    @property
    def step_seconds(self) -> float:
        """What any step takes, however little is in it."""
        return min(self.prefill_seconds[0], self.itl_seconds[0][0])


def _interpolated(places: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear between the places; the first value before them, the last slope behind them."""
    if at <= places[0]:
        return values[0]
    right = min(bisect_right(places, at), len(places) - 1)
    left = right - 1
    share = (at - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])
