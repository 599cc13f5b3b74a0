"""Makes the backend that the configuration asks for. torch is imported only where it is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.worker.backend import Backend, BackendError
from services.worker.config import WorkerConfig
from services.worker.distributed.binding import (
    BindingError,
    Rank,
    bind,
    bind_memory,
    chosen_cpus,
    cpus_of_gpu,
    cpus_of_rank,
    cpus_of_share,
)
from services.worker.executor.simulated import simulated_device
from services.worker.models.weight_files import read_ahead
from shared.machine.numa import Cpus, allowed_cpus
from shared.models.model_files import ModelNotFound, resolve_model
from shared.plugins.entry_points import PluginError
from shared.telemetry.startup import STARTUP

if TYPE_CHECKING:
    import torch

    from services.worker.distributed.communicator import Communicator, Pipeline


_log = logging.getLogger(__name__)


def make_backend(config: WorkerConfig, on_layer: Callable[[int], None] | None = None) -> Backend:
    """Loads the model; takes from a second to minutes. `on_layer`: see `LayerwiseDecoder`. Raises BackendError."""
    try:
        folder = resolve_model(config.model, weights=config.reads_weights)
    except ModelNotFound as error:
        raise BackendError(str(error)) from None
    if config.device == "sim":
        return simulated_device(config, folder)
    with read_ahead(folder) if config.reads_all_weights_here else nullcontext():
        return _torch_backend(config, folder, on_layer)


def _torch_backend(config: WorkerConfig, folder: Path, on_layer: Callable[[int], None] | None) -> Backend:
    with STARTUP.stage("libraries"):
        try:
            import torch
        except ImportError:
            raise BackendError("PyTorch is not installed; install the extra `worker`, or use --device sim") from None
        from services.worker.executor.torch_backend import create_backend
        from services.worker.models.config import ModelError
        from services.worker.models.lora.slots import LoraSettings
        from services.worker.ops.interface import OpsUnavailable
        from services.worker.sampling.plugins.request_processors import load_processors

    with STARTUP.stage("device"):
        device = torch_device(config, torch.cuda.is_available(), torch.cuda.device_count())
        own = _bound(config, torch.device(device))
        _open(torch.device(device))
    with STARTUP.stage("ranks"):
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
            load_format=config.load_format,
            model_impl=config.model_impl,
            pooling_type=config.pooling_type,
            classifier_from_token=config.classifier_from_token,
            trust_remote_code=config.trust_remote_code,
            quantization=config.quantization,
            threads=config.threads or own,
            speculation=config.speculation(),
            pipeline=pipeline,
            layers=config.pp_layers or None,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enforce_eager=config.enforce_eager,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=config.block_size,
            attention=config.attention,
            grammar_limits=config.grammar_limits(),
            grammar_backend=config.grammar_backend,
            on_layer=on_layer,
            loras=LoraSettings(
                config.lora_folders(), config.max_loras, config.max_lora_rank, config.lora_registry is not None
            ),
            hybrid_kv_cache=config.hybrid_kv_cache,
            kv_connector=config.kv_connector is not None,
            processors=load_processors(config.logits_processors),
            prompt_embeds=config.enable_prompt_embeds,
        )
    except PluginError as error:
        raise BackendError(f"logits_processors = {','.join(config.logits_processors)}: {error}") from None
    except (ModelError, OpsUnavailable) as error:
        raise BackendError(str(error)) from None


def torch_device(config: WorkerConfig, cuda: bool, count: int) -> str:
    """What torch calls this rank's device, where `count` GPUs are seen. Raises BackendError where there is none."""
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if cuda else "cpu"
    if wanted == "cpu":
        return "cpu"
    if not cuda:
        raise BackendError("device = cuda: PyTorch sees no CUDA device here")
    index = config.rank if config.local_rank is None else config.local_rank
    if index >= count and config.world_size > count:
        raise BackendError(f"rank {config.rank} has no GPU of its own: it is number {index} here, {count} are there")
    # More engines than GPUs share them; the ranks of one engine, whose numbers follow each other, never do.
    return f"cuda:{index % count}"


def device_name(device: str) -> str:
    """What the maker calls a device that a backend names; of others than GPUs the backend's own name."""
    if not device.startswith("cuda"):
        return device
    import torch

    return torch.cuda.get_device_name(device)


def _open(device: torch.device) -> None:
    """Makes a GPU the current one of this thread. Raises BackendError where it has no memory for a context, is
    another's alone, broken, or of a kind that this PyTorch has no kernels for: from here on whatever it says is a bug.
    """
    import torch

    if device.type != "cuda":
        return
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).item()
    except RuntimeError as error:
        raise BackendError(f"{device} cannot be used: {str(error).splitlines()[0]}") from None


def _bound(config: WorkerConfig, device: torch.device) -> int | None:
    """Binds this process to its processors; answers with how many are its own, None where it was not bound."""
    allowed = allowed_cpus()
    if config.bind == "none" or allowed is None:
        return None
    try:
        cpus = chosen_cpus(config.bind, allowed) if config.bind != "auto" else _near(config, device, allowed)
    except BindingError as error:
        raise BackendError(str(error)) from None
    if cpus is None:
        return None
    try:
        bind(cpus)
    except OSError as error:
        if config.bind != "auto":
            raise BackendError(f"bind = {config.bind}: {error.strerror}") from None
        _log.info("not bound to the processors beside the device: %s", error.strerror)
        return None
    nodes = _memory_bound(config, cpus)
    _log.info("bound to %d processors", len(cpus), extra={"cpus": sorted(cpus), "memory_nodes": nodes})
    return len(cpus)


def _memory_bound(config: WorkerConfig, cpus: Cpus) -> list[int]:
    """The NUMA nodes of this thread's memory from now on; none where it may be anywhere."""
    if config.numa == "off":
        return []
    try:
        return bind_memory(cpus, strict=config.numa == "bind")
    except OSError as error:
        if config.numa == "bind":
            raise BackendError(f"numa = bind: {error.strerror}") from None
        _log.info("memory is not kept beside the processors: %s", error.strerror)
        return []


def _near(config: WorkerConfig, device: torch.device, allowed: Cpus) -> Cpus | None:
    if device.type != "cuda":
        if config.numa_share is not None:
            return cpus_of_share(config.numa_share, allowed)
        return cpus_of_rank(Rank(config.rank, config.world_size), allowed)
    return cpus_of_gpu(_pci_addresses(), device.index, allowed)


def _pci_addresses() -> list[str]:
    """Addresses of all GPUs that this process sees, in the notation of sysfs."""
    import torch

    # torch's stubs do not know these.
    found: Iterable[Any] = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in found]


def _others(config: WorkerConfig, device: torch.device) -> tuple[Communicator, Pipeline]:
    """The ways to the other ranks of the engine."""
    from services.worker.distributed.communicator import SingleRank, SingleStage
    from services.worker.distributed.torch_ranks import RankTopology, join

    if config.world_size == 1:
        return SingleRank(), SingleStage()
    return join(
        RankTopology(config.rank, config.world_size, config.pp),
        rendezvous=config.rendezvous_url(),
        device=device,
        timeout=timedelta(seconds=config.rendezvous_timeout),
    )
