"""What a model is loaded with, one rank's share of it once it is (whoever computes it), and what both ways of loading
settle alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from services.worker.distributed.communicator import Communicator, Pipeline, SingleRank, SingleStage
from services.worker.distributed.torch_ranks import RankGroup
from services.worker.kv.copier import RankKvCache
from services.worker.kv.layer_groups import LayerGroups
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.checkpoint import (
    TensorSource,
    dummy_digest,
    model_digest,
    quantized_digest,
)
from services.worker.models.config import Dtype, ModelConfig, ModelDescription, ModelError
from services.worker.models.expert_parallel.settings import NO_EXPERT_PARALLEL, ExpertSettings
from services.worker.models.hf_config import architectures_of
from services.worker.models.pooling.classification import (
    ClassifierHead,
    read_classifier,
    read_decoder_head,
    token_card,
)
from services.worker.models.pooling.pooler_config import PoolingChoice
from services.worker.models.pooling.sentence_transformers import read_pooling, read_projections
from services.worker.models.pooling.step_pooling import (
    NO_STEPS,
    PROCESS_REWARD_MODEL,
    StepPooling,
    read_process_reward_head,
    step_card,
)
from services.worker.models.quantization.method import QuantizationMethod, read_method
from services.worker.models.sharding import PipelineStage
from services.worker.models.states.checkpoint_pages import CheckpointPages
from services.worker.models.weights import ForwardPass, KvCaches
from services.worker.ops.interface import AttentionName, BatchMeta, CacheDtype, Ops, OpsName
from services.worker.ops.native.build import Level
from services.worker.ops.quantized import Scheme
from services.worker.ops.selector import OpsChoice
from services.worker.platforms.interface import Platform
from services.worker.platforms.main_memory import gib
from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import ModelName
from shared.messages.generation import PoolingType
from shared.messages.model_card import CardVideos, ModelCard, PoolingCard, SoundModel, VideoModel
from shared.models.image_models import check_tower_sizes, read_cross_images
from shared.telemetry.startup import STARTUP

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

ModelImpl = Literal["auto", "native", "transformers"]
"""Whose code computes the model. auto: ours where it knows the architecture."""

QuantizationChoice = Literal["auto", "int8", "int4", "fp8", "w8a8_int8", "w8a8_fp8"]
"""What weights are rounded to as they are loaded."""

LoadFormat = Literal["auto", "safetensors", "dummy"]
"""auto: safetensors, the only files there are."""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_STATE_MODEL_LEN = 32_768
"""Tokens of the longest sequence of a model without attention, which has no positions and could go on for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The model to load, and how to load it."""

    folder: Path
    platform: Platform
    dtype: DtypeChoice = "auto"
    max_model_len: int | None = None
    load_format: LoadFormat = "auto"
    language_model_only: bool = False
    """Whether a model that sees or hears takes texts alone."""
    ops: OpsName = "auto"
    instructions: Level | None = None
    """Of native operations; None: the best of the machine."""
    kv_cache_dtype: CacheDtype = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of a block of keys and values."""
    attention: AttentionName = "auto"
    communicator: Communicator = field(default_factory=SingleRank)
    pipeline: Pipeline = field(default_factory=SingleStage)
    layers: Sequence[int] | None = None
    """Number of layers of each stage; None: spread evenly."""
    on_layer: Callable[[int], None] | None = None
    """See `LayerwiseDecoder`; None: nobody is told of layers."""
    model_impl: ModelImpl = "auto"
    pooling_type: PoolingChoice = "auto"
    """How prompts become vectors."""
    steps: StepPooling = NO_STEPS
    """What a prompt's steps end with, and are judged by."""
    normalize: bool | None = None
    """Whether embeddings are normalized where a request does not say; None: as the files say."""
    use_activation: bool | None = None
    """The same, and whether a classifier's logits go through its activation."""
    all_tokens: bool = False
    """Whether the model has to be one that gives every token labels."""
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
    shared_rows: int | None = None
    """Rows of the smallest step of which each rank has a share between products; None: all ranks have all rows."""
    context_rows: int | None = None
    """Rows of the smallest step that ranks with all weights each share by context; None: they share each layer."""
    share_weights: bool = False
    """Whether other processes of this host that load the same have one copy in memory with this one."""

    @property
    def images_beside(self) -> bool:
        """Whether images stand beside prompts: what `transformers` computes alone, and only with weights that are
        read."""
        served = not self.language_model_only and self.load_format != "dummy"
        return served and read_cross_images(self.folder) is not None

    @property
    def layer_ranks(self) -> Communicator:
        """Those that share each layer with this one."""
        return self.communicator if self.context_rows is None else SingleRank()

    @property
    def device(self) -> torch.device:
        """What PyTorch calls the rank's device."""
        return self.platform.device


