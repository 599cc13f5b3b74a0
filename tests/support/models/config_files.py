"""What a `config.json` of given fields says of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.worker.models.config import ModelConfig
from services.worker.models.hf_config import read_model_config


def read(folder: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    """Of `base` with `changes`, written into `folder`."""
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    return read_model_config(folder)
