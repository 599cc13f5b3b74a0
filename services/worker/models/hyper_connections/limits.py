"""What a model with several streams is not combined with: each is an error when a rank starts."""

from __future__ import annotations

from services.worker.models.config import CompressedConfig, ModelConfig, ModelError
from services.worker.models.loaded_model import LoadSettings
from services.worker.models.quantization.method import QuantizationMethod
from services.worker.models.sharding import PipelineStage


def check_streams(
    settings: LoadSettings, config: ModelConfig, stage: PipelineStage, method: QuantizationMethod | None
) -> None:
    """`method`: how the checkpoint is quantised. Raises ModelError, naming the setting, where `config` has several
    streams and cannot be loaded so."""
    if config.connections is None:
        return
    if config.compressed is not None:
        _check_compressed(settings, config, config.compressed, stage, method)
    if stage.index and any(layer.grams is not None for layer in config.layers[stage.first_layer : stage.end_layer]):
        raise ModelError(
            f"pp-layers: layer {stage.first_layer} and others of its stage add embeddings of n-grams (ple_layer_ids), "
            "whose tokens only the first stage is given"
        )
    kind = "several streams" if config.compressed is None else "compressed keys"
    asked = (
        ("kv_connector", settings.on_layer),
        ("data_parallel_size", settings.group),
        ("enable_sp", settings.shared_rows),
        ("prefill_context_parallel_size", settings.context_rows),
        ("enable_expert_parallel", settings.experts.parallel),
    )
    for name in (name for name, value in asked if value):
        raise ModelError(f"{name}: not for a model with {kind} ({config.architecture})")


def _check_compressed(
    settings: LoadSettings,
    config: ModelConfig,
    compressed: CompressedConfig,
    stage: PipelineStage,
    method: QuantizationMethod | None,
) -> None:
    if method is not None and method.name != "fp8":
        raise ModelError(f"quantization_config {method.name}: {config.architecture} is read in float types, and in fp8")
    if settings.kv_cache_dtype != "auto":
        raise ModelError(f"kv_cache_dtype {settings.kv_cache_dtype}: compressed keys are kept in the model's dtype")
    if settings.attention == "flash-attn":
        raise ModelError("attention flash-attn: it knows no compressed keys; choose auto")
    ranks = settings.layer_ranks.world_size
    if compressed.groups % ranks:
        raise ModelError(f"o_groups {compressed.groups} does not divide over {ranks} tensor-parallel ranks")
    if stage.index and any(layer.hashed for layer in config.layers[stage.first_layer : stage.end_layer]):
        raise ModelError(
            f"pp-layers: layer {stage.first_layer} chooses experts by tokens, which only the first stage is given"
        )
