"""A shape without weights, served whole: a config and somebody's tokenizer are enough."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deploy.model_choice import DEMO_MODEL
from services.offline import LLM, SamplingParams
from services.offline.errors import EngineFailed
from services.worker.measure.roofline.wire import shape_file

_VOCABULARY = 9000
"""More words than the tokenizer has."""


def shape(folder: Path) -> str:
    """Qwen3's, made small."""
    path = shape_file("qwen3-0.6b")
    assert path is not None
    small = {"vocab_size": _VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(json.loads(path.read_text()) | small | {"head_dim": 16}))
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", folder / "tokenizer.json")
    return str(folder)


def engine(model: str, load_format: str) -> LLM:
    settings = {"worker.threads": 1, "worker.load_format": load_format}
    limits = {"max_model_len": 64, "max_num_seqs": 2, "max_batch_tokens": 32, "kv_memory": "4MiB"}
    return LLM(model, device="cpu", progress=False, settings=settings, **limits)


def test_a_shape_is_served_with_made_up_weights_and_another_models_tokenizer(tmp_path: Path) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    model = shape(tmp_path)
    with engine(model, "dummy") as llm:
        (one,) = llm.generate("Hello", greedy)
        (other,) = llm.generate("Goodbye", greedy)
    tokens = list(one.outputs[0].token_ids)
    assert len(tokens) == 12
    assert max(tokens + list(other.outputs[0].token_ids)) < _VOCABULARY
    assert tokens != list(other.outputs[0].token_ids)
    with engine(model, "dummy") as llm:
        assert list(llm.generate("Hello", greedy)[0].outputs[0].token_ids) == tokens, "the same weights every time"


def test_weights_that_are_not_there_are_missed_unless_they_may_be_made_up(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="load_format dummy"):
        engine(shape(tmp_path), "auto")