def check_tower(settings: LoadSettings) -> None:
    """Raises ModelError for sizes that no tower has, where there will be one."""
    if settings.language_model_only or settings.load_format == "dummy":
        return
    try:
        check_tower_sizes(settings.folder)
    except ValueError as error:
        raise ModelError(f"{settings.folder}: {error}; --language-model-only serves it for texts") from None


@runtime_checkable
class AttendsAcross(Protocol):
    """A `CausalLm` whose tokens attend to rows of an encoder's, too."""

    @property
    def across(self) -> tuple[bool, ...]:
        """Of each attention of a pass, whether it is to those rows."""


class CausalLm(Protocol):
    """What a rank computes by: a `Decoder`, or a model of the `transformers` library."""

    @property
    def ops_name(self) -> str:
        """The name of its operations, for logs and reports."""

    @property
    def ops(self) -> Ops:
        """The operations that it computes by."""

    @property
    def fastest_pass(self) -> ForwardPass:
        """`forward` without a detour."""

    @property
    def capturable(self) -> bool:
        """Whether a pass only launches what its operations do, and so can be captured where they can be."""

    @property
    def wire(self) -> str:
        """How rows pass between ranks; all ranks must say the same."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Positions that each layer of the model sees, those of other stages included; None: all."""

    def use_groups(self, groups: LayerGroups) -> None:
        """From here on groups of layers have block tables of their own (`BatchMeta.others`), and layers at the same
        place in their groups one cache. Called before caches are allocated for good."""

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """Caches of `num_blocks` blocks for every layer of this rank; for those with states a `StateCache` each, of as
        many `sequences`."""

    def share_kv(self, caches: KvCaches, model: str, checkpoints: RankCheckpoints | None = None) -> RankKvCache | None:
        """The `caches`, for copying from and to a KV store. `model`: the digest of its configuration and weights.
        `checkpoints`: where there are states. None where these are not copied."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block over all layers of this rank."""

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states over all layers of this rank, however long it is; 0: no layer has any. If some
        has, every step has `BatchMeta.states`."""

    @property
    def checkpoint_pages(self) -> CheckpointPages | None:
        """How a checkpoint of these lies in a KV store; None where no layer has any."""

    def empty_features(self, rows: int) -> Tensor:
        """[rows, hidden] of memory that `forward` fills with features."""

    def check_inputs(self, *, of_clients: bool) -> None:
        """Raises ModelError where rows cannot take the place of the embedding's (`BatchMeta.inputs`). `of_clients`:
        those that a client gives in place of any tokens; else an encoder's of images. Every rank of a stage must come
        here."""

    @property
    def rotations(self) -> Callable[[Tensor], Tensor] | None:
        """Makes `BatchMeta.rotations` of rows' positions [3, n]; None where these have one axis, or no layer
        of the stage attends."""

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """See `Decoder.forward`."""


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
    videos: VideoModel | None = None
    """How it is shown videos; None: it takes none."""
    sounds: SoundModel | None = None
    """What sounds its chats may have; None: none."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """PyTorch's name of `dtype`."""
        return TORCH_DTYPES[self.dtype]

    @property
    def fingerprint(self) -> str:
        """A text that must be equal on all ranks of an engine."""
        settings = self.settings
        return (
            f"model {self.digest} in {self.dtype}, quantization {settings.quantization}, on {settings.platform.name}, "
            f"layers {settings.layers or 'even'}, {self.decoder.wire}, "
            f"keys and values {settings.kv_cache_dtype} in blocks of {settings.block_size}, {self.max_model_len} tokens"
        )

    @property
    def _image_row_size(self) -> int:
        own = self.config
        return own.image_row_size if isinstance(own, ModelConfig) else own.hidden_size

    def card(self, name: ModelName) -> ModelCard:
        """The model as the other services see it, under the `name` that clients use."""
        videos, newer_videos = CardVideos.of(self.videos)
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
            images=self._image_row_size if self.images else None,
            videos=videos,
            newer_videos=newer_videos,
            sounds=self.sounds,
        )


def dtype_of(choice: DtypeChoice, config: ModelDescription) -> Dtype:
    """The dtype that the model runs in. "auto": the checkpoint's own."""
    return config.dtype if choice == "auto" else choice


def model_len(config: ModelDescription, asked: int | None) -> int:
    """Most tokens of a sequence: what is asked for, or what the model can. Raises ModelError for more."""
    if asked is not None and not 2 <= asked <= config.max_positions:
        raise ModelError(
            f"a maximum model length of {asked} is asked for; the model has {config.max_positions} positions"
        )
    if asked is None and isinstance(config, ModelConfig) and config.states is not None and not config.num_heads:
        return DEFAULT_STATE_MODEL_LEN
    return asked or config.max_positions


def code_of(settings: LoadSettings) -> Scheme | None:
    """What weights are rounded to as they are loaded; None: they are not."""
    return None if settings.quantization == "auto" else settings.quantization


