"""What a `config.json` of given fields says of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_config import read_model_config


def write(folder: Path, base: dict[str, Any], **changes: Any) -> Path:
    """The `config.json` of `base` with `changes`, in `folder`, which is made where it is not there."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    return folder


def read(folder: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    """Of `base` with `changes`, written into `folder`."""
    return read_model_config(write(folder, base, **changes))


def assert_refused(folder: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
    """That `base` with `changes` cannot be read, for `complaint` of the file."""
    with pytest.raises(ModelError) as error:
        read(folder, base, **changes)
    assert str(error.value) == f"{folder / 'config.json'}: {complaint}"


def active_parameters(config: ModelConfig) -> float:
    """Weights that one token is multiplied with, as model cards count them: none of the embedding, and only those of
    the chosen experts."""
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    idle = 0.0 if config.mixture is None else 1 - config.mixture.chosen / config.mixture.experts
    return config.parameters * (1 - config.expert_share * idle) - embedding
