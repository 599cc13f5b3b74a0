"""Requests to a measurement and its findings: between the process that measures and the one that shows them. No torch.

The share of a figure is the time that the binding limit allows over the time that was taken (S. Williams, A. Waterman,
D. Patterson, "Roofline", CACM 52(4), 2009), the limits being those that were measured in the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from shared.blocks import DEFAULT_BLOCK_SIZE, BlockSize

DeviceChoice = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
OpsName = Literal["auto", "torch", "native", "triton"]
CacheDtype = Literal["auto", "fp8", "int8_per_token_head"]
AttentionName = Literal["auto", "triton", "flash-attn"]
"""The names in `ops.interface`, repeated here because that module imports torch."""
Bound = Literal["memory", "compute"]


class StepsRequest(Struct, frozen=True, kw_only=True, tag="steps", forbid_unknown_fields=True):
    """Steps of a model. Batches, contexts and prompts: None: what suits the device."""

    name: str
    """Of the model, as it is shown."""
    shape: str | None = None
    """One of those that are shipped; weights are dummies."""
    model: str | None = None
    """A directory; weights are dummies where it has none."""
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
    block_size: BlockSize = DEFAULT_BLOCK_SIZE
    seconds: float = 120.0
    """For all measurements together; the model is made before."""
    rank: int = 0
    rendezvous: str | None = None
    """tcp://HOST:PORT or file:///PATH where the ranks meet."""


class KernelsRequest(Struct, frozen=True, kw_only=True, tag="kernels", forbid_unknown_fields=True):
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


MeasureRequest = StepsRequest | KernelsRequest


class KernelWork(Struct, frozen=True):
    """What must be moved and computed."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


class Ceilings(Struct, frozen=True, tag="ceilings"):
    """The device's limits. Each is the best of several ways to reach it, by name.

    Reported twice: before everything; and at the end what counts, the best of both times."""

    memory_rates: dict[str, float]
    """Bytes per second, reads and writes together."""
    matrix_rates: dict[str, float]
    """Floating-point operations per second."""

    @property
    def memory(self) -> float:
        """Bytes per second: the best of all ways."""
        return max(self.memory_rates.values())

    @property
    def compute(self) -> float:
        """Floating-point operations per second: the best of all ways."""
        return max(self.matrix_rates.values())

    def best_of(self, other: Ceilings) -> Ceilings:
        """The better of two measurements of one device, as other load only ever slows it."""
        return Ceilings(_best(self.memory_rates, other.memory_rates), _best(self.matrix_rates, other.matrix_rates))

    def seconds(self, work: KernelWork) -> float:
        """The least that `work` could take."""
        return max(work.bytes / self.memory, work.flops / self.compute)

    def bound(self, work: KernelWork) -> Bound:
        """Which of the two limits `work` reaches first."""
        return "memory" if work.bytes / self.memory >= work.flops / self.compute else "compute"

    def share(self, work: KernelWork, seconds: float) -> float:
        """The share of the binding limit at which `work` takes so many seconds."""
        return self.seconds(work) / seconds


def _best(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: max(rate, other.get(name, rate)) for name, rate in one.items()}


class Timing(Struct, frozen=True):
    """Seconds of several runs of the same work."""

    median: float
    best: float
    runs: int


class MeasureStarted(Struct, frozen=True, kw_only=True, tag="started"):
    """The first finding: where and of what it is measured."""

    device: str
    model: str
    dtype: str
    threads: int | None = None
    """On a CPU."""
    load_average: float | None = None
    """Of the machine when the run began: others slow a CPU's figures."""


class ModelReady(Struct, frozen=True, kw_only=True, tag="model"):
    """The model is loaded and steps are measured from here on."""

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
    """One step: what it had to move and compute, and how long it took."""

    case: StepCase
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float
    flops: float
    forward: Timing
    """The decoder alone."""
    whole: Timing | None = None
    """A rank's step from plan to answer, by the clock: bookkeeping and sampling included."""

    @property
    def work(self) -> KernelWork:
        """All that the step must move, and what it computes."""
        return KernelWork(self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes, self.flops)


class StepSkipped(Struct, frozen=True, tag="skipped-step"):
    """A step that was not measured, and why."""

    case: StepCase
    reason: str


class KernelMeasured(Struct, frozen=True, kw_only=True, tag="kernel"):
    """One kernel in one case, beside what it is compared with."""

    family: str
    case: str
    work: KernelWork
    ours: Timing
    rival: Timing | None = None
    """torch's own operation."""
    rival_name: str = "torch"


class KernelSkipped(Struct, frozen=True, tag="skipped-kernel"):
    """A kernel, or a case of one, that was not measured, and why."""

    family: str
    case: str
    reason: str


class MeasureRefused(Struct, frozen=True, tag="refused"):
    """The measurement cannot be done and ends."""

    reason: str


Finding = (
    MeasureStarted
    | Ceilings
    | ModelReady
    | StepMeasured
    | StepSkipped
    | KernelMeasured
    | KernelSkipped
    | MeasureRefused
)


# The model shapes that are shipped with the measurements, as files of Hugging Face's keys.


SHAPES_FOLDER = Path(__file__).with_name("configs")
_SIMULATED = frozenset({"deepseek-v3"})
"""Shapes for the simulated device only: what is measured here knows no latent attention."""


def shape_names() -> list[str]:
    """Names of the shapes that are shipped, sorted."""
    return sorted(path.stem for path in SHAPES_FOLDER.glob("*.json"))


def measured_shape_names() -> list[str]:
    """Those that can be measured, sorted."""
    return [name for name in shape_names() if name not in _SIMULATED]


def shape_file(name: str) -> Path | None:
    """Where its configuration is; None where there is no such shape."""
    return SHAPES_FOLDER / f"{name}.json" if name in shape_names() else None
