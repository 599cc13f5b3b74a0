"""What LoRA adapters cost in a decode step, for Llama of 110 M parameters: 16 sequences of 0, 1, 4 and 16 adapters.

    python -m tests.benchmarks.lora_cost

Adapters of rank 16 on all linear layers, dummy weights, native operations, one thread; by turns in one process.
Processor time, so that what else runs on the machine matters little.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from services.worker.executor.host_runner import HostRunner
from services.worker.models.lora.slots import LoraSettings
from shared.ids import ModelName
from tests.benchmarks.library_cost import SHAPE, median_milliseconds
from tests.support.models.tiny_adapters import write_adapter
from tests.support.models.tiny_models import TinyModel
from tests.support.worker.library_situations import prompt
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

SEQUENCES, RANK = 16, 16
ADAPTERS = (0, 1, 4, 16)
PROMPT, STEPS, ROUNDS = 16, 10, 3


def backend(folder: Path) -> HostRunner:
    config = LlamaConfig(**SHAPE)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shape = TinyModel("llama", folder, AutoModelForCausalLM.from_config(config))
    adapters = []
    for number in range(max(ADAPTERS)):
        made = write_adapter(shape, folder / f"adapter-{number}", r=RANK, seed=number, strength=0.01)
        adapters.append((ModelName(f"adapter-{number}"), made.path))
    return tiny_backend(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        ops="native",
        max_model_len=512,
        kv_memory_bytes=256 << 20,
        max_batch_tokens=512,
        loras=LoraSettings(tuple(adapters), max(ADAPTERS), RANK),
    )


def step_milliseconds(runner: HostRunner, adapters: int) -> float:
    """The median step of sequences that all decode, with so many adapters in turn; of the base model where 0."""
    runner.reset()
    driver, cards = Driver(runner), runner.card.loras
    loras = [cards[number % adapters].id if adapters else None for number in range(SEQUENCES)]
    sequences = [driver.add(prompt(PROMPT, seed), STEPS + 2, lora=lora) for seed, lora in enumerate(loras)]
    return median_milliseconds(driver, sequences, STEPS)


def main() -> None:
    """Prints a line for each number of adapters."""
    with tempfile.TemporaryDirectory() as name:
        runner = backend(Path(name))
        took: dict[int, list[float]] = {adapters: [] for adapters in ADAPTERS}
        for _ in range(ROUNDS):
            for adapters in ADAPTERS:
                took[adapters].append(step_milliseconds(runner, adapters))
        base = statistics.median(took[0])
        for adapters in ADAPTERS:
            found = statistics.median(took[adapters])
            print(f"{SEQUENCES} sequences, {adapters} adapters: {found:.1f} ms, {found / base:.2f} ×")


if __name__ == "__main__":
    main()
