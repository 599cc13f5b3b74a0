"""Measures single kernels, for the layers of a model's shape, beside torch's own and the ceilings of the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from services.worker.graphs.capture import CudaCapture
from services.worker.memory import free_bytes
from services.worker.ops import OpsUnavailable
from services.worker.ops_choice import create_ops
from services.worker.roofline.attention_cases import decode_attention, prefill_attention
from services.worker.roofline.ceilings import measure_ceilings
from services.worker.roofline.chosen import CannotMeasure, Chosen, chosen, give_back, started
from services.worker.roofline.device_cases import kv_blocks, masks, on_gpus, rejection, verification
from services.worker.roofline.drawing_cases import sampling
from services.worker.roofline.findings import Finding, KernelMeasured, KernelsAsked, KernelSkipped, Timed
from services.worker.roofline.kernel_case import Call, Cases, KernelCase, NothingHere, Situation
from services.worker.roofline.mixture_cases import mixture
from services.worker.roofline.row_cases import activation, linears, norms, rotary
from services.worker.roofline.stopwatch import Stopwatch
from services.worker.torch_ops import TorchOps

FAMILIES: dict[str, Callable[[Situation], Cases]] = {
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
    "rejection": on_gpus(rejection),
    "kv-blocks": on_gpus(kv_blocks),
}
_ROWS = {"cpu": (1, 16, 64), "cuda": (1, 16, 64, 256, 2048)}
_CONTEXTS = {"cpu": (128, 1024), "cuda": (1024, 4096, 8192)}
_CEILINGS_SHARE = 0.1
"""Of the seconds that are given, before the kernels and again behind them."""
_ROOM = 0.5
"""Of the free memory."""
_LEAST_BUDGET = 0.02
"""Seconds that a kernel's runs get at the least."""


def measure_kernels(asked: KernelsAsked) -> Iterator[Finding]:
    """What is found, as it is found. Raises CannotMeasure."""
    with chosen(asked) as made, torch.inference_mode():
        yield started(made)
        watch = Stopwatch(made.device, cpu_time=asked.cpu_time)
        begun = time.perf_counter()
        ceilings = measure_ceilings(watch, made.device, made.dtype, asked.seconds * _CEILINGS_SHARE)
        yield ceilings
        kernels = _Kernels(watch, made.device, begun + asked.seconds * (1 - _CEILINGS_SHARE))
        families = asked.only or tuple(FAMILIES)
        situation = _situation(asked, made)
        for number, family in enumerate(families):
            yield from kernels.measure(family, situation, len(families) - number)
        give_back(made.device)
        again = measure_ceilings(watch, made.device, made.dtype, asked.seconds * _CEILINGS_SHARE)
        yield ceilings.best_of(again)


def _situation(asked: KernelsAsked, made: Chosen) -> Situation:
    kind = made.device.type
    try:
        ours = create_ops("auto", made.device, made.dtype, asked.kv_cache_dtype, asked.attention)
    except OpsUnavailable as error:
        raise CannotMeasure(str(error)) from None
    return Situation(
        config=made.config,
        device=made.device,
        dtype=made.dtype,
        ours=ours,
        torch_ops=TorchOps(made.device, made.dtype),
        rows=_ROWS[kind] if asked.rows is None else asked.rows,
        contexts=_CONTEXTS[kind] if asked.contexts is None else asked.contexts,
        room=int(free_bytes(made.device) * _ROOM),
    )


class _Kernels:
    """Owns the time that is left."""

    def __init__(self, watch: Stopwatch, device: torch.device, end: float) -> None:
        self._watch = watch
        self._device = device
        self._end = end

    def measure(self, family: str, situation: Situation, families_left: int) -> Iterator[Finding]:
        """Each case of the family."""
        share = max(0.0, self._end - time.perf_counter()) / families_left
        # Half of it is spent on making cases.
        budget = max(_LEAST_BUDGET, share / 4 / max(1, len(situation.rows) * len(situation.contexts)))
        try:
            for case in FAMILIES[family](situation):
                yield self._case(family, case, budget)
                give_back(self._device)
        except NothingHere as reason:
            yield KernelSkipped(family, "all", str(reason))

    def _case(self, family: str, case: KernelCase, budget: float) -> Finding:
        if not case.ours:
            return KernelSkipped(family, case.name, f"{2 * case.work.bytes / 2**30:.1f} GiB do not fit")
        rival = self._timed(case.rival, budget) if case.rival else None
        return KernelMeasured(
            family=family,
            case=case.name,
            work=case.work,
            ours=self._timed(case.ours, budget),
            rival=rival,
            rival_name=case.rival_name,
        )

    def _timed(self, calls: list[Call], budget: float) -> Timed:
        """Of one call, in a row of them."""

        def all_calls() -> None:
            for call in calls:
                call()

        taken = self._watch.timed(self._without_launching(all_calls), budget)
        return Timed(taken.median / len(calls), taken.best / len(calls), taken.runs * len(calls))

    def _without_launching(self, work: Callable[[], None]) -> Call:
        """On a GPU replayed from a graph: what Python takes to launch a kernel is no part of it."""
        return CudaCapture(self._device).capture(work) if self._device.type == "cuda" else work
