"""One rank's share of a model from a directory: which dtype, which layers, on what operations, and the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from msgspec import Struct
from msgspec.structs import replace

from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.distributed.torch_ranks import RankGroup
from services.worker.models.checkpoint import (
    TensorSource,
    checkpoint_files,
    dummy_digest,
    model_digest,
    open_checkpoint,
    quantized_digest,
    takes_images,
)
from services.worker.models.config import Dtype, ModelConfig, ModelDescription, ModelError
from services.worker.models.data_parallel.group_decoder import GroupDecoder
from services.worker.models.decoder import CausalLm, Decoder, LayerwiseDecoder
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.expert_parallel.engine_experts import check_experts, engine_bytes, place_experts
from services.worker.models.expert_parallel.placement import ExpertPlacement
from services.worker.models.expert_parallel.settings import NO_EXPERT_PARALLEL, ExpertSettings
from services.worker.models.hf_config import has_head, is_native, read_model_config
from services.worker.models.latent.attention import check_latent
from services.worker.models.loading import load_weights
from services.worker.models.plugins.architectures import PluginModel, find_plugin_model
from services.worker.models.plugins.interface import DecoderParts
from services.worker.models.pooling.classification import (
    DECODER_HEAD,
    ClassifierHead,
    read_classifier,
    read_token_head,
    token_card,
)
from services.worker.models.pooling.sentence_transformers import PoolingChoice, read_pooling, read_projections
from services.worker.models.quantization.method import QuantizationMethod, read_method, rounding_ops
from services.worker.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from services.worker.models.sharding import PipelineStage, shard_of, stage_of
from services.worker.ops.interface import AttentionName, CacheDtype, Ops, OpsName
from services.worker.ops.quantized import Scheme
from services.worker.ops.selector import OpsChoice
from services.worker.platforms.interface import Platform
from services.worker.platforms.main_memory import gib
from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import ModelName
from shared.messages.generation import PoolingType
from shared.messages.lifecycle import ModelCard, PoolingCard
from shared.models.image_models import read_image_model
from shared.telemetry.startup import STARTUP

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

ModelImpl = Literal["auto", "native", "transformers"]
"""Whose code computes the model. auto: ours where it knows the architecture."""

QuantizationChoice = Literal["auto", "int8", "int4", "fp8", "w8a8_int8"]
"""What weights are rounded to as they are loaded."""

LoadFormat = Literal["auto", "safetensors", "dummy"]
"""auto: safetensors, the only files there are."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_QUANTIZED_BYTES: dict[Scheme, float] = {"int8": 1.0, "fp8": 1.0, "int4": 0.6, "w8a8_int8": 1.0}
"""Of a weight, with the scales of groups."""
DEFAULT_STATE_MODEL_LEN = 32_768
"""Tokens of the longest sequence of a model without attention, which has no positions and could go on for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The model to load, and how to load it."""

    folder: Path
    platform: Platform
    dtype: DtypeChoice
    max_model_len: int | None
    load_format: LoadFormat
    ops: OpsName
    cache: CacheDtype
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of a block of keys and values."""
    attention: AttentionName = "auto"
    communicator: Communicator
    pipeline: Pipeline
    layers: Sequence[int] | None
    """Number of layers of each stage; None: spread evenly."""
    on_layer: Callable[[int], None] | None = None
    """See `LayerwiseDecoder`; None: nobody is told of layers."""
    impl: ModelImpl = "auto"
    pooling: PoolingChoice = "auto"
    """How prompts become vectors."""
    classifier_from_token: tuple[str, ...] = ()
    """The one or two tokens whose logits judge a prompt; none: the model judges by a head of its own, or not at all."""
    quantization: QuantizationChoice = "auto"
    max_batch_tokens: int = 2048
    """Tokens of the largest step."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run; only where `transformers` computes it."""
    experts: ExpertSettings = NO_EXPERT_PARALLEL
    group: RankGroup | None = None
    """The data-parallel group whose ranks share experts; None: those of the stage do."""

    @property
    def device(self) -> torch.device:
        """What PyTorch calls the rank's device."""
        return self.platform.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One rank's share of a model, ready to compute."""

    settings: LoadSettings
    config: ModelDescription
    dtype: Dtype
    max_model_len: int
    """What was asked for, or what the model can."""
    stage: PipelineStage
    digest: str
    decoder: CausalLm
    pooling: PoolingCard | None
    classifier: ClassifierHead | None = None
    """What a pooled state goes through, on ranks that compute last hidden states: the classification head, or the
    projections of embeddings."""
    generates: bool = True
    """Whether it has a language model head."""
    images: bool = False
    """Whether prompts may have images, of which an encoder makes rows."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """PyTorch's name of `dtype`."""
        return _DTYPES[self.dtype]

    @property
    def fingerprint(self) -> str:
        """A text that must be equal on all ranks of an engine."""
        settings = self.settings
        return (
            f"model {self.digest} in {self.dtype}, quantization {settings.quantization}, on {settings.platform.name}, "
            f"layers {settings.layers or 'even'}, {self.decoder.wire}, "
            f"keys and values {settings.cache} in blocks of {settings.block_size}, {self.max_model_len} tokens"
        )

    def card(self, name: ModelName) -> ModelCard:
        """The model as the other services see it, under the `name` that clients use."""
        return ModelCard(
            name=name,
            max_model_len=self.max_model_len,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            dtype=self.dtype,
            created=int(time.time()),
            block_size=self.settings.block_size,
            pooling=self.pooling,
            generates=self.generates,
            images=self.config.image_row_size if self.images and isinstance(self.config, ModelConfig) else None,
        )


