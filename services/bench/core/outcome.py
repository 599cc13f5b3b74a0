"""What became of one request of a benchmark, and of all of them. Seconds throughout."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Outcome(NamedTuple):
    """One request. `token_times` are on the clock of `start`; without any, the whole answer came at `end`."""

    start: float
    end: float
    """When the last tokens came."""
    prompt_tokens: int
    output_tokens: int
    token_times: list[float]
    error: str | None = None
    cached_tokens: int | None = None
    """Of the prompt, as the server's usage says; None where it does not say."""
    text: str = ""
    """The answer, where it was asked for."""
    turn: int = 0
    """Which question of its conversation this is, from 0."""

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return (self.token_times[0] if self.token_times else self.end) - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token, the first left out, as vLLM's benchmark has it; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: between frames that carry tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


class Run(NamedTuple):
    """All requests of a benchmark."""

    outcomes: list[Outcome]
    duration: float
    """From the first request's start to the last one's end."""
    peak_concurrency: int
    client_cpu: float
    """Processor seconds of the load generator itself."""

    @property
    def completed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.error is None]

    @property
    def failed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.error is not None]
