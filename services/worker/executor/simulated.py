"""The simulated device of a worker's configuration; `baton simulate` makes its engines' devices here, too."""

from __future__ import annotations

from pathlib import Path

from services.worker.config import WorkerConfig
from services.worker.sim.backend import SimBackend, create_sim_backend
from services.worker.sim.tokens import SimSpeculation
from shared.messages.model_card import SamplingDefaults


def simulated_device(config: WorkerConfig, folder: Path, sampling: SamplingDefaults | None = None) -> SimBackend:
    """The device that `config` describes, for the model in `folder`. `sampling`: what requests are sampled with that do
    not say; simulated ones say nothing of it. Raises BackendError."""
    return create_sim_backend(
        folder,
        model_name=config.model_name(),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        kv_memory_bytes=config.kv_memory,
        world_size=config.world_size,
        rank=config.rank,
        accelerator=config.accelerator(),
        profile=config.sim_profile,
        step_seconds=None if config.sim_step_ms is None else config.sim_step_ms / 1000,
        time_scale=config.sim_time_scale,
        block_size=config.block_size,
        speculation=SimSpeculation(config.sim_speculate, config.sim_acceptance),
        spread=config.expert_spread(),
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        sampling=sampling,
    )
