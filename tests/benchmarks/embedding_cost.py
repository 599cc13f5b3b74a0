"""What embeddings cost beside sentence-transformers, for a BERT of the size of all-MiniLM-L6 with random weights.

    python -m tests.benchmarks.embedding_cost

Both compute the same texts on one thread in one process, and take turns; sentence-transformers in batches of 32, the
worker in steps of 2,048 tokens. Processor time, so that what else runs on the machine matters little. Without HTTP and
tokenizing on our side, with tokenizing (words, looked up) on the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from shared.messages.generation import PoolingOptions
from tests.support.models.tiny_encoders import WORDS, make_encoder
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

TEXTS, ROUNDS, SIZE, BUDGET = 96, 3, 384, 2048
SHAPE = {
    "hidden_size": SIZE,
    "intermediate_size": 4 * SIZE,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}


def grouped(prompts: list[list[int]]) -> list[list[list[int]]]:
    """In their order, as many as fit a step each."""
    steps: list[list[list[int]]] = [[]]
    for prompt in prompts:
        if sum(map(len, steps[-1])) + len(prompt) > BUDGET:
            steps.append([])
        steps[-1].append(prompt)
    return steps


def computed(driver: Driver, group: list[list[int]]) -> list[Sequence]:
    """The sequences of one step, with their vectors."""
    options = PoolingOptions(pooling="mean", dimensions=SIZE, whole=True)
    sequences = [driver.add(prompt, 0, pooling=options) for prompt in group]
    driver.run()
    return sequences


def main() -> None:
    """Prints texts and tokens per second of processor time of both, and how far their vectors differ."""
    torch.set_num_threads(1)
    random = Random(1)
    prompts = [[2, *(random.randrange(4, WORDS) for _ in range(random.randrange(8, 200))), 3] for _ in range(TEXTS)]
    steps = grouped(prompts)
    texts = [" ".join(f"w{token}" for token in prompt[1:-1]) for prompt in prompts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_encoder("Bert", folder, **SHAPE)
        transformer = Transformer(str(folder), max_seq_length=512)
        modules = [transformer, Pooling(SIZE, pooling_mode="mean"), Normalize()]
        reference = SentenceTransformer(modules=modules, device="cpu")
        backend = tiny_backend(
            folder, pooling_type="mean", ops="native", dtype="float32", max_batch_tokens=BUDGET, max_num_seqs=TEXTS
        )
        theirs, ours = [], []
        for _ in range(ROUNDS):
            started = time.process_time()
            wanted = reference.encode(texts, batch_size=32)
            theirs.append(time.process_time() - started)
            backend.reset()
            driver = Driver(backend, budget=BUDGET)
            started = time.process_time()
            sequences = [each for group in steps for each in computed(driver, group)]
            ours.append(time.process_time() - started)
        found = np.array([driver.vectors[sequence.id] for sequence in sequences])
    tokens = sum(map(len, prompts))
    for who, took in (("sentence-transformers", theirs), ("worker", ours)):
        seconds = statistics.median(took)
        print(f"{who}: {TEXTS / seconds:.0f} texts, {tokens / seconds:.0f} tokens per second of processor time")
    print(f"vectors differ by {np.abs(found - wanted).max():.1e} at most")


if __name__ == "__main__":
    main()
