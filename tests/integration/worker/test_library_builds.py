"""An encoder and a worker of one process have `transformers` build their models from different threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from services.encoder.prompt_tower import PromptTower
from services.worker.models.fallback.library_config import library_config
from tests.support.models.tiny_encoder_decoders import make_encoder_decoder


def test_what_one_replaces_the_other_does_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library ties no weights while it reads a model: it replaces what ties those of all."""
    model = make_encoder_decoder(tmp_path, "flan-t5", seed=3)
    reads, builds = threading.Event(), threading.Event()
    tie, post_init = PreTrainedModel.tie_weights, PreTrainedModel.post_init
    ties: list[bool] = []

    def post_init_late(self: PreTrainedModel) -> None:
        if threading.current_thread() is threading.main_thread():
            builds.set()
            ties.append(PreTrainedModel.tie_weights is tie)
        else:
            reads.set()
            builds.wait(0.1)  # in vain: it waits for the end of this
        post_init(self)

    monkeypatch.setattr(PreTrainedModel, "post_init", post_init_late)
    with ThreadPoolExecutor(1) as threads:
        tower = threads.submit(PromptTower, model.path)
        assert reads.wait(30)
        library_config(model.path, trust_remote_code=False, codes=False)
        tower.result()
    assert ties
    assert all(ties)
    assert PreTrainedModel.tie_weights is tie
