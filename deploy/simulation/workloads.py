"""Loads that are made: when requests come, how long they are, what they share. The same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from math import cos, pi
from random import Random
from typing import Annotated, Literal

from msgspec import Meta, Struct

from deploy.simulation.prompts import PromptSegment, SimRequest
from services.bench.datasets.lengths import LengthDistribution, drawn_length
from services.bench.datasets.single_turn import chosen_prefixes
from shared.settings import UpOption

ArrivalPattern = Literal["steady", "bursty", "diurnal"]
"""steady: a Poisson process. bursty: one whose gaps vary more (`burstiness`). diurnal: its rate is a wave."""
UNSHARED = 1 << 32
"""Names of segments that only one prompt has begin here; those of shared ones are smaller."""
LOAD = "The load"
"""The heading of its options."""

InputLength = Annotated[
    int,
    Meta(ge=1, description="Prompt tokens, behind the shared beginning if there is one."),
    UpOption(LOAD, unset="1024, or 512 with --concurrency"),
]
LengthRange = Annotated[
    float,
    Meta(ge=0, lt=1, description="How far lengths vary, uniformly."),
    UpOption(LOAD, unset="0.5, or 0 with --concurrency"),
]
"""As in `bench serve`."""
Seed = Annotated[int, Meta(description="The same seed is the same load."), UpOption(LOAD)]


class GeneratedLoad(Struct, frozen=True, kw_only=True):
    """Requests that come by themselves, whether the ones before are answered or not. Lengths in tokens."""

    arrivals: Annotated[
        ArrivalPattern, Meta(description="When requests come: at random, in bursts, or in daily waves."), UpOption(LOAD)
    ] = "steady"
    rate: Annotated[
        float, Meta(gt=0, description="Requests/s, the mean over whole waves."), UpOption(LOAD, "request_rate")
    ] = 4.0
    seconds: Annotated[
        float,
        Meta(gt=0, description="Seconds of traffic, or of a trace."),
        UpOption(LOAD, "duration", unset="300, or all of a trace"),
    ] = 300.0
    burstiness: Annotated[
        float, Meta(gt=0, description="Of bursty arrivals: 1 is Poisson, less is burstier."), UpOption(LOAD)
    ] = 0.25
    """The shape of the gamma distribution of gaps."""
    period: Annotated[float, Meta(ge=1, description="Of diurnal arrivals: seconds of a wave."), UpOption(LOAD)] = 3600.0
    """It begins at its lowest."""
    swing: Annotated[
        float,
        Meta(ge=0, le=1, description="Of diurnal arrivals: share by which the rate varies."),
        UpOption(LOAD),
    ] = 0.8
    input_len: InputLength = 1024
    output_len: Annotated[int, Meta(ge=1, description="Output tokens."), UpOption(LOAD)] = 256
    range_ratio: LengthRange = 0.5
    long_share: Annotated[
        float, Meta(ge=0, le=1, description="Share of requests with long prompts."), UpOption(LOAD)
    ] = 0.0
    long_input_len: Annotated[int, Meta(ge=1, description="Prompt tokens of these."), UpOption(LOAD)] = 16_384
    prefixes: Annotated[
        int, Meta(ge=0, description="Beginnings that prompts share."), UpOption(LOAD, "num_prefixes")
    ] = 0
    prefix_len: Annotated[int, Meta(ge=1, description="Tokens of each."), UpOption(LOAD)] = 1024
    popularity: Annotated[
        float,
        Meta(ge=0, description="Exponent of Zipf's law over them; 0: all alike."),
        UpOption(LOAD, "prefix_popularity"),
    ] = 1.0
    hot_share: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of the requests that have the first of them; 0: as popular as said."),
        UpOption(LOAD),
    ] = 0.0
    """The others have one of the other beginnings, or none where there is only that one."""
    seed: Seed = 0

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
        kinds = Random(self.seed + 3)
        for number, at in enumerate(times):
            length = self.long_input_len if kinds.random() < self.long_share else self.input_len
            own = drawn_length(length, self.range_ratio, random)
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
            if self.hot_share:
                yield self._hot_or_other(random)
                continue
            for which in chosen_prefixes(self.prefixes, self.popularity, self.prefixes * 16, random):
                yield (PromptSegment(which, self.prefix_len),)

    def _hot_or_other(self, random: Random) -> tuple[PromptSegment, ...]:
        if random.random() < self.hot_share:
            return (PromptSegment(0, self.prefix_len),)
        if self.prefixes == 1:
            return ()
        (which,) = random.choices(range(1, self.prefixes), [rank**-self.popularity for rank in range(1, self.prefixes)])
        return (PromptSegment(which, self.prefix_len),)


class ConcurrentLoad(Struct, frozen=True, kw_only=True):
    """A number of clients, each of which sends its next request when it has the answer to the one before.

    The defaults are those of BladeLLM's benchmark, which has 64, 256 and 512 clients: output lengths are normally
    distributed from 20 to 500 tokens.
    """

    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            description="Constant number of open requests instead of a rate; output lengths are normal, 20 to 500.",
        ),
        UpOption(LOAD),
    ]
    count: Annotated[
        int,
        Meta(ge=1, description="Requests of --concurrency, or of a trace."),
        UpOption(LOAD, "num_prompts", unset="1000, or all of a trace"),
    ] = 1000
    input_len: InputLength = 512
    range_ratio: LengthRange = 0.0
    output_len: LengthDistribution = LengthDistribution("normal", 20, 500)
    seed: Seed = 0

    @property
    def description(self) -> dict[str, object]:
        """As `Workload` has it."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return {"workload": "concurrent", **given, "output_len": str(self.output_len)}

    def requests(self) -> Iterator[SimRequest]:
        """As `Workload` has it."""
        random = Random(self.seed)
        for number in range(self.count):
            own = PromptSegment(UNSHARED + number, drawn_length(self.input_len, self.range_ratio, random))
            yield SimRequest(number, 0.0, (own,), self.output_len.draw(random))
