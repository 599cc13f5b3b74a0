"""One rank's share of a model that `transformers` computes: a decoder, or an encoder."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from services.worker.models.checkpoint import (
    TensorSource,
    open_checkpoint,
    stored_bytes,
    takes_images,
)
from services.worker.models.config import Dtype, ModelError
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.expert_parallel.engine_experts import check_experts, check_library_experts
from services.worker.models.loaded_model import (
    TORCH_DTYPES,
    LoadedModel,
    LoadSettings,
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
from services.worker.models.pooling.classification import ClassifierHead, label_head, token_ids
from services.worker.models.pooling.sentence_transformers import read_projections
from services.worker.models.quantization.method import QuantizationMethod
from services.worker.models.sharding import PipelineStage, stage_of
from shared.models.audio_models import read_sound_model
from shared.models.encoder_models import encoder_type
from shared.models.video_models import read_video_model
from shared.telemetry.startup import STARTUP

if TYPE_CHECKING:
    from services.worker.models.fallback.library_model import LibraryModel, RankShare


def load_library_model(settings: LoadSettings) -> LoadedModel:
    """Of an architecture that `transformers` computes."""
    # Seconds of imports, which nobody else should pay for.
    from services.worker.models.fallback.library_model import LibraryModel

    _check_alone(settings)
    if encoder_type(settings.folder) is not None:
        return _library_encoder(settings)
    method = quantization_of(settings)
    codes = None if method is None or method.name == "mxfp4" else method  # whose blocks the library makes numbers of
    library = LibraryModel(settings.folder, trust_remote_code=settings.trust_remote_code, method=codes)
    if not settings.language_model_only and settings.load_format != "dummy":
        library.refuse_unserved_images()
    config = library.config
    check_library_experts(settings.experts, config)
    pooling = pooling_of(settings, config, generates=True)
    judged_by = () if pooling is None else pooling.token_ids
    if settings.classifier_from_token:
        judged_by = token_ids(settings.folder, settings.classifier_from_token, config.vocab_size)
    dtype = dtype_of(settings.dtype, config)
    length = model_len(config, settings.max_model_len)
    count = settings.pipeline.stages
    stages = [stage_of(config, number, count, settings.layers) for number in range(count)]
    stage = stages[settings.pipeline.stage]
    if settings.images_beside:
        for each in stages:  # by every rank, none of which should wait for one that has ended
            library.check_own_tokens(each)
    check_weights_fit(_stage_bytes(library, settings, stage, dtype, codes), dtype, 1, settings.platform.memory().free)
    digest = library.digest(digest_of(settings, config), length)
    media = not settings.language_model_only
    media = media and takes_images(settings.folder, settings.load_format, settings.platform, by_library=True)
    share = _rank_share(settings, TORCH_DTYPES[dtype], length, stage)
    with STARTUP.stage("weights"):
        decoder = library.decoder(share, dummy=settings.load_format == "dummy", judged_by=judged_by)
    if pooling is not None and not decoder.has_features:
        raise ModelError(f"{settings.folder}: pooling_type: {config.architecture} does not show its hidden states")
    classifier: ClassifierHead | None = decoder.token_head
    if classifier is not None and settings.classifier_from_token:
        classifier = label_head(classifier)
    if stage.is_last and not judged_by:
        with torch.inference_mode(), _library_tensors(settings, TORCH_DTYPES[dtype]) as tensors:
            classifier = read_classifier_head(settings, tensors, pooling, config.hidden_size)
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
        generates=pooling is None or not pooling.labels or bool(judged_by),
        images=media,
        videos=read_video_model(settings.folder) if media else None,
        sounds=read_sound_model(settings.folder) if media else None,
    )


def _rank_share(settings: LoadSettings, dtype: torch.dtype, max_model_len: int, stage: PipelineStage) -> RankShare:
    from services.worker.models.fallback.library_model import RankShare

    return RankShare(
        *(create_ops(settings, dtype), dtype, settings.device, max_model_len),
        *(settings.communicator, stage, settings.pipeline),
        quantization=code_of(settings),
        whole_experts=settings.experts.parallel,
        group=settings.group,
        all2all=settings.experts.all2all,
        images_beside=settings.images_beside,
    )


def _check_alone(settings: LoadSettings) -> None:
    """Raises ModelError for what only architectures have that Baton computes itself."""
    if settings.on_layer is not None:
        raise ModelError("a layer-wise KV connector is not told of the layers of a model that transformers computes")
    for name, asked in (
        ("enable_sp", settings.shared_rows),
        ("prefill_context_parallel_size", settings.context_rows),
    ):
        if asked:
            raise ModelError(f"{name}: only for architectures that Baton computes itself, not transformers")


def _stage_bytes(
    library: LibraryModel, settings: LoadSettings, stage: PipelineStage, dtype: Dtype, codes: QuantizationMethod | None
) -> int:
    """What the weights of a stage take as they are read. Raises ModelError where the model cannot be split so."""
    if codes is None:
        return library.stage_parameters(stage) * TORCH_DTYPES[dtype].itemsize
    layers = library.config.num_layers
    return stored_bytes(settings.folder, layers) * codes.growth * stage.num_layers // layers


def _library_encoder(settings: LoadSettings) -> LoadedModel:
    """An encoder, by one rank."""
    from services.worker.models.fallback.encoders.library_encoder import LibraryEncoderModel

    if settings.communicator.world_size > 1:
        raise ModelError("tp: an encoder is computed by one rank; more engines serve more prompts")
    if settings.pipeline.stages > 1:
        raise ModelError("pp: an encoder is computed by one rank; more engines serve more prompts")
    library = LibraryEncoderModel(settings.folder)
    config = library.config
    check_experts(settings.experts, config)
    pooling = pooling_of(settings, config, library.head_pooling, generates=False)
    if pooling is None:
        raise ModelError(f"{settings.folder}: an encoder generates no text, so it needs a pooling_type to serve")
    dtype = dtype_of(settings.dtype, config)
    # A prompt is computed in one step.
    length = min(model_len(config, settings.max_model_len), settings.max_batch_tokens)
    check_weights_fit(config.parameters * TORCH_DTYPES[dtype].itemsize, dtype, 1, settings.platform.memory().free)
    digest = digest_of(settings, config)
    ops = create_ops(settings, TORCH_DTYPES[dtype])
    with STARTUP.stage("weights"):
        encoder, head = library.load(
            *(ops, TORCH_DTYPES[dtype], settings.device),
            dummy=settings.load_format == "dummy",
            quantization=code_of(settings),
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