def load_model(settings: LoadSettings) -> LoadedModel:
    """Reads the configuration and loads this rank's share of the weights.

    Raises ModelError where the model cannot be served or does not fit, OpsUnavailable for want of its operations."""
    plugin = None if settings.impl == "transformers" else find_plugin_model(settings.folder)
    ours = plugin is not None or is_native(settings.folder)
    if settings.impl == "transformers" or (settings.impl == "auto" and not ours):
        return _library_model(settings)
    config = read_model_config(settings.folder, quantized=True) if plugin is None else plugin.config
    check_latent(config.latent, settings.cache, settings.attention)
    method = _method_of(settings)
    if plugin is not None:
        _check_plugin(settings, plugin, method)
    stage = stage_of(config, settings.pipeline.stage, settings.pipeline.stages, settings.layers)
    dtype = dtype_of(settings.dtype, config)
    length = _model_len(config, settings.max_model_len)
    generates = plugin is not None or has_head(settings.folder)
    pooling = _pooling(settings, config.hidden_size)
    if pooling is None and not generates:
        raise ModelError(f"{settings.folder}: there is no language model head, so it needs a pooling_type to serve")
    stage_bytes = _weight_bytes(settings, config, stage, dtype, method)
    ranks, free = settings.communicator.world_size, settings.platform.memory().free
    _check_weights_fit(engine_bytes(config, stage_bytes, (), settings.group), dtype, ranks, free)  # reads no file whole
    digest = _digest(settings, config)
    experts = place_experts(settings.experts, config, digest, settings.communicator, settings.group)
    _check_weights_fit(engine_bytes(config, stage_bytes, experts, settings.group), dtype, ranks, free)
    decoder, classifier = _decoder(settings, config, stage, _DTYPES[dtype], length, pooling, method, plugin, experts)
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
        images=plugin is None and takes_images(settings.folder, settings.load_format, settings.platform),
    )


