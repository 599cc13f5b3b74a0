"""Two real processes share a model over gloo and say what one process says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from services.worker.parallel import SingleRank
from tests.tensor_parallel_rank import OUTPUT, outputs, prompts
from tests.tiny_models import make_model

FAMILIES = ["llama-biased-tied", "llama-llama3", "qwen3", "gemma2"]
"""Biases and tied embeddings; a single KV head, to be replicated; head norms; Gemma's norms and caps."""
DEADLINE = 90.0


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    # 159 words do not divide by two: one rank's share of the logits is padded.
    models = [make_model(family, tmp_path / family, vocab_size=159) for family in FAMILIES]
    arguments = [str(tmp_path / "rendezvous"), "torch", *(str(model.path) for model in models)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.tensor_parallel_rank", str(rank), "2", *arguments],
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=DEADLINE)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = ([json.loads(line) for line in lines] for lines in answers)
    assert first == second
    for model, answer in zip(models, first, strict=True):
        assert answer[:3] == [model.greedy(tokens, OUTPUT) for tokens in prompts()[:3]], model.family
        assert answer == outputs(model.path, SingleRank(), "torch"), model.family
