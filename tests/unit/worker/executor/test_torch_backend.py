"""What a backend on PyTorch says where a model cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.executor import torch_backend
from services.worker.models.config import ModelError
from tests.support.models.tiny_models import make_model
from tests.support.worker.tiny_backend import tiny_settings


def test_weights_that_do_not_fit_after_all_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that was free when it was looked for may be another's by then."""

    def full(wanted: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(torch_backend, "load_model", full)
    with pytest.raises(ModelError, match=r"memory ran out while weights were loaded: .* use more ranks"):
        torch_backend.create_backend(tiny_settings(tmp_path))


def test_groups_of_layers_that_are_insisted_on_are_had_or_refused(tmp_path: Path) -> None:
    make_model("gemma3", tmp_path)
    with pytest.raises(ModelError, match="hybrid_kv_cache = on: a KV connector knows one block for all layers"):
        torch_backend.create_backend(tiny_settings(tmp_path, hybrid_kv_cache="on", kv_connector=True))
    settings = [tiny_settings(tmp_path, hybrid_kv_cache="auto", kv_connector=given) for given in (True, False)]
    tables = [len(torch_backend.create_backend(each).kv_groups) for each in settings]
    assert tables == [0, 3]
