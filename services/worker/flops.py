"""Which floating-point operations steps need, and what share of the device's peak that is: model FLOPs utilization.

MFU as in A. Chowdhery et al., "PaLM" (2022), appendix B: the operations that the model needs, attention's included and
whatever else is computed left out, by the seconds and the peak of the data sheet. No torch.
"""

from __future__ import annotations

from services.worker.backend import StepOutput
from services.worker.sim.shape import ModelShape
from shared.ids import SequenceId
from shared.messages.worker import StepPlan

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIE": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Operations per second of the data sheets, dense, with numbers of 16 bits; by a part of the device's name, the more
exact before the others."""


def peak_flops(device: str, dtype: str) -> float | None:
    """The peak of a device by its name; None where it is not known, so for numbers of other than 16 bits."""
    if dtype not in ("bfloat16", "float16"):
        return None
    words = device.upper().replace("(", " ").replace(")", " ").replace("-", " ")
    return next((peak for name, peak in PEAKS.items() if f" {name} " in f" {words} "), None)


class FlopsMeter:
    """Owns how far each sequence of one rank is computed, from the plans alone; so what steps need is an estimate: a
    rejected draft is computed and not needed, and nothing else is known of it."""

    def __init__(self, shape: ModelShape, ranks: int, peak: float | None) -> None:
        """`ranks` share each step; `peak` is one rank's, None where it is not known."""
        self.peak = peak
        self._shape, self._ranks = shape, ranks
        self._computed: dict[SequenceId, int] = {}

    def record(self, plan: StepPlan, output: StepOutput | None) -> float:
        """Takes in a plan, in the order of the plans. Returns what it needs of this rank, in operations; `output` is
        None where there was nothing to compute."""
        if plan.step == 0:
            self._computed.clear()
        computed = self._computed
        for released in plan.released:
            computed.pop(released, None)
        for new in plan.new:
            computed[new.sequence] = new.computed
        tokens = pairs = 0
        for work in plan.work:
            before = computed.get(work.sequence, 0)
            tokens += work.count
            pairs += work.count * before + work.count * (work.count + 1) // 2
            computed[work.sequence] = before + work.count
        sampled = () if output is None else output.sampled
        for each in sampled:
            if (more := len(each.tokens) - 1) > 0 and each.sequence in computed:
                tokens += more
                pairs += more * computed[each.sequence]
                computed[each.sequence] += more
        cost = self._shape.load(tokens=tokens, pairs=pairs, read=0, samples=len(sampled))
        return cost.flops / self._ranks
