"""Two real processes share a model over gloo and say what one process says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from services.worker.ops_choice import OpsName
from services.worker.parallel import SingleRank
from tests.tensor_parallel_rank import OUTPUT, outputs, prompts
from tests.tiny_models import make_model

SERVED: list[tuple[str, OpsName]] = [("llama-biased-tied", "torch"), ("qwen3", "auto"), ("gemma2", "auto")]
"""Biases and tied embeddings; head norms; Gemma's norms and caps."""
SHAPES = {"llama-biased-tied": {"num_key_value_heads": 1}, "qwen3": {}, "gemma2": {}}
"""A single KV head has to be replicated."""
DEADLINE = 90.0


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    # 159 words do not divide by two: one rank's share of the logits is padded.
    models = [
        (make_model(family, tmp_path / family, vocab_size=159, num_hidden_layers=2, **SHAPES[family]), ops)
        for family, ops in SERVED
    ]
    arguments = [str(tmp_path / "rendezvous"), *(f"{ops}={model.path}" for model, ops in models)]
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
    for (model, ops), answer in zip(models, first, strict=True):
        assert answer[:3] == [model.greedy(tokens, OUTPUT) for tokens in prompts()[:3]], model.family
        assert answer == outputs(model.path, SingleRank(), ops), model.family
