"""What every backend says of its model, whatever the device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from services.worker.backend import BackendError
from services.worker.config import WorkerConfig
from services.worker.executor.backend_choice import make_backend
from shared.messages.model_card import SamplingDefaults
from tests.support.paths import DEMO_MODEL


def config(model: Path, device: str, **different: object) -> WorkerConfig:
    chosen = {"engine": "e", "instance": "w", "nats_url": ["nats://h"], "kv_memory": 8 << 20, "bind": "none"}
    return WorkerConfig(model=str(model), device=device, **(chosen | different))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_backend_says_what_its_checkpoint_samples_with(device: str, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    assert make_backend(config(tmp_path, device)).card.sampling == SamplingDefaults(temperature=0.6, top_k=20)
    assert make_backend(config(tmp_path, device, generation_config="vllm")).card.sampling is None
    (tmp_path / "generation_config.json").write_text('{"temperature": -0.6}')
    with pytest.raises(BackendError, match=r"generation_config: .*generation_config\.json.*temperature"):
        make_backend(config(tmp_path, device))


def test_an_override_that_cannot_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"override_generation_config: .*top_q.*keys of temperature"):
        config(tmp_path, "cpu", override_generation_config='{"top_q": 1}')
