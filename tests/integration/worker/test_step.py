"""Step-3.5 as it is published: what `transformers` computes of it is what it computes of it as a part of Step-3.7."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from services.scheduler.core.limits import EngineLimits
from services.worker.models.config import ModelError
from tests.support.models.tiny_step import make_step
from tests.support.worker.library_situations import check_mixed_batch, check_resumed_sequences, prompt
from tests.support.worker.rank_processes import rank_processes
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


@pytest.mark.extras
def test_logits_and_texts_are_those_of_the_library(tmp_path: Path, recorded: list[Tensor]) -> None:
    model = make_step(tmp_path)
    backend = tiny_backend(tmp_path, ops="native")
    assert_logits_agree(backend, model, prompt(70), 4, recorded, budget=32)
    backend.reset()
    check_mixed_batch(model, backend)
    backend.reset()
    check_resumed_sequences(model, backend)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate false is not supported; true is"),
        ({"moe_router_activation": "softmax"}, 'moe_router_activation "softmax" is not supported; "sigmoid" is'),
        ({"use_rope_layers": [0, 1, 1, 1]}, r"use_rope_layers \[0, 1, 1, 1\] is not supported; \[\] is"),
        ({"yarn_only_types": ["sliding_attention"]}, r"yarn_only_types \[.sliding_attention.\] is not supported"),
        ({"attention_other_setting": {"head_dim": 8}}, "attention_other_setting: head_dim 8 is not supported; 16 is"),
    ],
)
def test_what_the_library_does_not_compute_is_refused_by_its_key(
    keys: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    make_step(tmp_path, **keys)
    with pytest.raises(ModelError, match=complaint):
        tiny_backend(tmp_path)


@pytest.mark.extras
def test_two_stages_write_the_same(tmp_path: Path) -> None:
    model = make_step(tmp_path / "model")
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    prompts = [prompt(length, length) for length in (2, 33, 71)]
    with rank_processes(2, tmp_path) as ranks:
        engine = ranks.serve(model.path, tp=1, stages=2, ops="native", limits=limits, kv_memory=16 << 20)
        requests = [engine.ask(tokens, 4) for tokens in prompts]
        engine.run()
        assert [request.tokens for request in requests] == [model.greedy(tokens, 4) for tokens in prompts]
