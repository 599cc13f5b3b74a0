"""A backend for a tiny model: one rank on the CPU, one thread, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.worker.executor.host_runner import HostRunner
from services.worker.executor.torch_backend import BackendSettings, create_backend
from services.worker.models.loaded_model import LoadSettings
from services.worker.platforms.installed import built_in_platform
from shared.ids import ModelName


def tiny_backend(path: Path, **different: Any) -> HostRunner:
    """As `create_backend`, of whose settings some are `different`. Raises what it raises."""
    backend = create_backend(tiny_settings(path, **different))
    assert isinstance(backend, HostRunner)
    return backend


def tiny_settings(path: Path, *, device: str = "cpu", **different: Any) -> BackendSettings:
    """For the model in `path`, which is tiny. `device`: PyTorch's name of it, where it is no package's. `different`:
    fields of the model's settings, and of the backend's."""
    of_model = {name: different.pop(name) for name in LoadSettings.__dataclass_fields__ if name in different}
    model: dict[str, Any] = {"platform": built_in_platform(device), "max_batch_tokens": 256, "ops": "torch"}
    chosen: dict[str, Any] = {
        "model": LoadSettings(folder=path, **model | of_model),
        "model_name": ModelName("tiny"),
        "kv_memory_bytes": 8 << 20,
        "max_num_seqs": 24,
        "threads": 1,
    }
    return BackendSettings(**chosen | different)
