"""One rank's share of a model from a directory: which dtype, which layers, on what operations, and the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from msgspec.structs import replace

from services.worker.distributed.communicator import Communicator
from services.worker.distributed.lockstep import GroupTopology
from services.worker.distributed.residual_rows import ResidualRows
from services.worker.distributed.row_exchange import RowExchange, row_exchange
from services.worker.distributed.torch_ranks import RankGroup
from services.worker.models.block_index.cache import check_index_keys
from services.worker.models.checkpoint import (
    NOWHERE,
    Checkpoint,
    TensorSource,
    open_checkpoint,
    stored_bytes,
    takes_images,
)
from services.worker.models.chosen_blocks.decoder import ChosenBlocksDecoder
from services.worker.models.chosen_blocks.limits import chosen_blocks_of
from services.worker.models.config import BlockIndexConfig, Dtype, ModelConfig, ModelError
from services.worker.models.context_parallel.context_decoder import ContextDecoder
from services.worker.models.context_parallel.shared_ops import ContextRanks
from services.worker.models.data_parallel.group_decoder import GroupDecoder
from services.worker.models.decoder import Decoder
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.expert_parallel.engine_experts import engine_bytes, layer_placer, place_experts
from services.worker.models.expert_parallel.load_window import LoadWindow
from services.worker.models.expert_parallel.placement import ExpertPlacement
from services.worker.models.expert_parallel.rearrangement import ExpertRearranger, RearrangerParts
from services.worker.models.expert_parallel.throttle import ThreadThrottle
from services.worker.models.fallback.library_loader import load_library_model
from services.worker.models.hf_config import has_head, is_native, read_model_config
from services.worker.models.hyper_connections.decoder import CompressedDecoder, StreamsDecoder
from services.worker.models.hyper_connections.gated import GatedStreamsDecoder
from services.worker.models.hyper_connections.limits import check_streams
from services.worker.models.latent.attention import check_latent
from services.worker.models.layerwise.decoder import LayerwiseDecoder
from services.worker.models.loaded_model import (
    TORCH_DTYPES,
    LoadedModel,
    LoadSettings,
    check_tower,
    check_weights_fit,
    code_of,
    create_ops,
    digest_of,
    dtype_of,
    model_len,
    pooling_of,
    quantization_of,
    read_classifier_head,
)
from services.worker.models.loading import load_experts, load_weights
from services.worker.models.plugins.architectures import PluginModel, find_plugin_model
from services.worker.models.plugins.interface import DecoderParts
from services.worker.models.pooling.classification import (
    ClassifierHead,
    label_head,
    token_ids,
)
from services.worker.models.pooling.step_pooling import read_token_rows
from services.worker.models.published.names import library_names
from services.worker.models.published.transposed import TransposedCheckpoint, has_transposed
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.models.quantization.method import QuantizationMethod
from services.worker.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from services.worker.models.sharding import LayerShard, PipelineStage, shard_of, stage_of
from services.worker.models.weight_sharing.sharing import shared_weights, sharing_key
from services.worker.models.weights import DecoderWeights, MixtureMlp
from services.worker.ops.interface import ExpertPacker, Ops, PackedExperts, SupportsExpertMoves
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.quantized import Scheme
from services.worker.ops.torch_ops import TorchOps
from shared.messages.model_card import PoolingCard
from shared.models.audio_models import read_sound_model
from shared.models.image_models import hears_alone, nests_language_model
from shared.models.video_models import read_video_model
from shared.telemetry.startup import STARTUP

_QUANTIZED_BYTES: dict[Scheme, float] = {"int8": 1.0, "fp8": 1.0, "int4": 0.6, "w8a8_int8": 1.0, "w8a8_fp8": 1.0}
"""Of a weight, with the scales of groups."""


def load_model(settings: LoadSettings) -> LoadedModel:
    """Reads the configuration and loads this rank's share of the weights.

    Raises ModelError where the model cannot be served or does not fit, OpsUnavailable for want of its operations."""
    check_tower(settings)
    plugin = None if settings.model_impl == "transformers" else find_plugin_model(settings.folder)
    ours = plugin is not None or (is_native(settings.folder) and not settings.images_beside)
    if settings.model_impl == "transformers" or (settings.model_impl == "auto" and not ours):
        return load_library_model(settings)
    config = read_model_config(settings.folder, quantized=True) if plugin is None else plugin.config
    method = quantization_of(settings)
    if plugin is not None:
        _check_plugin(settings, plugin, method)
    if settings.context_rows is not None and config.states is not None:
        raise ModelError("prefill_context_parallel_size: not for a model with states, which go on from row to row")
    if settings.context_rows is not None and config.layer_norms:
        raise ModelError("prefill_context_parallel_size: not for a model with layer norms")
    stage = stage_of(config, settings.pipeline.stage, settings.pipeline.stages, settings.layers)
    if config.latent is not None:
        check_latent(config.latent, settings.kv_cache_dtype, settings.attention, stage)
    check_streams(settings, config, stage, method)
    dtype = dtype_of(settings.dtype, config)
    length = model_len(config, settings.max_model_len)
    chosen_blocks = chosen_blocks_of(settings, config, length)
    generates = plugin is not None or has_head(settings.folder)
    pooling = pooling_of(settings, config, generates=generates)
    if pooling is None and not generates:
        raise ModelError(f"{settings.folder}: there is no language model head, so it needs a pooling_type to serve")
    stage_bytes = _weight_bytes(settings, config, stage, dtype, method)
    memory = settings.platform.memory()

    def check_fits(placements: tuple[ExpertPlacement, ...] = (), room: int = memory.free) -> None:
        needed = engine_bytes(settings.experts, config, stage_bytes, placements, settings.group)
        check_weights_fit(needed, dtype, settings.layer_ranks.world_size, room)

    check_fits(room=memory.total if settings.share_weights else memory.free)  # reads no file whole
    digest = digest_of(settings, config)
    experts = place_experts(settings.experts, config, digest, settings.communicator, settings.group)
    decoder, classifier = _decoder(
        *(settings, config, stage, TORCH_DTYPES[dtype], length, pooling, method, plugin, experts),
        *(digest, partial(check_fits, experts), chosen_blocks),
    )
    media = plugin is None and not settings.language_model_only
    media = media and takes_images(settings.folder, settings.load_format, settings.platform)
    sounds = read_sound_model(settings.folder) if media else None
    return LoadedModel(
        settings=settings,
        config=config,
        dtype=dtype,
        max_model_len=length,
        stage=stage,
        digest=digest,
        decoder=decoder,
        pooling=pooling,
        classifier=classifier,
        generates=generates,
        images=media and not (sounds is not None and hears_alone(settings.folder)),
        videos=read_video_model(settings.folder) if media else None,
        sounds=sounds,
    )


def _decoder(
    settings: LoadSettings,
    config: ModelConfig,
    stage: PipelineStage,
    dtype: torch.dtype,
    max_model_len: int,
    pooling: PoolingCard | None,
    method: QuantizationMethod | None,
    plugin: PluginModel | None,
    experts: tuple[ExpertPlacement, ...],
    digest: str,
    check_fits: Callable[[], None],
    chosen_blocks: BlockIndexConfig | None,
) -> tuple[Decoder, ClassifierHead | None]:
    """With the classification head on the last stage of a classifier. `check_fits`: before weights are read."""
    expert_rank = None if settings.group is None else settings.group.place.in_group
    share = shard_of(config, settings.layer_ranks.rank, settings.layer_ranks.world_size, experts, expert_rank)
    if chosen_blocks is not None:
        check_index_keys(config, chosen_blocks, share, settings.block_size)
    with STARTUP.stage("kernels"):
        ops = create_ops(settings, dtype)
    with torch.inference_mode(), STARTUP.stage("weights"), _tensors(settings, config, dtype, method, plugin) as tensors:
        packer = _packer(settings, ops, plugin) if settings.experts.moves and len(experts[0].ranks) > 1 else None
        counts = settings.experts.counts and settings.communicator.rank == 0

        def load() -> DecoderWeights:
            check_fits()
            if isinstance(tensors, Checkpoint | QuantizedCheckpoint | TransposedCheckpoint):
                load_weights(tensors.headers(), config, share, TorchOps(NOWHERE, dtype), NOWHERE, max_model_len, stage)
            return load_weights(
                *(tensors, config, share, ops, settings.device, max_model_len, stage),
                quantization=code_of(settings),
                counts_picks=counts,
                packer=packer,
            )

        if settings.share_weights and isinstance(ops, NativeOps) and packer is None and plugin is None:
            parts = (digest, dtype, share, stage, max_model_len, settings.quantization, settings.load_format, counts)
            weights = shared_weights(sharing_key(settings.folder, ops, *parts), ops, load)
        else:
            weights = load()
        head = _head_of(settings, tensors, config, pooling) if stage.is_last else None
    decoder = _decoder_of(settings, config, weights, share, ops, plugin, chosen_blocks)
    if settings.shared_rows is not None:
        _share_rows(settings.shared_rows, decoder, settings.communicator, settings.group)
    if packer is not None:
        throttle = ThreadThrottle()
        read_beside = _tensors(settings, config, dtype, method, None, throttle.rest)
        gathering = _Gathering(settings, config, ops, packer, read_beside, throttle)
        decoder.rearranger = _rearranger(settings, config, weights, share, gathering)
    return decoder, head


def _decoder_of(
    settings: LoadSettings,
    config: ModelConfig,
    weights: DecoderWeights,
    share: LayerShard,
    ops: Ops,
    plugin: PluginModel | None,
    chosen_blocks: BlockIndexConfig | None,
) -> Decoder:
    if settings.context_rows is not None:
        return _context_decoder(settings, settings.context_rows, config, weights, share, ops)
    parts = (config, weights, share, ops, settings.communicator)
    if plugin is not None:
        return plugin.decoder(DecoderParts(*parts, settings.pipeline))
    if config.connections is not None:
        if config.connections.rank:
            return GatedStreamsDecoder(*parts, settings.pipeline)
        streams = StreamsDecoder if config.compressed is None else CompressedDecoder
        return streams(*parts, settings.pipeline)
    if chosen_blocks is not None:
        stages = tuple(
            stage_of(config, each, settings.pipeline.stages, settings.layers)
            for each in range(settings.pipeline.stages)
        )
        return ChosenBlocksDecoder(config, chosen_blocks, *parts[1:], settings.pipeline, stages)
    if settings.group is not None:
        return GroupDecoder(*parts, settings.group, settings.experts.all2all)
    if settings.on_layer is not None:
        return LayerwiseDecoder(*parts, settings.pipeline, settings.on_layer)
    return Decoder(*parts, settings.pipeline)


def _context_decoder(
    settings: LoadSettings, min_rows: int, config: ModelConfig, weights: DecoderWeights, share: LayerShard, ops: Ops
) -> ContextDecoder:
    """Raises ModelError where ranks cannot exchange rows in memory."""
    exchange, place = settings.communicator.in_memory, settings.communicator
    if exchange is None or not settings.platform.in_main_memory:
        raise ModelError("prefill_context_parallel_size: the ranks need the C++ library, CPUs and /dev/shm of one host")
    writes = replace(share, first_of_kv_heads=place.rank == 0)
    return ContextDecoder(config, weights, writes, ops, ContextRanks(exchange, place.rank, place.world_size), min_rows)


def _share_rows(min_rows: int, decoder: Decoder, communicator: Communicator, group: RankGroup | None) -> None:
    """Raises ModelError where ranks cannot exchange rows in memory."""
    exchange = communicator.in_memory
    if exchange is None or not exchange.takes(decoder.ops.empty_rows(1, 1)):
        raise ModelError("enable_sp: the ranks need the C++ library, CPUs and /dev/shm of one host, and no float16")
    alone = GroupTopology(communicator.rank, communicator.world_size, 1, 0)
    if group is not None:
        routed: RowExchange | None = group.shared_row_exchange()
    else:
        routed = row_exchange("auto", alone, exchange) if decoder.share.placements else None
    decoder.share_rows(ResidualRows(communicator, exchange, min_rows), routed)


def _packer(settings: LoadSettings, ops: Ops, plugin: PluginModel | None) -> ExpertPacker:
    """Raises ModelError where experts cannot be moved while steps are computed."""
    if plugin is None and settings.platform.in_main_memory and isinstance(ops, SupportsExpertMoves):
        return ops.expert_packer()
    where = f"on {settings.platform.name}" if plugin is None else f"of a model of {plugin.where}"
    raise ModelError(
        f"eplb_config: experts {where} are not moved while steps are computed; step_interval 0 places them at the start"
    )


def _rearranger(
    settings: LoadSettings,
    config: ModelConfig,
    weights: DecoderWeights,
    share: LayerShard,
    gathering: _Gathering,
) -> ExpertRearranger:
    numbered = enumerate(weights.layers, weights.first_layer)
    mixing = {number: layer.mlp for number, layer in numbered if isinstance(layer.mlp, MixtureMlp)}
    counts = [each.counts for each in mixing.values() if each.counts is not None]
    experts = settings.experts
    parts = RearrangerParts(
        layers={number: mlp.experts for number, mlp in mixing.items()},
        rank=share.rank,
        interval=experts.interval,
        place=layer_placer(experts, config, settings.communicator, settings.group),
        gather=gathering.gather,
        throttle=gathering.throttle,
        share=settings.communicator.sum if settings.group is None else settings.group.sum,
        window=LoadWindow(counts, experts.window, experts.interval) if counts else None,
        device=settings.device,
    )
    return ExpertRearranger(parts, share.placements)


class _Gathering:
    """Where a rank has experts from that it does not have yet: the checkpoint, as it was at the start. It stays
    open: to read the names and places of all tensors again would hold the interpreter, which steps need."""

    def __init__(
        self,
        settings: LoadSettings,
        config: ModelConfig,
        ops: Ops,
        packer: ExpertPacker,
        tensors: AbstractContextManager[TensorSource],
        throttle: ThreadThrottle,
    ) -> None:
        """`tensors` are closed when this is gone."""
        self._config, self._packer, self._tensors, self.throttle = config, packer, tensors, throttle
        self._matrices = MatrixLoader(tensors.__enter__(), ops, settings.device, code_of(settings))

    def gather(self, layer: int, wanted: Sequence[int], held: Sequence[int], packed: PackedExperts) -> PackedExperts:
        """See `GatherExperts`. One expert after the other: so much is there twice, and no more is done at a time."""
        parts: list[tuple[PackedExperts, int]] = []
        for expert in wanted:
            if expert in held:
                parts.append((packed, held.index(expert)))
            else:
                parts.append((load_experts(self._matrices, self._config, self._packer, layer, [expert]), 0))
                self.throttle.rest()
        return self._packer.arrange_experts(parts)


def _head_of(
    settings: LoadSettings, tensors: TensorSource, config: ModelConfig, pooling: PoolingCard | None
) -> ClassifierHead | None:
    if settings.classifier_from_token:
        ids = token_ids(settings.folder, settings.classifier_from_token, config.vocab_size)
        return label_head(read_token_rows(tensors, config, ids))
    if pooling is not None and pooling.token_ids:
        return read_token_rows(tensors, config, pooling.token_ids)
    return read_classifier_head(settings, tensors, pooling, config.hidden_size)


@contextmanager
def _tensors(
    settings: LoadSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    method: QuantizationMethod | None,
    plugin: PluginModel | None,
    rest: Callable[[], None] | None = None,
) -> Iterator[TensorSource]:
    """The checkpoint's tensors, or dummy weights. `rest`: see `TensorFiles`."""
    if settings.load_format == "dummy":
        yield DummyTensors(dtype, settings.device, norm_offset=config.norm_offset)
        return
    with open_checkpoint(
        settings.folder,
        dtype,
        device=settings.device,
        base="model.",
        language_model=nests_language_model(settings.folder),
        rename=library_names(config),
        rest=rest,
    ) as checkpoint:
        if plugin is not None:
            yield plugin.tensors(checkpoint)
        elif method is None and has_transposed(config.architecture):
            yield TransposedCheckpoint(checkpoint, config.architecture)
        else:
            yield checkpoint if method is None else QuantizedCheckpoint(checkpoint, method, dtype)


