"""Makes the backend that the configuration asks for. torch is imported only where it is needed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from services.worker.backend import Backend, BackendError
from services.worker.config import WorkerConfig
from shared.model_files import ModelNotFound, resolve_model

if TYPE_CHECKING:
    import torch

    from services.worker.parallel import Communicator
    from services.worker.pipeline import Pipeline


def make_backend(config: WorkerConfig) -> Backend:
    """Loads the model; takes from a second to minutes. Raises BackendError."""
    try:
        folder = resolve_model(config.model, weights=config.device != "sim")
    except ModelNotFound as error:
        raise BackendError(str(error)) from None
    return _sim_backend(config, folder) if config.device == "sim" else _torch_backend(config, folder)


def _sim_backend(config: WorkerConfig, folder: Path) -> Backend:
    from services.worker.sim.speculation import SimSpeculation
    from services.worker.sim_backend import create_sim_backend

    return create_sim_backend(
        folder,
        model_name=config.model_name(),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        kv_memory_bytes=config.kv_memory,
        world_size=config.world_size,
        accelerator=config.accelerator(),
        profile=config.sim_profile,
        step_seconds=None if config.sim_step_ms is None else config.sim_step_ms / 1000,
        time_scale=config.sim_time_scale,
        speculation=SimSpeculation(config.sim_speculate, config.sim_acceptance),
    )


def _torch_backend(config: WorkerConfig, folder: Path) -> Backend:
    try:
        import torch
    except ImportError:
        raise BackendError("PyTorch is not installed; install the extra `worker`, or use --device sim") from None
    from services.worker.model.config import ModelError
    from services.worker.ops import OpsUnavailable
    from services.worker.torch_backend import create_backend

    device = _torch_device(config, torch.cuda.is_available(), torch.cuda.device_count())
    communicator, pipeline = _others(config, torch.device(device))
    try:
        return create_backend(
            folder,
            model_name=config.model_name(),
            device=device,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            kv_memory_bytes=config.kv_memory,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            rank=communicator.rank,
            world_size=communicator.world_size,
            communicator=communicator,
            ops=config.ops,
            threads=config.threads,
            speculation=config.speculation(),
            pipeline=pipeline,
            layers=config.pp_layers or None,
        )
    except (ModelError, OpsUnavailable) as error:
        raise BackendError(str(error)) from None


def _torch_device(config: WorkerConfig, cuda: bool, count: int) -> str:
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if cuda else "cpu"
    if wanted == "cpu":
        return "cpu"
    if not cuda:
        raise BackendError("device = cuda: PyTorch sees no CUDA device here")
    index = config.rank if config.local_rank is None else config.local_rank
    if index >= count:
        raise BackendError(f"rank {config.rank} has no GPU of its own: it is number {index} here, {count} are there")
    return f"cuda:{index}"


def _others(config: WorkerConfig, device: torch.device) -> tuple[Communicator, Pipeline]:
    """The ways to the other ranks of the engine."""
    from services.worker.parallel import SingleRank
    from services.worker.pipeline import SingleStage
    from services.worker.torch_ranks import RankPlace, join

    if config.world_size == 1:
        return SingleRank(), SingleStage()
    return join(
        RankPlace(config.rank, config.world_size, config.pp),
        init_method=config.rendezvous_url(),
        device=device,
        timeout=timedelta(seconds=config.rendezvous_timeout),
    )
