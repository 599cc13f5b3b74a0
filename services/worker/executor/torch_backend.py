"""Makes a backend from a model directory: loads, tries what a step takes, sizes KV memory, captures, warms up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from msgspec.structs import replace

from services.worker.distributed.binding import available_cores
from services.worker.distributed.communicator import Communicator, Pipeline, SingleStage
from services.worker.distributed.torch_ranks import RankGroup
from services.worker.executor.kv_sizing import DeviceMemory, KvDemand, KvSize, profile, size_kv
from services.worker.executor.runner_parts import Runner, RunnerParts
from services.worker.executor.warm_up import warm_up, warm_up_shapes
from services.worker.graphs.choice import NO_GRAPHS, RankGraphs, why_eager
from services.worker.guided.library import GrammarLibrary
from services.worker.guided.limits import DEFAULT_LIMITS, GrammarBackendName, GrammarLimits
from services.worker.guided.protocol import ServerSettings
from services.worker.kv.layer_groups import HybridKvCache, encoded_layers, group_layers, why_one_group
from services.worker.models.config import ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.expert_parallel.expert_load import ExpertLoad, load_path
from services.worker.models.expert_parallel.settings import NO_EXPERT_PARALLEL, ExpertSettings
from services.worker.models.fallback.encoder_decoder_limits import check_encoder_decoder
from services.worker.models.loaded_model import (
    DtypeChoice,
    LoadedModel,
    LoadFormat,
    LoadSettings,
    ModelImpl,
    QuantizationChoice,
)
from services.worker.models.lora.slots import NO_LORAS, LoraSettings, LoraSlots, open_loras
from services.worker.models.model_loader import load_model
from services.worker.models.pooling.sentence_transformers import PoolingChoice
from services.worker.models.sharding import stage_of
from services.worker.models.states.limits import check_states
from services.worker.models.weights import MixtureMlp
from services.worker.ops.interface import AttentionName, CacheDtype, OpsName
from services.worker.platforms.interface import Platform
from services.worker.sampling.plugins.interface import ProcessorConfig
from services.worker.sampling.plugins.request_processors import (
    NO_PROCESSORS,
    ProcessorClasses,
    RequestProcessors,
    argument_names,
)
from services.worker.speculation.choice import draft_settings, keep_hidden_states, open_drafter
from services.worker.speculation.drafter import TargetModel
from services.worker.speculation.proposer import NO_DRAFTS
from services.worker.speculation.settings import SpeculationSettings
from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import ModelName
from shared.kv_groups import KvCacheGroup
from shared.messages.model_card import AudioModel, ModelCard
from shared.models.audio_models import TRANSCRIPTION_ARG, read_audio_model
from shared.telemetry.startup import STARTUP

_WARM_UP_ROWS = 8
"""What a first step costs was paid when memory was profiled, or is paid by these."""
_WARM_UP_ROWS_WHERE_COMPILED = 64

_log = logging.getLogger(__name__)


def create_backend(
    model_dir: Path,
    *,
    model_name: ModelName,
    platform: Platform,
    dtype: DtypeChoice,
    max_model_len: int | None,
    kv_memory_bytes: int | None,
    max_num_seqs: int,
    max_batch_tokens: int,
    rank: int,
    world_size: int,
    communicator: Communicator,
    ops: OpsName,
    load_format: LoadFormat = "auto",
    model_impl: ModelImpl = "auto",
    pooling_type: PoolingChoice = "auto",
    classifier_from_token: tuple[str, ...] = (),
    trust_remote_code: bool = False,
    quantization: QuantizationChoice = "auto",
    threads: int | None = None,
    pipeline: Pipeline | None = None,
    layers: Sequence[int] | None = None,
    speculation: SpeculationSettings | None = None,
    gpu_memory_utilization: float = 0.9,
    enforce_eager: bool = False,
    kv_cache_dtype: CacheDtype = "auto",
    block_size: int = DEFAULT_BLOCK_SIZE,
    attention: AttentionName = "auto",
    grammar_limits: GrammarLimits = DEFAULT_LIMITS,
    grammar_backend: GrammarBackendName = "auto",
    on_layer: Callable[[int], None] | None = None,
    loras: LoraSettings = NO_LORAS,
    hybrid_kv_cache: HybridKvCache = "off",
    kv_connector: bool = False,
    processors: ProcessorClasses = NO_PROCESSORS,
    prompt_embeds: bool = False,
    experts: ExpertSettings = NO_EXPERT_PARALLEL,
    group: RankGroup | None = None,
) -> Runner:
    """One rank of the model in `model_dir`, ready to step, on the device of `platform`.

    `rank` and `world_size` count the ranks of its stage. `threads`: for computing on a CPU; None: this rank's share of
    the machine's cores. `layers`: of each stage of `pipeline`; None: as even as can be. `gpu_memory_utilization`: the
    share of all of a GPU's memory that may be taken. `enforce_eager`: no graphs of decodes. `block_size`: tokens of a
    KV block. `loras`: adapters that are served beside the model. `on_layer`: see `LayerwiseDecoder`; only for CPUs.
    `hybrid_kv_cache`: see `_layer_groups`. `kv_connector`: there is one. `processors`: logits processors of plug-ins.
    `prompt_embeds`: prompts may be embeddings. `experts`: how a mixture's are spread over ranks. `group`: the
    data-parallel group whose ranks they are.

    Raises ModelError where the model cannot be served or does not fit, OpsUnavailable where `ops` cannot be had.
    """
    if (rank, world_size) != (communicator.rank, communicator.world_size):
        raise ValueError(f"rank {rank} of {world_size} is not the communicator's")
    platform.activate()
    platform.empty_cache()  # what an engine that was in this process before has left in PyTorch's hands
    if on_layer is not None and not platform.in_main_memory:
        raise ModelError("kv_connector: layer by layer needs a CPU; a GPU is given steps ahead, decodes as graphs")
    pipeline = pipeline or SingleStage()
    ranks = world_size * pipeline.stages if group is None else group.place.group_size
    torch.set_num_threads(threads or max(1, available_cores() // ranks))
    wanted = LoadSettings(
        folder=model_dir,
        platform=platform,
        dtype=dtype,
        max_model_len=max_model_len,
        load_format=load_format,
        ops=ops,
        cache=kv_cache_dtype,
        block_size=block_size,
        attention=attention,
        communicator=communicator,
        pipeline=pipeline,
        layers=layers,
        on_layer=on_layer,
        impl=model_impl,
        pooling=pooling_type,
        classifier_from_token=classifier_from_token,
        max_batch_tokens=max_batch_tokens,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        experts=experts,
        group=group,
    )
    audio = read_audio_model(model_dir)
    if audio is not None:
        asked = {
            "device": not platform.in_main_memory,
            "tp": world_size > 1,
            "pp": pipeline.stages > 1,
            "load_format dummy": load_format == "dummy",
            "speculative": speculation is not None,
            "kv_connector": kv_connector or on_layer is not None,
            "hybrid_kv_cache on": hybrid_kv_cache == "on",
            "enable_prompt_embeds": prompt_embeds,
            "lora": bool(loras.folders or loras.at_run_time),
            "pooling_type": pooling_type not in ("auto", "none"),
            "classifier_from_token": classifier_from_token,
        }
        check_encoder_decoder(str(model_dir), asked)
        processors = {**processors, **_transcription_rules()}
    with _enough_memory("weights were loaded: end what else is on the device, or use more ranks"):
        loaded = load_model(wanted)
        drafts = None if speculation is None else speculation.method
        connected = kv_connector or on_layer is not None
        check_states(
            loaded.config,
            device=platform.device.type,
            stages=pipeline.stages,
            drafts=drafts,
            connector=connected,
            grouped=hybrid_kv_cache == "on",
        )
        if speculation is not None and pipeline.stages == 1:
            keep_hidden_states(speculation, loaded.decoder, loaded.config, pools=loaded.pooling is not None)
        if audio is None:
            groups = _layer_groups(loaded, hybrid_kv_cache, speculation, connector=kv_connector)
        else:
            groups = _encoded_groups(loaded, audio)
        if prompt_embeds and not loaded.generates:
            raise ModelError("enable_prompt_embeds: the model has no language model head and generates no text")
        if prompt_embeds or loaded.images:
            loaded.decoder.check_inputs()
        slots = open_loras(loaded.decoder, loaded.config, loaded.torch_dtype, loras, model_name)
    eager = why_eager(loaded.decoder, platform, communicator, pipeline, enforced=enforce_eager)
    limits = f"steps of {max_num_seqs} and {max_batch_tokens}, decodes {'captured' if eager is None else 'run eagerly'}"
    adapters = "" if slots is None else f", {slots.max_loras} of {[card.id.hex() for card in slots.cards]}"
    check_agreement(group or communicator, f"{loaded.fingerprint}, {limits}{adapters}, {', '.join(processors)}")
    with _enough_memory("what drafts was loaded: use more ranks"):
        grammars = _grammar_settings(loaded, grammar_limits, grammar_backend)
        rows = loaded.config.hidden_size if prompt_embeds else None
        card = replace(loaded.card(model_name), prompt_embeds=rows, audio=audio)
        parts = _parts(loaded, card, max_num_seqs, speculation, grammars, slots, groups, processors)
    graphs = RankGraphs.of(parts) if eager is None else NO_GRAPHS
    with STARTUP.stage("profile"):
        named = f"{loaded.fingerprint}, drafts {speculation}" + (f", {groups}" if groups else "")
        memory = profile(parts, max_batch_tokens=max_batch_tokens, graphs=graphs, model=named)
    demand = KvDemand(
        block_bytes=parts.kv_block_bytes,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=loaded.max_model_len,
        explicit_model_len=max_model_len is not None,
        given=kv_memory_bytes,
        gpu_share=gpu_memory_utilization,
        groups=groups,
        step_tokens=max_batch_tokens,
        state_bytes=loaded.decoder.state_bytes,
        checkpoint_bytes=0 if (pages := loaded.decoder.checkpoint_pages) is None else pages.checkpoint_bytes,
    )
    size = _agreed(demand, size_kv(demand, memory), communicator)
    with STARTUP.stage("warm_up"):
        ready = _ready(parts, size, graphs, max_batch_tokens)
    _tell(loaded, parts, size, memory, eager)
    return ready


def _grammar_settings(loaded: LoadedModel, limits: GrammarLimits, backend: GrammarBackendName) -> ServerSettings:
    config = loaded.config
    return ServerSettings(str(loaded.settings.folder), config.vocab_size, tuple(config.eos_token_ids), limits, backend)


def _parts(
    loaded: LoadedModel,
    card: ModelCard,
    max_num_seqs: int,
    speculation: SpeculationSettings | None,
    grammars: ServerSettings,
    loras: LoraSlots | None,
    groups: tuple[KvCacheGroup, ...],
    processors: ProcessorClasses,
) -> RunnerParts:
    """With grammars, processors and a drafter on the ranks that need them. Raises ModelError, PluginError."""
    folder, config, wanted = loaded.settings.folder, loaded.config, loaded.settings
    communicator, pipeline = wanted.communicator, wanted.pipeline
    samples = loaded.stage.is_last and communicator.rank == 0
    drafting, drafter = NO_DRAFTS, None
    if speculation is not None:
        drafting = draft_settings(speculation, pipeline)
        target = TargetModel(
            *(folder, config, loaded.decoder, loaded.decoder.ops, wanted.device),
            *(loaded.torch_dtype, loaded.max_model_len, communicator.world_size),
        )
        drafter = open_drafter(speculation, target) if communicator.rank == 0 else None
    made_for = ProcessorConfig(config.vocab_size, max_num_seqs, wanted.device, folder)
    return RunnerParts(
        card=replace(
            card,
            loras=() if loras is None else loras.cards,
            extra_args=argument_names(processors),
        ),
        platform=wanted.platform,
        decoder=loaded.decoder,
        digest=loaded.digest,
        max_num_seqs=max_num_seqs,
        communicator=communicator,
        pipeline=pipeline,
        grammars=GrammarLibrary(grammars) if samples else None,
        drafter=drafter,
        drafting=drafting,
        classifier=loaded.classifier,
        loras=loras,
        groups=groups,
        processors=RequestProcessors(processors, made_for) if samples else None,
        processed=bool(processors),
        expert_load=_expert_load(loaded),
    )


def _expert_load(loaded: LoadedModel) -> ExpertLoad | None:
    """Of the first rank of a stage, or a group, where picks are counted. Raises ModelError."""
    wanted, decoder = loaded.settings.experts, loaded.decoder
    if not wanted.counts or not isinstance(decoder, Decoder) or decoder.share.rank:
        return None
    path, first = None, loaded.stage.first_layer
    if wanted.load_dir is not None:
        path = load_path(wanted.load_dir, loaded.digest, wanted.engine, first)
    mixing = {first + number: layer.mlp for number, layer in enumerate(decoder.weights.layers)}
    counts = {number: mlp.counts for number, mlp in mixing.items() if isinstance(mlp, MixtureMlp)}
    counted = {number: each for number, each in counts.items() if each is not None}
    return ExpertLoad(counted, decoder.share.placements, path, model=loaded.digest, engine=wanted.engine)


def _layer_groups(
    loaded: LoadedModel,
    wanted: HybridKvCache,
    speculation: SpeculationSettings | None,
    *,
    connector: bool,
) -> tuple[KvCacheGroup, ...]:
    """The groups that the decoder uses from here on; empty where all layers have one block table. Raises ModelError
    where groups are insisted on and cannot be."""
    if wanted == "off":
        return ()
    settings, stage = loaded.settings, loaded.stage
    stages = [stage_of(loaded.config, each, stage.count, settings.layers).num_layers for each in range(stage.count)]
    groups = group_layers(loaded.decoder.windows, loaded.max_model_len, stages if stage.count > 1 else (), stage.index)
    if groups is None:
        return ()
    reason = why_one_group(
        groups,
        device=settings.device.type,
        drafts=None if speculation is None else speculation.method,
        connector=connector or settings.on_layer is not None,
    )
    if reason is not None and wanted == "on":
        raise ModelError(f"hybrid_kv_cache = on: {reason}")
    if reason is not None:
        _log.info("layers share one block table, and windows free no blocks: %s", reason)
        return ()
    loaded.decoder.use_groups(groups)
    _log.info("layers have block tables in %d groups: %s", len(groups.groups), groups.groups)
    return groups.groups


def _encoded_groups(loaded: LoadedModel, audio: AudioModel) -> tuple[KvCacheGroup, ...]:
    """That of a sequence's tokens, and that of the rows which they attend to beside these."""
    groups = encoded_layers(loaded.config.num_layers, audio.rows)
    loaded.decoder.use_groups(groups)
    return groups.groups


