"""A backend for a tiny model: one rank on the CPU, one thread, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.worker.distributed.communicator import SingleRank
from services.worker.executor.host_runner import HostRunner
from services.worker.executor.torch_backend import create_backend
from services.worker.platforms.installed import built_in_platform
from shared.ids import ModelName


def tiny_backend(path: Path, **different: Any) -> HostRunner:
    """As `create_backend`, of which `different` are arguments. Raises what it raises."""
    backend = create_backend(path, **tiny_settings(**different))
    assert isinstance(backend, HostRunner)
    return backend


def tiny_settings(**different: Any) -> dict[str, Any]:
    """Arguments of `create_backend` for a model that is tiny. `device`: PyTorch's name of it, where it is no
    package's."""
    chosen: dict[str, Any] = {
        "model_name": ModelName("tiny"),
        "platform": built_in_platform(different.pop("device", "cpu")),
        "dtype": "auto",
        "max_model_len": None,
        "kv_memory_bytes": 8 << 20,
        "max_num_seqs": 24,
        "max_batch_tokens": 256,
        "rank": 0,
        "world_size": 1,
        "communicator": SingleRank(),
        "ops": "torch",
        "threads": 1,
    }
    return chosen | different