def _pooling(settings: LoadSettings, hidden_size: int, head_reads: PoolingType = "last") -> PoolingCard | None:
    """How prompts become vectors, a classifier's by what its head reads; None where they do not. Raises ModelError."""
    labels = read_classifier(settings.folder, head_reads)
    if settings.classifier_from_token:
        return _token_labels(settings, labels)
    if labels is None or settings.pooling == "none":
        return read_pooling(settings.folder, settings.pooling, hidden_size)
    if settings.pooling not in ("auto", labels.pooling):
        raise ModelError(
            f"{settings.folder}: pooling_type {settings.pooling} is not allowed for a classifier; its head reads the "
            f"hidden state that {labels.pooling} gives"
        )
    return labels


def _token_labels(settings: LoadSettings, own: PoolingCard | None) -> PoolingCard:
    if own is not None or not has_head(settings.folder):
        why = "has a classification head" if own is not None else "has no language model head"
        raise ModelError(f"{settings.folder}: classifier_from_token is not allowed, as the model {why}")
    if settings.pooling not in ("auto", "last"):
        raise ModelError(f"pooling_type {settings.pooling} is not allowed beside classifier_from_token; auto is")
    return token_card()


def _read_head(
    settings: LoadSettings, tensors: TensorSource, pooling: PoolingCard | None, hidden_size: int
) -> ClassifierHead | None:
    """The classification head of a checkpoint that has labels, else the projections of its embeddings, if there are
    any. Raises ModelError where something is missing."""
    if pooling is None:
        return None
    if not pooling.labels:
        return read_projections(settings.folder, hidden_size, settings.device)
    return partial(torch.mv, tensors.read(DECODER_HEAD, (len(pooling.labels), hidden_size)).float())


def _digest(settings: LoadSettings, config: Struct) -> str:
    """Names what is computed: the files, or dummy weights, and what they are rounded to."""
    with STARTUP.stage("digest"):
        files = dummy_digest(config) if settings.load_format == "dummy" else model_digest(settings.folder, config)
        return quantized_digest(files, settings.quantization)


def _ops(settings: LoadSettings, dtype: torch.dtype) -> Ops:
    """Raises ModelError for what these operations do not round, and OpsUnavailable."""
    choice = OpsChoice(settings.ops, settings.device, dtype, settings.cache, settings.attention, settings.block_size)
    return rounding_ops(settings.platform.create_ops(choice), settings.quantization)


def _library_model(settings: LoadSettings) -> LoadedModel:
    """Of an architecture that `transformers` computes."""
    # Seconds of imports, which nobody else should pay for.
    from services.worker.models.fallback.library_encoder import encoder_type
    from services.worker.models.fallback.library_model import LibraryModel

    if settings.on_layer is not None:
        raise ModelError("a layer-wise KV connector is not told of the layers of a model that transformers computes")
    if settings.classifier_from_token:
        raise ModelError("classifier_from_token: only for architectures that Baton computes itself, not transformers")
    if encoder_type(settings.folder) is not None:
        return _library_encoder(settings)
    library = LibraryModel(settings.folder, trust_remote_code=settings.trust_remote_code)
    config = library.config
    check_experts(settings.experts, config)
    if library.has_codes and settings.quantization != "auto":
        raise _already_quantized(settings, "mxfp4")
    pooling = _pooling(settings, config.hidden_size)
    dtype = dtype_of(settings.dtype, config)
    length = _model_len(config, settings.max_model_len)
    stage = stage_of(config, settings.pipeline.stage, settings.pipeline.stages, settings.layers)
    stage_bytes = library.stage_parameters(stage) * _DTYPES[dtype].itemsize
    _check_weights_fit(stage_bytes, dtype, 1, settings.platform.memory().free)
    digest = _digest(settings, config)
    ops = _ops(settings, _DTYPES[dtype])
    with STARTUP.stage("weights"):
        decoder = library.decoder(
            *(ops, _DTYPES[dtype], settings.device, length, settings.communicator, stage, settings.pipeline),
            dummy=settings.load_format == "dummy",
            quantization=_code_of(settings),
        )
    if pooling is not None and not decoder.has_features:
        raise ModelError(f"{settings.folder}: pooling_type: {config.architecture} does not show its hidden states")
    with torch.inference_mode(), _library_tensors(settings, _DTYPES[dtype]) as tensors:
        classifier = _read_head(settings, tensors, pooling, config.hidden_size) if stage.is_last else None
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
        generates=pooling is None or not pooling.labels,
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
) -> tuple[Decoder, ClassifierHead | None]:
    """With the classification head on the last stage of a classifier."""
    communicator = settings.communicator
    expert_rank = None if settings.group is None else settings.group.place.in_group
    share = shard_of(config, communicator.rank, communicator.world_size, experts, expert_rank)
    with STARTUP.stage("kernels"):
        ops = _ops(settings, dtype)
    with torch.inference_mode(), STARTUP.stage("weights"), _tensors(settings, config, dtype, method, plugin) as tensors:
        weights = load_weights(
            *(tensors, config, share, ops, settings.device, max_model_len, stage),
            quantization=_code_of(settings),
            counts_picks=settings.experts.counts and share.rank == 0,
        )
        head = _head_of(settings, tensors, config, pooling) if stage.is_last else None
    if plugin is not None:
        return plugin.decoder(DecoderParts(config, weights, share, ops, communicator, settings.pipeline)), head
    if settings.group is not None:
        return GroupDecoder(config, weights, share, ops, communicator, settings.group), head
    if settings.on_layer is not None:
        layerwise = LayerwiseDecoder(config, weights, share, ops, communicator, settings.pipeline, settings.on_layer)
        return layerwise, head
    return Decoder(config, weights, share, ops, communicator, settings.pipeline), head


