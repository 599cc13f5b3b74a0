"""What is asked of a measurement, and what it finds: between the process that measures and whoever shows it. No torch.

The share of a figure is the time that the binding limit allows over the time that was taken (S. Williams, A. Waterman,
D. Patterson, "Roofline", CACM 52(4), 2009), the limits being those that were measured in the same run.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

DeviceChoice = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
OpsName = Literal["auto", "torch", "native", "triton"]
CacheDtype = Literal["auto", "fp8"]
AttentionName = Literal["auto", "triton", "flash-attn"]
"""As `ops_choice` has them, which imports torch."""
Bound = Literal["memory", "compute"]


class StepsAsked(Struct, frozen=True, kw_only=True, tag="steps", forbid_unknown_fields=True):
    """Steps of a model. Batches, contexts and prompts: None: what suits the device."""

    name: str
    """Of the model, for whoever reads."""
    shape: str | None = None
    """One of those that are shipped; weights are made up."""
    model: str | None = None
    """A directory; weights are made up where it has none."""
    device: DeviceChoice = "auto"
    dtype: DtypeName = "auto"
    ops: OpsName = "auto"
    threads: int | None = None
    kv_cache_dtype: CacheDtype = "auto"
    attention: AttentionName = "auto"
    cpu_time: bool = False
    """Count this process's own time on the CPU, instead of the clock's."""
    batches: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    prefills: tuple[int, ...] | None = None
    tp: int = 1
    enforce_eager: bool = False
    seconds: float = 120.0
    """For all measurements together; the model is made before."""
    rank: int = 0
    rendezvous: str | None = None
    """tcp://HOST:PORT where the ranks meet."""


class KernelsAsked(Struct, frozen=True, kw_only=True, tag="kernels", forbid_unknown_fields=True):
    """Single kernels, for the layers of a model."""

    name: str | None = None
    """None where neither shape nor model is given: what suits the device."""
    shape: str | None = None
    model: str | None = None
    device: DeviceChoice = "auto"
    dtype: DtypeName = "auto"
    threads: int | None = None
    kv_cache_dtype: CacheDtype = "auto"
    attention: AttentionName = "auto"
    cpu_time: bool = False
    only: tuple[str, ...] = ()
    """Families; empty: all."""
    rows: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    seconds: float = 60.0


Asked = StepsAsked | KernelsAsked


class Work(Struct, frozen=True):
    """What must be moved and computed."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


class Ceilings(Struct, frozen=True, tag="ceilings"):
    """The device's limits. Each is the best of several ways to reach it, by name. Told twice: before everything, and
    behind it what counts, the best of both times."""

    memory_rates: dict[str, float]
    """Bytes per second, reads and writes together."""
    matrix_rates: dict[str, float]
    """Floating-point operations per second."""

    @property
    def memory(self) -> float:
        return max(self.memory_rates.values())

    @property
    def compute(self) -> float:
        return max(self.matrix_rates.values())

    def best_of(self, other: Ceilings) -> Ceilings:
        """Of two measurements of one device: whatever else a machine does only ever slows it."""
        return Ceilings(_best(self.memory_rates, other.memory_rates), _best(self.matrix_rates, other.matrix_rates))

    def seconds(self, work: Work) -> float:
        """The least that `work` could take."""
        return max(work.bytes / self.memory, work.flops / self.compute)

    def bound(self, work: Work) -> Bound:
        return "memory" if work.bytes / self.memory >= work.flops / self.compute else "compute"

    def share(self, work: Work, seconds: float) -> float:
        """Of the limit that binds."""
        return self.seconds(work) / seconds


def _best(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: max(rate, other.get(name, rate)) for name, rate in one.items()}


class Timed(Struct, frozen=True):
    """Seconds of several runs of the same work."""

    median: float
    best: float
    runs: int


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    device: str
    model: str
    dtype: str
    threads: int | None = None
    """On a CPU."""
    load_average: float | None = None
    """Of the machine when the run began: others slow a CPU's figures."""


class ModelReady(Struct, frozen=True, kw_only=True, tag="model"):
    ops: str
    weight_bytes: int
    """Of this rank's matrices."""
    seconds: float
    """To make or load them."""
    kv_blocks: int
    kv_block_bytes: int
    eager: str | None
    """Why decodes are not replayed from graphs; None: they are."""


StepKind = Literal["decode", "prefill"]


class StepCase(Struct, frozen=True):
    """`batch` sequences that each compute their last token with `context` tokens cached, it included; or a prompt of
    `context` tokens of which none is cached."""

    kind: StepKind
    batch: int
    context: int


class StepMeasured(Struct, frozen=True, kw_only=True, tag="step"):
    case: StepCase
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float
    flops: float
    forward: Timed
    """The decoder alone."""
    whole: Timed | None = None
    """A rank's step from plan to answer, by the clock: bookkeeping and sampling included."""

    @property
    def work(self) -> Work:
        return Work(self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes, self.flops)


class StepSkipped(Struct, frozen=True, tag="skipped-step"):
    case: StepCase
    reason: str


class KernelMeasured(Struct, frozen=True, kw_only=True, tag="kernel"):
    family: str
    case: str
    work: Work
    ours: Timed
    rival: Timed | None = None
    """torch's own operation."""
    rival_name: str = "torch"


class KernelSkipped(Struct, frozen=True, tag="skipped-kernel"):
    family: str
    case: str
    reason: str


class Refused(Struct, frozen=True, tag="refused"):
    """The end of it."""

    reason: str


Finding = Started | Ceilings | ModelReady | StepMeasured | StepSkipped | KernelMeasured | KernelSkipped | Refused
