"""What a decode step costs with weights of eight and of four bits, beside bf16, for Llama of 110 M parameters.

    python -m tests.benchmarks.quantized_cost

All have the same dummy weights, native operations and one thread, in one process, and take turns. Processor time, so
that what else runs on the machine matters little; it is not without influence, as all share the memory's bandwidth.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import get_args

from transformers import LlamaConfig

from services.worker.models.loaded_model import QuantizationChoice
from tests.benchmarks.library_cost import SHAPE, backend, step_milliseconds

STEPS = {1: 20, 4: 16, 16: 8, 64: 4}
"""By number of sequences."""
ROUNDS = 5


def main() -> None:
    """Prints a table of milliseconds, and of how many times the tokens of bf16 come out."""
    schemes: tuple[QuantizationChoice, ...] = get_args(QuantizationChoice)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaConfig(**SHAPE).save_pretrained(folder)
        runners = {scheme: backend(folder, quantization=scheme) for scheme in schemes}
        print("| sequences |" + "|".join(f" {scheme} |  " for scheme in schemes) + "|", flush=True)
        for concurrency, steps in STEPS.items():
            took: dict[QuantizationChoice, list[float]] = {scheme: [] for scheme in schemes}
            for _ in range(ROUNDS):
                for scheme, runner in runners.items():
                    took[scheme].append(step_milliseconds(runner, concurrency, steps))
            median = {scheme: statistics.median(took[scheme]) for scheme in schemes}
            # Round by round: what compares was measured at about the same time.
            times = {
                scheme: statistics.median(a / b for a, b in zip(took["auto"], took[scheme], strict=True))
                for scheme in schemes
            }
            cells = "|".join(f" {median[scheme]:.1f} ms | {times[scheme]:.2f} × " for scheme in schemes)
            print(f"| {concurrency} |{cells}|", flush=True)


if __name__ == "__main__":
    main()
