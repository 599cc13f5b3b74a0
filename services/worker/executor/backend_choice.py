"""Makes the backend that the configuration asks for. torch is imported only where it is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

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
from shared.models.generation_config import GenerationConfigError
from shared.models.model_files import ModelNotFound, resolve_model
from shared.plugins.entry_points import PluginError
from shared.telemetry.startup import STARTUP

if TYPE_CHECKING:
    from services.worker.distributed.communicator import Communicator, Pipeline
    from services.worker.distributed.lockstep import GroupTopology
    from services.worker.distributed.torch_ranks import RankGroup
    from services.worker.executor.torch_backend import BackendSettings
    from services.worker.models.loaded_model import LoadSettings
    from services.worker.platforms.interface import Platform
    from shared.messages.model_card import SamplingDefaults

_log = logging.getLogger(__name__)


def make_backend(config: WorkerConfig, on_layer: Callable[[int], None] | None = None) -> Backend:
    """Loads the model; takes from a second to minutes. `on_layer`: see `LayerwiseDecoder`. Raises BackendError."""
    try:
        folder = resolve_model(config.model, weights=config.reads_weights)
    except ModelNotFound as error:
        raise BackendError(str(error)) from None
    try:
        sampling = config.sampling_defaults(folder)
    except GenerationConfigError as error:
        raise BackendError(f"generation_config: {error}") from None
    if config.device == "sim":
        return simulated_device(config, folder, sampling)
    with read_ahead(folder) if config.reads_all_weights_here else nullcontext():
        return _torch_backend(config, folder, on_layer, sampling)


def _torch_backend(
    config: WorkerConfig,
    folder: Path,
    on_layer: Callable[[int], None] | None,
    sampling: SamplingDefaults | None,
) -> Backend:
    with STARTUP.stage("libraries"):
        try:
            import torch  # noqa: F401 - what comes next needs it
        except ImportError:
            raise BackendError("PyTorch is not installed; install the extra `worker`, or use --device sim") from None
        from services.worker.executor.torch_backend import create_backend
        from services.worker.models.config import ModelError
        from services.worker.ops.interface import OpsUnavailable

    with STARTUP.stage("device"):
        platform = platform_of(config)
        config = checked(config, platform)
        own = _bound(config, platform)
        _open(platform)
    with STARTUP.stage("ranks"):
        ranks = _others(config, platform)
    try:
        model = _load_settings(config, folder, platform, ranks, on_layer)
        return create_backend(_settings(config, model, own, sampling))
    except PluginError as error:
        raise BackendError(f"logits_processors = {','.join(config.logits_processors)}: {error}") from None
    except (ModelError, OpsUnavailable) as error:
        raise BackendError(str(error)) from None


def _load_settings(
    config: WorkerConfig,
    folder: Path,
    platform: Platform,
    ranks: tuple[Communicator, Pipeline, RankGroup | None],
    on_layer: Callable[[int], None] | None,
) -> LoadSettings:
    from services.worker.models.loaded_model import LoadSettings
    from services.worker.models.pooling.step_pooling import StepPooling

    communicator, pipeline, group = ranks
    pooler = config.pooler()
    return LoadSettings(
        folder=folder,
        platform=platform,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        language_model_only=config.language_model_only,
        ops=config.ops,
        instructions=None if config.instructions == "auto" else config.instructions,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        attention=config.attention,
        communicator=communicator,
        pipeline=pipeline,
        layers=config.pp_layers or None,
        on_layer=on_layer,
        model_impl=config.model_impl,
        pooling_type=pooler.pooling_type,
        steps=StepPooling(pooler.step_tag_id, pooler.returned_token_ids),
        normalize=pooler.normalize,
        use_activation=pooler.use_activation,
        all_tokens=pooler.all_tokens,
        classifier_from_token=config.classifier_from_token,
        quantization=config.quantization,
        max_batch_tokens=config.max_batch_tokens,
        trust_remote_code=config.trust_remote_code,
        experts=config.expert_settings(config.engine),
        group=group,
        shared_rows=config.shared_rows,
        context_rows=config.context_rows,
        share_weights=config.share_weights,
    )


def _settings(
    config: WorkerConfig, model: LoadSettings, own_cores: int | None, sampling: SamplingDefaults | None
) -> BackendSettings:
    """`own_cores`: those that the process is bound to. Raises PluginError."""
    from services.worker.executor.torch_backend import BackendSettings
    from services.worker.models.lora.slots import LoraSettings
    from services.worker.sampling.plugins.request_processors import load_processors

    at_run_time = config.lora_registry is not None
    return BackendSettings(
        model=model,
        model_name=config.model_name(),
        max_num_seqs=config.max_num_seqs,
        kv_memory_bytes=config.kv_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        threads=config.threads or own_cores,
        enforce_eager=config.enforce_eager,
        hybrid_kv_cache=config.hybrid_kv_cache,
        kv_connector=config.kv_connector is not None,
        speculation=config.speculation(),
        loras=LoraSettings(config.lora_folders(), config.max_loras, config.max_lora_rank, at_run_time),
        grammar_limits=config.grammar_limits(),
        grammar_backend=config.grammar_backend,
        processors=load_processors(config.logits_processors),
        prompt_embeds=config.enable_prompt_embeds,
        sampling=sampling,
    )


def platform_of(config: WorkerConfig) -> Platform:
    """This rank's device. Raises BackendError where there is none."""
    from services.worker.platforms.installed import PlatformUnavailable, open_platform

    index = config.rank if config.local_rank is None else config.local_rank
    try:
        return open_platform(config.device, index=index, rank=config.rank, world_size=config.world_size)
    except PlatformUnavailable as error:
        raise BackendError(str(error)) from None