def _head_of(
    settings: LoadSettings, tensors: TensorSource, config: ModelConfig, pooling: PoolingCard | None
) -> ClassifierHead | None:
    if settings.classifier_from_token:
        return read_token_head(tensors, config, settings.folder, settings.classifier_from_token)
    return _read_head(settings, tensors, pooling, config.hidden_size)


@contextmanager
def _tensors(
    settings: LoadSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    method: QuantizationMethod | None,
    plugin: PluginModel | None,
) -> Iterator[TensorSource]:
    """The checkpoint's tensors, or dummy weights."""
    if settings.load_format == "dummy":
        yield DummyTensors(dtype, settings.device, norm_offset=config.norm_offset)
        return
    with open_checkpoint(
        settings.folder,
        dtype,
        device=settings.device,
        base="model.",
        language_model=read_image_model(settings.folder) is not None,
    ) as checkpoint:
        if plugin is not None:
            yield plugin.tensors(checkpoint)
        else:
            yield checkpoint if method is None else QuantizedCheckpoint(checkpoint, method, dtype)


def _library_encoder(settings: LoadSettings) -> LoadedModel:
    """An encoder, by one rank."""
    from services.worker.models.fallback.library_encoder import LibraryEncoderModel

    if settings.communicator.world_size > 1:
        raise ModelError("tp: an encoder is computed by one rank; more engines serve more prompts")
    if settings.pipeline.stages > 1:
        raise ModelError("pp: an encoder is computed by one rank; more engines serve more prompts")
    library = LibraryEncoderModel(settings.folder)
    config = library.config
    check_experts(settings.experts, config)
    pooling = _pooling(settings, config.hidden_size, library.head_pooling)
    if pooling is None:
        raise ModelError(f"{settings.folder}: an encoder generates no text, so it needs a pooling_type to serve")
    dtype = dtype_of(settings.dtype, config)
    # A prompt is computed in one step.
    length = min(_model_len(config, settings.max_model_len), settings.max_batch_tokens)
    _check_weights_fit(config.parameters * _DTYPES[dtype].itemsize, dtype, 1, settings.platform.memory().free)
    digest = _digest(settings, config)
    ops = _ops(settings, _DTYPES[dtype])
    with STARTUP.stage("weights"):
        encoder, head = library.load(
            *(ops, _DTYPES[dtype], settings.device),
            dummy=settings.load_format == "dummy",
            quantization=_code_of(settings),
        )
    return LoadedModel(
        settings=settings,
        config=config,
        dtype=dtype,
        max_model_len=length,
        stage=PipelineStage(0, 1, 0, config.num_layers),
        digest=digest,
        decoder=encoder,
        pooling=replace(pooling, whole=True),
        classifier=head or read_projections(settings.folder, config.hidden_size, settings.device),
        generates=False,
    )


