"""What verifying drafts costs a model with states, for Mamba-2 of 130 M parameters in bf16, whose layers all have some.

    python -m tests.benchmarks.state_drafts_cost

Dummy weights, native operations, one thread. Processor time of a step, so that what else runs on the machine matters
little: without drafts, and with so many that are all accepted, or all rejected.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.batch.batch import DraftTokens
from services.worker.executor.host_runner import HostRunner
from services.worker.speculation.proposer import DraftRequest
from services.worker.speculation.settings import SpeculationSettings
from tests.support.worker.library_situations import prompt
from tests.support.worker.oracle import Oracle
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

CONCURRENCIES, DRAFTS = (1, 8), (1, 3)
PROMPT, TOKENS = 16, 40
SHAPE: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 50288,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, float("inf")],
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


class Drafts(Oracle):
    """So many of each sequence, all right or all wrong."""

    def __init__(self, count: int, *, right: bool) -> None:
        super().__init__()
        self._count, self._right = count, right

    def propose(self, asked: DraftRequest) -> DraftTokens:
        """Of what it was told will come."""
        tokens = np.zeros((len(asked.seq_indices), self._count), dtype=np.int32)
        counts = np.zeros(len(asked.seq_indices), dtype=np.int32)
        for row, seq_index in enumerate(asked.seq_indices):
            held = asked.histories.tokens[seq_index, : asked.histories.lengths[seq_index]].tolist()
            coming = self._following(held)[: min(self._count, asked.limits[row])]
            counts[row] = len(coming)
            tokens[row, : len(coming)] = coming if self._right else [(token + 1) % 50_000 for token in coming]
        return DraftTokens(tokens, counts)


def measured(runner: HostRunner, concurrency: int, speculate: int) -> tuple[float, list[list[int]]]:
    """(Median milliseconds of a step that decodes all sequences, what they say.)"""
    runner.reset()
    driver, seconds = Driver(runner, speculate=speculate), list[float]()
    sequences = [driver.add(prompt(PROMPT, seed), TOKENS) for seed in range(concurrency)]
    while not all(sequence.output for sequence in sequences):
        driver.step()
    while not any(sequence.done for sequence in sequences):
        begun = time.process_time()
        driver.step()
        seconds.append(time.process_time() - begun)
    driver.run()
    return 1000 * statistics.median(seconds), [sequence.output for sequence in sequences]


def main() -> None:
    """Prints a row for each number of sequences and drafts."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        runner = tiny_backend(
            Path(folder),
            load_format="dummy",
            dtype="bfloat16",
            ops="native",
            max_model_len=512,
            kv_memory_bytes=1 << 30,
            max_num_seqs=8,
            speculation=SpeculationSettings(method="ngram", num_speculative_tokens=max(DRAFTS)),
        )
        for concurrency in CONCURRENCIES:
            plain, said = measured(runner, concurrency, 0)
            print(f"{concurrency} sequences: {plain:.1f} ms without drafts")
            for drafts in DRAFTS:
                for right in (True, False):
                    oracle = Drafts(drafts, right=right)
                    prompts = [tuple(prompt(PROMPT, seed)) for seed in range(concurrency)]
                    oracle.known = {each: output[:-1] for each, output in zip(prompts, said, strict=True)}
                    runner.rank.drafting.draft_by(oracle)
                    cost, again = measured(runner, concurrency, drafts)
                    assert again == said
                    tokens = 1 + drafts * right
                    kind = f"{drafts} {'accepted' if right else 'rejected'}"
                    print(f"  {kind}: {cost:.1f} ms, {cost / tokens / plain:.2f} of that a token")


if __name__ == "__main__":
    main()
