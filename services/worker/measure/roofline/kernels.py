"""Measures single kernels, for the layers of a model's shape, beside torch's own and the ceilings of the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from services.worker.graphs.capture import CudaCapture
from services.worker.measure.roofline.cases import Call, Cases, KernelCase, KernelContext, NoKernel
from services.worker.measure.roofline.ceilings import Stopwatch, measure_ceilings
from services.worker.measure.roofline.gpu_cases import kv_blocks, masks, on_gpus, sampling, verification
from services.worker.measure.roofline.layer_cases import (
    activation,
    decode_attention,
    linears,
    mixture,
    norms,
    prefill_attention,
    rotary,
)
from services.worker.measure.roofline.measured_rank import (
    CannotMeasure,
    MeasuredModel,
    describe_start,
    open_measured_model,
)
from services.worker.measure.roofline.wire import Finding, KernelMeasured, KernelSkipped, KernelsRequest, Timing
from services.worker.ops.interface import OpsUnavailable
from services.worker.ops.selector import OpsChoice
from services.worker.ops.torch_ops import TorchOps
from services.worker.platforms.interface import Platform

FAMILIES: dict[str, Callable[[KernelContext], Cases]] = {
    "linears": linears,
    "norms": norms,
    "activation": activation,
    "rotary": rotary,
    "decode-attention": decode_attention,
    "prefill-attention": prefill_attention,
    "moe": mixture,
    "sampling": on_gpus(sampling),
    "masks": on_gpus(masks),
    "verification": on_gpus(verification),
    "kv-blocks": on_gpus(kv_blocks),
}
_ROWS = {"cpu": (1, 16, 64), "cuda": (1, 16, 64, 256, 2048)}
_CONTEXTS = {"cpu": (128, 1024), "cuda": (1024, 4096, 8192)}
_CEILINGS_SHARE = 0.1
"""Share of the given seconds for measuring the limits, once before and once after the kernels."""
_ROOM = 0.5
"""Share of the free memory that the kernels may use."""
_MIN_BUDGET = 0.02
"""Seconds that a kernel's runs get at the least."""


def measure_kernels(request: KernelsRequest) -> Iterator[Finding]:
    """Yields findings as they are made. Raises CannotMeasure."""
    with open_measured_model(request) as measured, torch.inference_mode():
        yield describe_start(measured)
        watch = Stopwatch(measured.device, cpu_time=request.cpu_time)
        begun = time.perf_counter()
        ceilings = measure_ceilings(watch, measured.device, measured.dtype, request.seconds * _CEILINGS_SHARE)
        yield ceilings
        kernels = _Kernels(watch, measured.platform, begun + request.seconds * (1 - _CEILINGS_SHARE))
        families = request.only or tuple(FAMILIES)
        context = _kernel_context(request, measured)
        for number, family in enumerate(families):
            yield from kernels.measure(family, context, len(families) - number)
        measured.platform.empty_cache()
        again = measure_ceilings(watch, measured.device, measured.dtype, request.seconds * _CEILINGS_SHARE)
        yield ceilings.best_of(again)


def _kernel_context(request: KernelsRequest, measured: MeasuredModel) -> KernelContext:
    kind = measured.device.type
    choice = OpsChoice("auto", measured.device, measured.dtype, request.kv_cache_dtype, request.attention)
    try:
        ours = measured.platform.create_ops(choice)
    except OpsUnavailable as error:
        raise CannotMeasure(str(error)) from None
    return KernelContext(
        config=measured.config,
        device=measured.device,
        dtype=measured.dtype,
        ours=ours,
        torch_ops=TorchOps(measured.device, measured.dtype),
        rows=_ROWS[kind] if request.rows is None else request.rows,
        contexts=_CONTEXTS[kind] if request.contexts is None else request.contexts,
        room=int(measured.platform.memory().free * _ROOM),
    )


class _Kernels:
    """Owns the time that is left."""

    def __init__(self, watch: Stopwatch, platform: Platform, end: float) -> None:
        self._watch = watch
        self._platform = platform
        self._end = end

    def measure(self, family: str, context: KernelContext, families_left: int) -> Iterator[Finding]:
        """Each case of the family."""
        share = max(0.0, self._end - time.perf_counter()) / families_left
        # Half of it is spent on making cases.
        budget = max(_MIN_BUDGET, share / 4 / max(1, len(context.rows) * len(context.contexts)))
        try:
            for case in FAMILIES[family](context):
                yield self._case(family, case, budget)
                self._platform.empty_cache()
        except NoKernel as reason:
            yield KernelSkipped(family, "all", str(reason))

    def _case(self, family: str, case: KernelCase, budget: float) -> Finding:
        if not case.ours:
            return KernelSkipped(family, case.name, f"{2 * case.work.bytes / 2**30:.1f} GiB do not fit")
        rival = self._timed(case.rival, budget, captured=not case.rival_waits) if case.rival else None
        return KernelMeasured(
            family=family,
            case=case.name,
            work=case.work,
            ours=self._timed(case.ours, budget),
            rival=rival,
            rival_name=case.rival_name,
        )

    def _timed(self, calls: list[Call], budget: float, *, captured: bool = True) -> Timing:
        """Times one call, in a series of them. `captured`: as a graph where the device has any."""

        def all_calls() -> None:
            for call in calls:
                call()

        taken = self._watch.timed(self._without_launching(all_calls) if captured else all_calls, budget)
        return Timing(taken.median / len(calls), taken.best / len(calls), taken.runs * len(calls))

    def _without_launching(self, work: Callable[[], None]) -> Call:
        """On a GPU replayed from a graph: what Python takes to launch a kernel is no part of it."""
        return CudaCapture(self._platform.device).capture(work) if self._platform.captures_graphs else work
