"""One rank of a tensor-parallel engine, as a process of its own: serves models one after the other, prints tokens.

Run as `python -m tests.tensor_parallel_rank RANK WORLD_SIZE RENDEZVOUS_FILE (OPS=MODEL_DIR)...`; for each model a line
of JSON: every sequence's output, as this rank has it.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from random import Random

import torch

from services.worker.ops_choice import OpsName
from services.worker.parallel import Communicator, TorchCommunicator
from services.worker.torch_backend import create_backend
from shared.ids import ModelName
from shared.messages.generation import SamplingParams
from tests.tiny_models import VOCABULARY
from tests.worker_driver import GREEDY, Driver

SEEDED = SamplingParams(seed=77, temperature=0.8, top_p=0.9)
OUTPUT = 5


def prompts() -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(3, VOCABULARY - 1) for _ in range(length)] for length in (5, 16, 33, 70)]


def outputs(model_dir: Path, communicator: Communicator, ops: OpsName) -> list[list[int]]:
    """Three greedy sequences and a seeded one, prefilled in chunks."""
    backend = create_backend(
        model_dir,
        model_name=ModelName("tiny"),
        device="cpu",
        dtype="float32",
        max_model_len=None,
        kv_memory_bytes=4 << 20,
        max_num_seqs=4,
        max_batch_tokens=64,
        rank=communicator.rank,
        world_size=communicator.world_size,
        communicator=communicator,
        ops=ops,
        threads=1,
    )
    driver = Driver(backend, budget=60)
    sampling = [GREEDY, GREEDY, GREEDY, SEEDED]
    sequences = [driver.add(tokens, OUTPUT, sampling=s) for tokens, s in zip(prompts(), sampling, strict=True)]
    driver.run()
    return [sequence.output for sequence in sequences]


def main(rank: str, world_size: str, rendezvous: str, *models: str) -> None:
    communicator = TorchCommunicator(
        rank=int(rank),
        world_size=int(world_size),
        init_method=f"file://{rendezvous}",
        device=torch.device("cpu"),
        timeout=timedelta(seconds=60),
    )
    for ops, _, model in (argument.partition("=") for argument in models):
        print(json.dumps(outputs(Path(model), communicator, ops)), flush=True)  # type: ignore[arg-type]
    communicator.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
