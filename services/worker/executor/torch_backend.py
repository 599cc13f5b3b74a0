"""Makes a backend from a model directory: loads, tries what a step takes, sizes KV memory, captures, warms up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from services.worker.distributed.binding import available_cores
from services.worker.distributed.communicator import Communicator
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
from services.worker.models.fallback.encoder_decoder_limits import check_encoder_decoder
from services.worker.models.loaded_model import (
    AttendsAcross,
    LoadedModel,
    LoadSettings,
)
from services.worker.models.lora.slots import NO_LORAS, LoraSettings, LoraSlots, open_loras
from services.worker.models.model_loader import load_model
from services.worker.models.sharding import stage_of
from services.worker.models.states.limits import check_states
from services.worker.models.weights import MixtureMlp
from services.worker.sampling.plugins.interface import ProcessorConfig
from services.worker.sampling.plugins.request_processors import (
    NO_PROCESSORS,
    ProcessorClasses,
    RequestProcessors,
    argument_names,
)
from services.worker.speculation.choice import check_trees, draft_settings, keep_hidden_states, open_drafter
from services.worker.speculation.drafter import TargetModel
from services.worker.speculation.proposer import NO_DRAFTS
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import ModelName
from shared.kv_groups import KvCacheGroup
from shared.messages.model_card import AudioModel, CrossImageModel, EncoderDecoderModel, ModelCard, SamplingDefaults
from shared.models.audio_models import TRANSCRIPTION_ARG, read_audio_model
from shared.models.encoder_models import read_encoder_decoder, settings_not_taken
from shared.models.image_models import read_cross_images
from shared.telemetry.startup import STARTUP

_WARM_UP_ROWS = 8
"""What a first step costs was paid when memory was profiled, or is paid by these."""
_WARM_UP_ROWS_WHERE_COMPILED = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """The model that a rank serves, and what it is served with."""

    model: LoadSettings
    model_name: ModelName
    max_num_seqs: int
    kv_memory_bytes: int | None
    """Of the KV cache; None: what is free."""
    gpu_memory_utilization: float = 0.9
    """The share of all of a GPU's memory that may be taken."""
    threads: int | None = None
    """For computing on a CPU; None: this rank's share of the machine's cores."""
    enforce_eager: bool = False
    """No graphs of decodes."""
    hybrid_kv_cache: HybridKvCache = "off"
    kv_connector: bool = False
    """Whether there is one."""
    speculation: SpeculationSettings | None = None
    loras: LoraSettings = NO_LORAS
    """Adapters that are served beside the model."""
    grammar_limits: GrammarLimits = DEFAULT_LIMITS
    grammar_backend: GrammarBackendName = "auto"
    processors: ProcessorClasses = field(default_factory=lambda: NO_PROCESSORS)
    """Logits processors of plug-ins."""
    prompt_embeds: bool = False
    """Whether prompts may be embeddings."""
    sampling: SamplingDefaults | None = None
    """What requests are sampled with that do not say; None: OpenAI's defaults."""

    @property
    def connected(self) -> bool:
        """Whether a KV connector is told of blocks or of layers."""
        return self.kv_connector or self.model.on_layer is not None

    @property
    def ranks(self) -> int:
        """Ranks that share this host's cores: those of the engine, or of its data-parallel group."""
        wanted = self.model
        if wanted.group is not None:
            return wanted.group.place.group_size
        return wanted.communicator.world_size * wanted.pipeline.stages


@dataclass(frozen=True, slots=True)
class _RankModel:
    """A rank's share of the model, with what is decided once it is loaded."""

    loaded: LoadedModel
    audio: AudioModel | None
    encoder_decoder: EncoderDecoderModel | None
    cross_images: CrossImageModel | None
    groups: tuple[KvCacheGroup, ...]
    loras: LoraSlots | None
    processors: ProcessorClasses


