"""What a decode step of gpt-oss costs, natively and by `transformers`, beside Qwen3-MoE of the same size.

    python -m tests.benchmarks.mixture_cost

8 experts of 512 columns, 2 of them for each token, hidden 768, 12 layers, dummy weights in bf16, native operations and
one thread, in one process, by turns. Processor time, so that what else runs on the machine matters little.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, get_args

from transformers import AutoConfig

from services.worker.executor.host_runner import HostRunner
from services.worker.models.loaded_model import ModelImpl
from tests.benchmarks.library_cost import CONCURRENCIES, backend, step_milliseconds

STEPS, ROUNDS = 14, 3
SHARED: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "intermediate_size": 512},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
    },
}


def made(folder: Path, name: str, impl: ModelImpl) -> HostRunner:
    """The model of that type, computed by `impl`."""
    own = folder / name
    AutoConfig.for_model(name, **SHARED, **SHAPES[name]).save_pretrained(own)
    return backend(own, model_impl=impl)


def main() -> None:
    """Prints a line for each model and number of sequences: medians of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        impls = [impl for impl in get_args(ModelImpl) if impl != "auto"]
        runners = {(name, impl): made(Path(folder), name, impl) for name in SHAPES for impl in impls}
        for concurrency in CONCURRENCIES:
            took: dict[tuple[str, ModelImpl], list[float]] = {each: [] for each in runners}
            for _ in range(ROUNDS):
                for each, runner in runners.items():
                    took[each].append(step_milliseconds(runner, concurrency, STEPS))
            for (name, impl), each in took.items():
                spread = f"{min(each):.1f} to {max(each):.1f}"
                print(f"{concurrency} sequences, {name}, {impl}: {statistics.median(each):.1f} ms ({spread})")


if __name__ == "__main__":
    main()