def checked(config: WorkerConfig, platform: Platform) -> WorkerConfig:
    """The settings as the platform wants them. Raises BackendError where it refuses some."""
    from services.worker.platforms.interface import CHOSEN_BY_PLATFORMS, PlatformSettings

    given = PlatformSettings(**{name: getattr(config, name) for name in PlatformSettings.__struct_fields__})
    try:
        chosen = platform.check_settings(given)
        msgspec.convert(msgspec.structs.asdict(chosen), PlatformSettings)  # a package may have written anything there
    except Exception as error:  # whatever a foreign package raises
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise BackendError(f"device = {config.device}: {why}") from None
    differences = {name: getattr(chosen, name) for name in given.__struct_fields__}
    differences = {name: value for name, value in differences.items() if value != getattr(given, name)}
    if others := sorted(differences.keys() - set(CHOSEN_BY_PLATFORMS)):
        raise BackendError(f"device = {config.device}: the platform may not change {', '.join(others)}")
    if differences:
        _log.info("settings of the platform's choice", extra=differences)
    return msgspec.structs.replace(config, **differences)


def _open(platform: Platform) -> None:
    """Makes it the current device of this thread. Raises BackendError where it has no memory for a context, is
    another's alone, broken, or of a kind that this PyTorch has no kernels for: from here on whatever it says is a bug.
    """
    import torch

    try:
        platform.activate()
        torch.ones(1, device=platform.device).item()
    except RuntimeError as error:
        raise BackendError(f"{platform} cannot be used: {str(error).splitlines()[0]}") from None


def _bound(config: WorkerConfig, platform: Platform) -> int | None:
    """Binds this process to its processors; answers with how many are its own, None where it was not bound."""
    allowed = allowed_cpus()
    if config.bind == "none" or allowed is None:
        return None
    try:
        cpus = chosen_cpus(config.bind, allowed) if config.bind != "auto" else _near(config, platform, allowed)
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


def _near(config: WorkerConfig, platform: Platform, allowed: Cpus) -> Cpus | None:
    addresses = platform.pci_addresses()
    if addresses is None:
        if config.numa_share is not None:
            return cpus_of_share(config.numa_share, allowed)
        return cpus_of_rank(Rank(config.rank, config.world_size), allowed)
    return cpus_of_gpu(addresses, platform.index, allowed)


def _others(config: WorkerConfig, platform: Platform) -> tuple[Communicator, Pipeline, RankGroup | None]:
    """The ways to the other ranks of the engine, and of its data-parallel group. Raises BackendError."""
    from services.worker.distributed.communicator import SingleRank, SingleStage
    from services.worker.distributed.torch_ranks import RankTopology, join

    member = config.group_topology()
    if member is not None:
        communicator, group = _group(config, platform, member)
        return communicator, SingleStage(), group
    if config.world_size == 1:
        return SingleRank(), SingleStage(), None
    place = RankTopology(config.rank, config.world_size, config.pp)
    joined = join(
        place,
        rendezvous=config.rendezvous_url(),
        timeout=timedelta(seconds=config.rendezvous_timeout),
        backend=platform.process_group,
        shared=platform.shared_exchange(place.stage_size),
    )
    return joined.communicator, joined.pipeline, None


def _group(config: WorkerConfig, platform: Platform, place: GroupTopology) -> tuple[Communicator, RankGroup]:
    from services.worker.distributed.torch_ranks import GroupUnavailable, join_group

    size = f"data_parallel_size = {config.data_parallel_size}"
    if not platform.in_main_memory:
        raise BackendError(f"{size}: not possible on {platform}; ranks of a data-parallel group compute on CPUs")
    try:
        joined = join_group(
            place,
            rendezvous=config.rendezvous_url(),
            timeout=timedelta(seconds=config.rendezvous_timeout),
            shared=platform.shared_exchange(place.group_size),
        )
    except GroupUnavailable as error:
        raise BackendError(f"{size}: {error}") from None
    return joined.communicator, joined.group