def _transcription_rules() -> ProcessorClasses:
    from services.worker.sampling.transcription import TranscriptionRules

    return {TRANSCRIPTION_ARG: TranscriptionRules}


def _agreed(demand: KvDemand, size: KvSize, communicator: Communicator) -> KvSize:
    """What fits every rank; those of stages without states have room for any number of checkpoints."""
    checkpoints = size.state_checkpoints if demand.state_bytes else 1 << 30
    return KvSize(*(communicator.minimum(each) for each in (size.num_blocks, size.max_model_len, checkpoints)))


def _ready(parts: RunnerParts, size: KvSize, graphs: RankGraphs, rows: int) -> Runner:
    """Everything captured, and every first-time cost paid. Raises ModelError."""
    with _enough_memory("decodes were captured: lower gpu_memory_utilization or kv_memory, or give enforce_eager"):
        runner = parts.runner(
            *(size.num_blocks, size.max_model_len, *graphs.replaying(size.max_model_len)),
            state_checkpoints=size.state_checkpoints,
        )
        compiles = parts.platform.compiles
        few = min(rows, _WARM_UP_ROWS_WHERE_COMPILED if compiles else _WARM_UP_ROWS)
        warm_up(runner, rows=few, sequences=parts.max_num_seqs)
        if compiles:
            warm_up_shapes(runner, rows=rows)
        if parts.expert_load is not None:
            parts.expert_load.restart()
    return runner


