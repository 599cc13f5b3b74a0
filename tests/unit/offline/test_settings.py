"""What an offline engine is told is what its services are configured with."""

from __future__ import annotations

from services.offline.settings import EngineArguments, service_configs


def test_prefix_caching_is_on_unless_the_caller_says_no() -> None:
    assert service_configs("m", EngineArguments()).gateway.enable_prefix_caching
    assert not service_configs("m", EngineArguments(enable_prefix_caching=False)).gateway.enable_prefix_caching


def test_what_is_said_of_a_gpu_reaches_the_worker() -> None:
    arguments = EngineArguments(gpu_memory_utilization=0.4, kv_cache_dtype="fp8", enforce_eager=True)
    (worker,) = service_configs("m", arguments).ranks
    assert (worker.gpu_memory_utilization, worker.kv_cache_dtype, worker.enforce_eager) == (0.4, "fp8", True)