def _library_tensors(settings: LoadSettings, dtype: torch.dtype) -> AbstractContextManager[TensorSource]:
    """See `_tensors`."""
    if settings.load_format == "dummy":
        return nullcontext(DummyTensors(dtype, settings.device))
    return open_checkpoint(settings.folder, dtype, device=settings.device)


def dtype_of(choice: DtypeChoice, config: ModelDescription) -> Dtype:
    """The dtype that the model runs in. "auto": the checkpoint's own."""
    return config.dtype if choice == "auto" else choice


def _model_len(config: ModelDescription, asked: int | None) -> int:
    if asked is not None and not 2 <= asked <= config.max_positions:
        raise ModelError(
            f"a maximum model length of {asked} is asked for; the model has {config.max_positions} positions"
        )
    if asked is None and isinstance(config, ModelConfig) and config.states is not None and not config.num_heads:
        return DEFAULT_STATE_MODEL_LEN
    return asked or config.max_positions


def _check_plugin(settings: LoadSettings, plugin: PluginModel, method: QuantizationMethod | None) -> None:
    """Raises ModelError for what models of packages are not served with."""
    if settings.on_layer is not None:
        raise ModelError(f"a layer-wise KV connector is not told of the layers of a model of {plugin.where}")
    if method is not None:
        raise ModelError(f"quantization_config: a model of {plugin.where} is read from weights that are not quantised")
    asked = (("classifier_from_token", settings.classifier_from_token), ("data_parallel_size", settings.group))
    for name in (name for name, value in asked if value):
        raise ModelError(f"{name}: not allowed for a model of {plugin.where}")


def _code_of(settings: LoadSettings) -> Scheme | None:
    return None if settings.quantization == "auto" else settings.quantization


def _check_weights_fit(stage_bytes: int, dtype: Dtype, world_size: int, free: int) -> None:
    """`stage_bytes`: of all ranks of a stage together."""
    needed = stage_bytes // world_size
    if needed > free:
        raise ModelError(
            f"the weights take {gib(needed)} in {dtype} and {gib(free)} are free: "
            "choose a smaller dtype, more ranks or a smaller model"
        )


def _method_of(settings: LoadSettings) -> QuantizationMethod | None:
    """How the checkpoint is quantised; None where it is not. Raises ModelError for what cannot be read."""
    method = None if settings.load_format == "dummy" else read_method(settings.folder)
    if method is not None and settings.quantization != "auto":
        raise _already_quantized(settings, method.name)
    return method


def _already_quantized(settings: LoadSettings, method: str) -> ModelError:
    return ModelError(
        f"quantization {settings.quantization}: the checkpoint is quantised already, by {method}; "
        "auto reads it as it is"
    )


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
        stored = sum(path.stat().st_size for path in checkpoint_files(settings.folder))
        return stored * stage.num_layers // config.num_layers
    table, item = config.vocab_size * config.hidden_size, _DTYPES[dtype].itemsize
    own_head = stage.is_last and not (config.tied_embeddings and stage.is_first)
    layers = config.layers[stage.first_layer : stage.end_layer]
    parameters = config.layer_parameters(layers)
    if quantization == "auto":
        return (parameters + table * (stage.is_first + own_head)) * item
    return int(parameters * _QUANTIZED_BYTES[quantization]) + table * (stage.is_first * item + stage.is_last)