@contextmanager
def _enough_memory(otherwise: str) -> Iterator[None]:
    """Raises ModelError where there was not. `otherwise`: what was being done, and what to do about it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ModelError(f"the device's memory ran out while {otherwise}") from None


def _tell(loaded: LoadedModel, parts: RunnerParts, size: KvSize, memory: DeviceMemory, eager: str | None) -> None:
    _log.info(
        "%s: %d parameters in %s, layers %d to %d, %d blocks of KV memory of %d bytes (%d of a token), %s, "
        "%s operations, decodes %s",
        *(parts.card.name, loaded.config.parameters, loaded.dtype),
        *(loaded.stage.first_layer, loaded.stage.end_layer - 1, size.num_blocks, parts.kv_block_bytes),
        *(
            parts.kv_block_bytes // parts.card.block_size,
            memory.summary(),
            loaded.decoder.ops_name,
            "captured" if eager is None else f"run eagerly: {eager}",
        ),
    )


def check_agreement(communicator: Communicator | RankGroup, own: str) -> None:
    """Ranks of several hosts, or engines, may have been given different models. Raises ModelError."""
    said = communicator.all_gather(own)
    other = next((rank for rank, word in enumerate(said) if word != own), None)
    if other is not None:
        raise ModelError(f"the engine's ranks differ: here {own}; rank {other} has {said[other]}")