def check_weights_fit(stage_bytes: int, dtype: Dtype, world_size: int, free: int) -> None:
    """`stage_bytes`: of all ranks of a stage together."""
    needed = stage_bytes // world_size
    if needed > free:
        raise ModelError(
            f"the weights take {gib(needed)} in {dtype} and {gib(free)} are free: "
            "choose a smaller dtype, more ranks or a smaller model"
        )


def quantization_of(settings: LoadSettings) -> QuantizationMethod | None:
    """How the checkpoint is quantised; None where it is not. Raises ModelError for what cannot be read."""
    method = None if settings.load_format == "dummy" else read_method(settings.folder)
    if method is not None and settings.quantization != "auto":
        raise ModelError(
            f"quantization {settings.quantization}: the checkpoint is quantised already, by {method.name}; "
            "auto reads it as it is"
        )
    return method


def digest_of(settings: LoadSettings, config: Struct) -> str:
    """Names what is computed: the files, or dummy weights, and what they are rounded to."""
    with STARTUP.stage("digest"):
        files = dummy_digest(config) if settings.load_format == "dummy" else model_digest(settings.folder, config)
        return quantized_digest(files, settings.quantization)


def create_ops(settings: LoadSettings, dtype: torch.dtype) -> Ops:
    """Raises OpsUnavailable."""
    choice = OpsChoice(
        *(settings.ops, settings.device, dtype, settings.kv_cache_dtype, settings.attention, settings.block_size),
        instructions=settings.instructions,
    )
    return settings.platform.create_ops(choice)


def pooling_of(
    settings: LoadSettings, config: ModelDescription, head_reads: PoolingType = "last", *, generates: bool
) -> PoolingCard | None:
    """How prompts become vectors, a classifier's by what its head reads; None where they do not. `generates`: whether a
    model without labels has the head of a language model. Raises ModelError."""
    card = _card_of(settings, config, head_reads, generates=generates)
    for name, asked in (("normalize", settings.normalize), ("use_activation", settings.use_activation)):
        if asked is not None and (card is None or (card.labels and name == "normalize")):
            what = "a model that makes no vectors" if card is None else "a classifier; use_activation is"
            raise ModelError(f"{settings.folder}: pooler_config: {name} is not allowed for {what}")
    if settings.all_tokens and (card is None or card.pooling != "all" or card.step_tag_id is not None):
        raise ModelError(
            f"{settings.folder}: pooler_config: ALL is for classifiers of tokens; other models make vectors of all "
            "tokens for requests that say so by task, token_embed or token_classify"
        )
    if card is None:
        return None
    if card.labels:
        return replace(card, activated=settings.use_activation is not False)
    normalize = settings.use_activation if settings.normalize is None else settings.normalize
    return card if normalize is None else replace(card, normalize=normalize)


def _card_of(
    settings: LoadSettings, config: ModelDescription, head_reads: PoolingType, *, generates: bool
) -> PoolingCard | None:
    chosen = settings.pooling_type
    labels = read_classifier(settings.folder, head_reads)
    steps = chosen == "step" or (chosen == "auto" and labels is not None and labels.pooling == "all")
    settings.steps.check(config.vocab_size, pools_steps=steps)
    if settings.classifier_from_token:
        return _token_labels(settings, labels, generates=generates)
    if steps:
        return step_card(settings.steps, labels, generates=generates)
    if labels is None or chosen == "none":
        return read_pooling(settings.folder, chosen, config.hidden_size)
    if chosen not in ("auto", labels.pooling):
        raise ModelError(
            f"{settings.folder}: pooling_type {chosen} is not allowed for a classifier; its head reads "
            + ("all hidden states" if labels.pooling == "all" else f"the hidden state that {labels.pooling} gives")
        )
    return labels


def _token_labels(settings: LoadSettings, own: PoolingCard | None, *, generates: bool) -> PoolingCard:
    if own is not None or not generates:
        why = "has a classification head" if own is not None else "has no language model head"
        raise ModelError(f"{settings.folder}: classifier_from_token is not allowed, as the model {why}")
    if settings.pooling_type not in ("auto", "last"):
        raise ModelError(f"pooling_type {settings.pooling_type} is not allowed beside classifier_from_token; auto is")
    return token_card()


def read_classifier_head(
    settings: LoadSettings, tensors: TensorSource, pooling: PoolingCard | None, hidden_size: int
) -> ClassifierHead | None:
    """The classification head of a decoder that has labels, else the projections of its embeddings, if there are
    any. Raises ModelError where something is missing."""
    if pooling is None:
        return None
    if not pooling.labels:
        return read_projections(settings.folder, hidden_size, settings.device)
    if PROCESS_REWARD_MODEL in architectures_of(settings.folder):
        return read_process_reward_head(tensors, hidden_size, settings.device)
    return read_decoder_head(tensors, pooling, hidden_size, settings.device)