def _check_plugin(settings: LoadSettings, plugin: PluginModel, method: QuantizationMethod | None) -> None:
    """Raises ModelError for what models of packages are not served with."""
    if settings.on_layer is not None:
        raise ModelError(f"a layer-wise KV connector is not told of the layers of a model of {plugin.where}")
    if method is not None:
        raise ModelError(f"quantization_config: a model of {plugin.where} is read from weights that are not quantised")
    asked = (
        ("classifier_from_token", settings.classifier_from_token),
        ("data_parallel_size", settings.group),
        ("enable_sp", settings.shared_rows),
        ("prefill_context_parallel_size", settings.context_rows),
    )
    for name in (name for name, value in asked if value):
        raise ModelError(f"{name}: not allowed for a model of {plugin.where}")


def _weight_bytes(
    settings: LoadSettings,
    config: ModelConfig,
    stage: PipelineStage,
    dtype: Dtype,
    method: QuantizationMethod | None,
) -> int:
    """Bytes of the weights of all ranks of a stage together."""
    quantization = settings.quantization
    if method is not None:
        return stored_bytes(settings.folder, config.num_blocks) * method.growth * stage.num_layers // config.num_layers
    table, item = config.vocab_size * config.hidden_size, TORCH_DTYPES[dtype].itemsize
    own_head = stage.is_last and not (config.tied_embeddings and stage.is_first)
    layers = config.layers[stage.first_layer : stage.end_layer]
    parameters = config.layer_parameters(layers)
    if quantization == "auto":
        return (parameters + table * (stage.is_first + own_head)) * item
    return int(parameters * _QUANTIZED_BYTES[quantization]) + table * (stage.is_first * item + stage.is_last)
