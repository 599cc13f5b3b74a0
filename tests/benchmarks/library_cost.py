"""What a decode step costs where `transformers` computes a model, beside our own code, for Llama of 110 M parameters.

    python -m tests.benchmarks.library_cost

Both have the same dummy weights, native operations and one thread, in one process, and take turns. Processor time, so
that what else runs on the machine matters little.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from transformers import LlamaConfig

from services.worker.executor.host_runner import HostRunner
from services.worker.models.loaded_model import ModelImpl
from tests.support.worker.library_situations import prompt
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

CONCURRENCIES = (1, 16)
PROMPT, STEPS, ROUNDS = 16, 14, 2
SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
}


def backend(folder: Path, **settings: Any) -> HostRunner:
    """`settings`: arguments of `create_backend`."""
    return tiny_backend(
        folder,
        **settings,
        load_format="dummy",
        dtype="bfloat16",
        ops="native",
        max_model_len=512,
        kv_memory_bytes=256 << 20,
        max_batch_tokens=512,
        max_num_seqs=64,
    )


def step_milliseconds(runner: HostRunner, concurrency: int, steps: int) -> float:
    """The median of `steps` steps of `concurrency` sequences that all decode."""
    runner.reset()
    driver = Driver(runner)
    # Whoever comes first decodes while others' prompts are computed.
    sequences = [driver.add(prompt(PROMPT, seed), steps + 2 + concurrency // 8) for seed in range(concurrency)]
    return median_milliseconds(driver, sequences, steps)


def median_milliseconds(driver: Driver, sequences: list[Sequence], steps: int) -> float:
    """Of `steps` steps in which all `sequences` decode, in processor time."""
    while not all(sequence.output for sequence in sequences):
        driver.step()
    took = []
    for _ in range(steps):
        started = time.process_time()
        driver.step()
        took.append(time.process_time() - started)
    return statistics.median(took) * 1e3


def main() -> None:
    """Prints a line for each number of sequences."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaConfig(**SHAPE).save_pretrained(folder)
        runners = {impl: backend(folder, model_impl=impl) for impl in get_args(ModelImpl) if impl != "auto"}
        for concurrency in CONCURRENCIES:
            took: dict[ModelImpl, list[float]] = {impl: [] for impl in runners}
            for _ in range(ROUNDS):
                for impl, runner in runners.items():
                    took[impl].append(step_milliseconds(runner, concurrency, STEPS))
            native, library = (statistics.median(took[impl]) for impl in ("native", "transformers"))
            figures = f"native {native:.1f} ms, transformers {library:.1f} ms, {library / native:.2f} ×"
            print(f"{concurrency} sequences: {figures}")


if __name__ == "__main__":
    main()
