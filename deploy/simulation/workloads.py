"""Loads that are made: when requests come, how long they are, what they share. The same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from math import cos, pi
from random import Random
from typing import Literal

from msgspec import Struct

from deploy.simulation.prompts import PromptSegment, SimRequest
from services.bench.datasets.single_turn import chosen_prefixes, drawn_length

ArrivalPattern = Literal["steady", "bursty", "diurnal"]
"""steady: a Poisson process. bursty: one whose gaps vary more (`burstiness`). diurnal: its rate is a wave."""
UNSHARED = 1 << 32
"""Names of segments that only one prompt has begin here; those of shared ones are smaller."""


class GeneratedLoad(Struct, frozen=True, kw_only=True):
    """Requests that come by themselves, whether the ones before are answered or not. Lengths in tokens."""

    rate: float
    """Requests per second, on average over whole waves."""
    seconds: float
    """Requests come for so long."""
    arrivals: ArrivalPattern = "steady"
    burstiness: float = 0.25
    """Of bursty arrivals: the shape of the gamma distribution of gaps; 1 is a Poisson process, less is burstier."""
    period: float = 3600.0
    """Of diurnal arrivals: seconds of one wave, which begins at its lowest."""
    swing: float = 0.8
    """Of diurnal arrivals: how far the rate is above and below its mean, as a share of it; 0 to 1."""
    input_len: int = 1024
    """Of the part of a prompt that no other has."""
    output_len: int = 256
    range_ratio: float = 0.5
    """How far lengths vary, uniformly, as in `bench serve`."""
    prefixes: int = 0
    """Number of beginnings that prompts share; 0: none."""
    prefix_len: int = 0
    popularity: float = 1.0
    """Exponent of Zipf's law over the shared beginnings; 0: all alike."""
    seed: int = 0

    @property
    def concurrency(self) -> int | None:
        """None: as `Workload` has it."""
        return None

    @property
    def description(self) -> dict[str, object]:
        """As `Workload` has it."""
        return {"workload": self.arrivals, **{name: getattr(self, name) for name in self.__struct_fields__}}

    def requests(self) -> Iterator[SimRequest]:
        """As `Workload` has it."""
        random = Random(self.seed)
        times = self._times(Random(self.seed + 1))
        shared = self._prefixes(Random(self.seed + 2))
        for number, at in enumerate(times):
            own = drawn_length(self.input_len, self.range_ratio, random)
            output = drawn_length(self.output_len, self.range_ratio, random)
            segments = (*next(shared), PromptSegment(UNSHARED + number, own))
            yield SimRequest(number, at, segments, output)

    def _times(self, random: Random) -> Iterator[float]:
        match self.arrivals:
            case "steady":
                return self._gamma_times(1.0, random)
            case "bursty":
                return self._gamma_times(self.burstiness, random)
            case "diurnal":
                return self._wave_times(random)

    def _gamma_times(self, shape: float, random: Random) -> Iterator[float]:
        """As `bench serve` has them: gaps are gamma-distributed."""
        now = 0.0
        while (now := now + random.gammavariate(shape, 1.0 / (self.rate * shape))) < self.seconds:
            yield now

    def _wave_times(self, random: Random) -> Iterator[float]:
        """Thinning (Lewis, Shedler 1979): of a process at the highest rate, the share that the rate at the time is."""
        highest = self.rate * (1 + self.swing)
        now = 0.0
        while (now := now + random.expovariate(highest)) < self.seconds:
            rate = self.rate * (1 - self.swing * cos(2 * pi * now / self.period))
            if random.random() * highest < rate:
                yield now

    def _prefixes(self, random: Random) -> Iterator[tuple[PromptSegment, ...]]:
        while True:
            if not self.prefixes:
                yield ()
                continue
            for which in chosen_prefixes(self.prefixes, self.popularity, self.prefixes * 16, random):
                yield (PromptSegment(which, self.prefix_len),)


class ConcurrentLoad(Struct, frozen=True, kw_only=True):
    """A number of clients, each of which sends its next request when it has the answer to the one before.

    The defaults are those of BladeLLM's benchmark, which has 64, 256 and 512 clients: output lengths are normally
    distributed from 20 to 500 tokens.
    """

    concurrency: int
    count: int
    """Requests in all."""
    input_len: int = 512
    range_ratio: float = 0.0
    output_mean: float = 260.0
    output_deviation: float = 80.0
    output_min: int = 20
    output_max: int = 500
    """Lengths beyond the bounds are drawn again."""
    seed: int = 0

    @property
    def description(self) -> dict[str, object]:
        """As `Workload` has it."""
        return {"workload": "concurrent", **{name: getattr(self, name) for name in self.__struct_fields__}}

    def requests(self) -> Iterator[SimRequest]:
        """As `Workload` has it."""
        random = Random(self.seed)
        for number in range(self.count):
            own = PromptSegment(UNSHARED + number, drawn_length(self.input_len, self.range_ratio, random))
            yield SimRequest(number, 0.0, (own,), self._output(random))

    def _output(self, random: Random) -> int:
        while (
            not self.output_min
            <= (length := round(random.gauss(self.output_mean, self.output_deviation)))
            <= (self.output_max)
        ):
            pass
        return length
