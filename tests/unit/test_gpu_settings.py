"""What is said of a GPU reaches the worker, and what cannot be is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.cli.up.options import given, service_settings
from deploy.supervisor.launch import flags
from services.offline.settings import EngineSettings, service_configs
from services.worker.config import WorkerConfig
from services.worker.executor import torch_backend
from services.worker.models.config import ModelError
from shared.config import ConfigError, load_config
from tests.support.worker.tiny_backend import tiny_settings


def told(*argv: str) -> WorkerConfig:
    return load_config("worker", WorkerConfig, ["--model=m", "--engine=e", *argv], environment={})


def test_what_baton_up_is_told_reaches_the_worker() -> None:
    typed = {"enforce_eager": True, "gpu_memory_utilization": 0.5, "kv_cache_dtype": None}
    argv = flags(service_settings(given(typed))["worker"])
    assert argv == ["--enforce-eager", "--gpu-memory-utilization=0.5"]
    config = told(*argv)
    assert (config.enforce_eager, config.gpu_memory_utilization, config.kv_cache_dtype) == (True, 0.5, "auto")


def test_decodes_are_captured_and_nine_tenths_of_a_gpu_taken_unless_told_otherwise() -> None:
    config = told()
    assert (config.enforce_eager, config.gpu_memory_utilization, config.kv_cache_dtype) == (False, 0.9, "auto")


def test_an_offline_engine_is_told_the_same() -> None:
    settings = EngineSettings(
        model="m", served_model_name="m", gpu_memory_utilization=0.4, kv_cache_dtype="fp8", enforce_eager=True
    )
    (worker,) = service_configs(settings).ranks
    assert (worker.gpu_memory_utilization, worker.kv_cache_dtype, worker.enforce_eager) == (0.4, "fp8", True)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--gpu-memory-utilization=0", "gpu_memory_utilization = '0'"),
        ("--gpu-memory-utilization=1.1", "gpu_memory_utilization = '1.1'"),
        ("--kv-cache-dtype=int4", "kv_cache_dtype = 'int4'"),
        ("--ops=cuda", "ops = 'cuda'"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(argv: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        told(argv)


def test_weights_that_do_not_fit_after_all_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that was free when it was looked for may be another's by then."""

    def full(wanted: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(torch_backend, "load_model", full)
    with pytest.raises(ModelError, match=r"memory ran out while weights were loaded: .* use more ranks"):
        torch_backend.create_backend(tmp_path, **tiny_settings())