def create_backend(settings: BackendSettings) -> Runner:
    """One rank of a model, ready to step.

    Raises ModelError where the model cannot be served or does not fit, OpsUnavailable where its operations cannot be
    had.
    """
    wanted = settings.model
    wanted.platform.activate()
    wanted.platform.empty_cache()  # what an engine that was in this process before has left in PyTorch's hands
    if wanted.on_layer is not None and not wanted.platform.in_main_memory:
        raise ModelError("kv_connector: layer by layer needs a CPU; a GPU is given steps ahead, decodes as graphs")
    torch.set_num_threads(settings.threads or max(1, available_cores() // settings.ranks))
    model = _load(settings)
    eager = why_eager(
        model.loaded.decoder, wanted.platform, wanted.communicator, wanted.pipeline, enforced=settings.enforce_eager
    )
    check_agreement(wanted.group or wanted.communicator, _summary(model, settings, eager))
    with _enough_memory("what drafts was loaded: use more ranks"):
        parts = _parts(model, settings)
    graphs = RankGraphs.of(parts) if eager is None else NO_GRAPHS
    with STARTUP.stage("profile"):
        groups = f", {model.groups}" if model.groups else ""
        named = f"{model.loaded.fingerprint}, drafts {settings.speculation}{groups}"
        memory = profile(parts, max_batch_tokens=wanted.max_batch_tokens, graphs=graphs, model=named)
    demand = _demand(model, settings, parts.kv_block_bytes)
    size = _agreed(demand, size_kv(demand, memory), wanted.communicator)
    with STARTUP.stage("warm_up"):
        ready = _ready(parts, size, graphs, wanted.max_batch_tokens)
    _tell(model.loaded, parts, size, memory, eager)
    return ready


def _load(settings: BackendSettings) -> _RankModel:
    """Raises ModelError, OpsUnavailable."""
    wanted, speculation = settings.model, settings.speculation
    audio, processors = read_audio_model(wanted.folder), settings.processors
    encoder_decoder = read_encoder_decoder(wanted.folder)
    cross_images = read_cross_images(wanted.folder) if wanted.images_beside else None
    beside = audio or encoder_decoder or cross_images
    if beside is not None:
        _check_combinations(settings, texts_alone=cross_images is not None)
    if encoder_decoder is not None and (left := settings_not_taken(wanted.folder)):
        _log.warning("generation_config.json: no request is searched by %s", left)
    if audio is not None:
        processors = {**processors, **_transcription_rules()}
    with _enough_memory("weights were loaded: end what else is on the device, or use more ranks"):
        loaded = load_model(wanted)
        check_states(
            loaded.config,
            device=wanted.device.type,
            stages=wanted.pipeline.stages,
            drafts=None if speculation is None else speculation.method,
            connector=settings.connected,
            grouped=settings.hybrid_kv_cache == "on",
        )
        if speculation is not None:
            refused = {
                "logits_processors": bool(processors),
                "prefill_context_parallel_size": wanted.context_rows is not None,
            }
            check_trees(speculation, loaded.config, wanted.platform, refused)
        if speculation is not None and wanted.pipeline.stages == 1:
            keep_hidden_states(speculation, loaded.decoder, loaded.config, pools=loaded.pooling is not None)
        groups = _layer_groups(loaded, settings) if beside is None else _encoded_groups(loaded, beside.rows)
        if settings.prompt_embeds and not loaded.generates:
            raise ModelError("enable_prompt_embeds: the model has no language model head and generates no text")
        if loaded.images and cross_images is None:
            loaded.decoder.check_inputs(of_clients=False)
        if settings.prompt_embeds:
            loaded.decoder.check_inputs(of_clients=True)
        slots = open_loras(loaded.decoder, loaded.config, loaded.torch_dtype, settings.loras, settings.model_name)
    return _RankModel(loaded, audio, encoder_decoder, cross_images, groups, slots, processors)


def _check_combinations(settings: BackendSettings, *, texts_alone: bool) -> None:
    """What a model that attends to an encoder's rows does not go with yet. `texts_alone`: it may do without these.
    Raises ModelError."""
    wanted, loras = settings.model, settings.loras
    asked: dict[str, object] = {
        "device": not wanted.platform.in_main_memory,
        "prefill_context_parallel_size": wanted.context_rows is not None,
        "tp": wanted.communicator.world_size > 1 and not texts_alone,
        "pp": wanted.pipeline.stages > 1 and not texts_alone,
        "data_parallel_size": wanted.group is not None,
        "enable_sp": wanted.shared_rows is not None,
        "enable_expert_parallel": wanted.experts.parallel,
        "load_format dummy": wanted.load_format == "dummy",
        "speculative": settings.speculation is not None,
        "kv_connector": settings.connected,
        "hybrid_kv_cache on": settings.hybrid_kv_cache == "on",
        "enable_prompt_embeds": settings.prompt_embeds,
        "lora": (loras.folders or loras.at_run_time) and not texts_alone,
        "pooling_type": wanted.pooling_type not in ("auto", "none"),
        "classifier_from_token": wanted.classifier_from_token,
        "model_impl native": texts_alone and wanted.model_impl == "native",
    }
    instead = "; --language-model-only serves it for texts" if texts_alone else ""
    check_encoder_decoder(str(wanted.folder), asked, instead)


def _summary(model: _RankModel, settings: BackendSettings, eager: str | None) -> str:
    """What all ranks must have alike."""
    decodes = "captured" if eager is None else "run eagerly"
    limits = f"steps of {settings.max_num_seqs} and {settings.model.max_batch_tokens}, decodes {decodes}"
    slots = model.loras
    adapters = "" if slots is None else f", {slots.max_loras} of {[card.id.hex() for card in slots.cards]}"
    return f"{model.loaded.fingerprint}, {limits}{adapters}, {', '.join(model.processors)}"


def _demand(model: _RankModel, settings: BackendSettings, block_bytes: int) -> KvDemand:
    loaded, wanted = model.loaded, settings.model
    pages = loaded.decoder.checkpoint_pages
    return KvDemand(
        block_bytes=block_bytes,
        block_size=wanted.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=loaded.max_model_len,
        explicit_model_len=wanted.max_model_len is not None,
        given=settings.kv_memory_bytes,
        gpu_share=settings.gpu_memory_utilization,
        groups=model.groups,
        step_tokens=wanted.max_batch_tokens,
        state_bytes=loaded.decoder.state_bytes,
        checkpoint_bytes=0 if pages is None else pages.checkpoint_bytes,
    )


def _grammar_settings(loaded: LoadedModel, settings: BackendSettings) -> ServerSettings:
    config, folder = loaded.config, str(settings.model.folder)
    limits, backend = settings.grammar_limits, settings.grammar_backend
    return ServerSettings(folder, config.vocab_size, tuple(config.eos_token_ids), limits, backend)


def _parts(model: _RankModel, settings: BackendSettings) -> RunnerParts:
    """With grammars, processors and a drafter on the ranks that need them. Raises ModelError, PluginError."""
    loaded, wanted, speculation = model.loaded, settings.model, settings.speculation
    config, communicator = loaded.config, wanted.communicator
    samples = loaded.stage.is_last and communicator.rank == 0
    drafting, drafter = NO_DRAFTS, None
    if speculation is not None:
        drafting = draft_settings(speculation, wanted.pipeline)
        target = TargetModel(
            *(wanted.folder, config, loaded.decoder, loaded.decoder.ops, wanted.device),
            *(loaded.torch_dtype, loaded.max_model_len, wanted.layer_ranks.world_size),
            dummy=wanted.load_format == "dummy",
        )
        drafter = open_drafter(speculation, target) if communicator.rank == 0 else None
    made_for = ProcessorConfig(config.vocab_size, settings.max_num_seqs, wanted.device, wanted.folder)
    return RunnerParts(
        card=_card(model, settings),
        platform=wanted.platform,
        decoder=loaded.decoder,
        digest=loaded.digest,
        max_num_seqs=settings.max_num_seqs,
        communicator=communicator,
        pipeline=wanted.pipeline,
        grammars=GrammarLibrary(_grammar_settings(loaded, settings)) if samples else None,
        drafter=drafter,
        drafting=drafting,
        classifier=loaded.classifier,
        loras=model.loras,
        groups=model.groups,
        processors=RequestProcessors(model.processors, made_for) if samples else None,
        processed=bool(model.processors),
        expert_load=_expert_load(loaded),
    )


def _card(model: _RankModel, settings: BackendSettings) -> ModelCard:
    return replace(
        model.loaded.card(settings.model_name),
        prompt_embeds=model.loaded.config.hidden_size if settings.prompt_embeds else None,
        audio=model.audio,
        encoder_decoder=model.encoder_decoder,
        cross_images=model.cross_images,
        sampling=settings.sampling,
        loras=() if model.loras is None else model.loras.cards,
        extra_args=argument_names(model.processors),
    )


def _expert_load(loaded: LoadedModel) -> ExpertLoad | None:
    """Of the first rank of a stage, where picks are counted; of those of its engine's rows. Raises ModelError."""
    wanted, decoder = loaded.settings.experts, loaded.decoder
    if not wanted.counts or not isinstance(decoder, Decoder) or loaded.settings.communicator.rank:
        return None
    path, first = None, loaded.stage.first_layer
    if wanted.load_dir is not None:
        path = load_path(wanted.load_dir, loaded.digest, wanted.engine, first)
    mixing = {first + number: layer.mlp for number, layer in enumerate(decoder.weights.layers)}
    counts = {number: mlp.counts for number, mlp in mixing.items() if isinstance(mlp, MixtureMlp)}
    counted = {number: each for number, each in counts.items() if each is not None}
    named = {"model": loaded.digest, "engine": wanted.engine}
    load = ExpertLoad(counted, decoder.share.placements, path, **named, logs_balance=wanted.logs_balance)
    if decoder.rearranger is not None:
        load.follow(decoder.rearranger)
    return load


def _layer_groups(loaded: LoadedModel, settings: BackendSettings) -> tuple[KvCacheGroup, ...]:
    """The groups that the decoder uses from here on; empty where all layers have one block table. Raises ModelError
    where groups are insisted on and cannot be."""
    if settings.hybrid_kv_cache == "off" or loaded.decoder.state_bytes:
        return ()
    stage, layers = loaded.stage, settings.model.layers
    stages = [stage_of(loaded.config, each, stage.count, layers).num_layers for each in range(stage.count)]
    groups = group_layers(loaded.decoder.windows, loaded.max_model_len, stages if stage.count > 1 else (), stage.index)
    if groups is None:
        return ()
    reason = why_one_group(
        groups,
        device=settings.model.device.type,
        drafts=None if settings.speculation is None else settings.speculation.method,
        trees=settings.speculation is not None and settings.speculation.speculative_eagle_topk > 1,
        connector=settings.connected,
    )
    if reason is not None and settings.hybrid_kv_cache == "on":
        raise ModelError(f"hybrid_kv_cache = on: {reason}")
    if reason is not None:
        _log.info("layers share one block table, and windows free no blocks: %s", reason)
        return ()
    loaded.decoder.use_groups(groups)
    _log.info("layers have block tables in %d groups: %s", len(groups.groups), groups.groups)
    return groups.groups


def _encoded_groups(loaded: LoadedModel, rows: int) -> tuple[KvCacheGroup, ...]:
    """That of a sequence's tokens, and that of the rows, at most so many, which they attend to beside these. Every rank
    of an engine of several stages must come here."""
    assert isinstance(loaded.decoder, AttendsAcross), "what attends to rows is one"
    across, stage = loaded.decoder.across, loaded.stage
    stages: list[tuple[bool, ...]] = [across]
    if stage.count > 1:
        said = loaded.settings.communicator.all_gather("".join(str(int(each)) for each in across))
        stages = [tuple(each == "1" for each in one) for one in said[:: len(said) // stage.count]]
    groups = encoded_layers(stages, stage.index, rows)
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
        if isinstance(parts.decoder, Decoder) and parts.decoder.rearranger is not None:
            parts.decoder.rearranger.restart()
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
