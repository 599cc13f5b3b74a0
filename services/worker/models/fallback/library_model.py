"""A model that `transformers` knows, from its directory to a decoder: read by the library, its products ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from services.worker.distributed.all2all import All2AllBackend
from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.distributed.torch_ranks import RankGroup
from services.worker.models.checkpoint import NOWHERE, check_matrices, is_beside, open_checkpoint
from services.worker.models.config import ModelError
from services.worker.models.fallback.adapters import adapt, implementation, keep_rotation
from services.worker.models.fallback.cached_passes import check_cached_passes, check_positions
from services.worker.models.fallback.image_rows.image_decoder import (
    LibraryImageDecoder,
    check_own_tokens,
    text_model_name,
)
from services.worker.models.fallback.library_config import (
    auto_class,
    has_mxfp4,
    hears,
    leave_out_towers,
    library_config,
    reads_text,
    refuse_unserved_images,
    turns_as_long,
)
from services.worker.models.fallback.library_decoder import GroupLibraryDecoder, HeadPlace, LibraryDecoder, StagePlace
from services.worker.models.fallback.library_encoder_decoder import LibraryEncoderDecoder, prepare_decoder
from services.worker.models.fallback.packed_products import class_of_codes, pack_products, read_codes, unread
from services.worker.models.fallback.pipeline_stage import PassOfStage, class_of_stage, strip_to_stage
from services.worker.models.fallback.tensor_parallel import RoundedShare, shard_model
from services.worker.models.fallback.whole_experts import GroupMeeting, StageMeeting, WholeExperts, keep_whole_experts
from services.worker.models.quantization.method import QuantizationMethod
from services.worker.models.quantization.modules import module_of
from services.worker.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from services.worker.models.sharding import PipelineStage
from services.worker.ops.interface import Ops
from services.worker.ops.quantized import Scheme
from shared.models.library_builds import BUILDING, first_line

_log = logging.getLogger(__name__)


class RankShare(NamedTuple):
    """What of a model one rank computes, and with what."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    communicator: Communicator
    stage: PipelineStage
    pipeline: Pipeline
    quantization: Scheme | None = None
    """What linear layers are rounded to, the head to int8."""
    whole_experts: bool = False
    """Each rank of the stage, or of the `group`, has some experts."""
    group: RankGroup | None = None
    all2all: All2AllBackend = "auto"
    """How rows travel in a group."""
    images_beside: bool = False
    """The decoder's tokens attend to images beside their prompt."""


class _SplitExperts(NamedTuple):
    """The mixtures of a model whose ranks have some experts each."""

    mixtures: list[WholeExperts]
    group: tuple[RankGroup, GroupMeeting] | None
    """Who meets: the engines of a group; None: the ranks of a stage."""

    @classmethod
    def of(cls, model: nn.Module, share: RankShare) -> _SplitExperts:
        """Leaves `model` this rank's experts; without `whole_experts`, all of them. Raises ModelError."""
        group, communicator = share.group, share.communicator
        meeting = StageMeeting(communicator) if group is None else GroupMeeting(group.row_exchange(share.all2all))
        mixtures: list[WholeExperts] = []
        if share.whole_experts:
            number = communicator.rank if group is None else group.place.in_group
            ranks = communicator.world_size if group is None else group.place.group_size
            mixtures = keep_whole_experts(model, number, ranks, meeting, grouped=group is not None)
        return cls(mixtures, (group, meeting) if group is not None and isinstance(meeting, GroupMeeting) else None)


class LibraryModel:
    """A model in a directory, that `transformers` knows."""

    def __init__(self, folder: Path, *, trust_remote_code: bool, method: QuantizationMethod | None) -> None:
        """Reads the configuration; takes no memory for weights. `method`: how linear layers are quantised. Raises
        ModelError where the library does not know the model, or knows it as none that we can serve."""
        self._folder = folder
        self._trusts = trust_remote_code
        self._method = method
        self.config, self._own, self._class = library_config(
            folder, trust_remote_code=trust_remote_code, codes=method is not None
        )

    def refuse_unserved_images(self) -> None:
        """Raises ModelError for a model that sees or hears, and whose images or sounds are not served."""
        refuse_unserved_images(self._folder, self._own)

    def check_own_tokens(self, stage: PipelineStage) -> None:
        """Of a model whose images stand beside prompts; see there."""
        check_own_tokens(self._own, stage)

    def digest(self, files: str, max_model_len: int) -> str:
        """Names what is computed of `files`, on which keys and values depend: with LongRoPE, how long sequences may be,
        too."""
        if not turns_as_long(self._own, max_model_len):
            return files
        return blake2b(f"{files} long".encode(), digest_size=len(files) // 2).hexdigest()

    def stage_parameters(self, stage: PipelineStage) -> int:
        """Parameters of the layers of `stage`, and what it has of embedding and head. Takes no memory for weights.
        Raises ModelError where the model cannot be split so."""
        if stage.count == 1:
            return self.config.parameters
        with torch.device("meta"):
            model = class_of_stage(self._class, stage)(self._own)
        return sum(parameter.numel() for parameter in model.parameters())

    @torch.inference_mode()
    def decoder(self, share: RankShare, *, dummy: bool, judged_by: tuple[int, ...] = ()) -> LibraryDecoder:
        """With this rank's share of the directory's weights, or of random ones where `dummy`. The whole stage is read
        into main memory before, of random ones the whole model. `judged_by`: tokens whose logits judge what is read,
        for `token_head`. Raises ModelError for a broken checkpoint, and where its layers are not of a kind that can be
        served, or not by so many ranks."""
        stage, communicator, device = share.stage, share.communicator, share.device
        model, passing = self._whole_stage(stage, share.dtype, dummy=dummy)
        adapt(model, self._own)
        keep_rotation(model, share.max_model_len)
        leave_out_towers(model, self._own, passing)
        rows = _head_rows(model, judged_by) if judged_by and stage.is_last else None
        experts = _SplitExperts.of(model, share)
        split_heads = communicator.world_size > 1 and shard_model(model, communicator, share.quantization)
        model = model.to(device)
        own: Any = model
        pack_products(model, share.ops, share.quantization, own.get_output_embeddings())
        place = HeadPlace(communicator.rank, communicator.world_size, split_heads)
        made = self._kind_of_decoder(model, experts, images_beside=share.images_beside)(
            *(model, share.ops, self.config.hidden_size, share.max_model_len, device, place),
            *(StagePlace(stage, share.pipeline, passing), communicator),
        )
        check_positions(made, model, self.config.vocab_size, device)
        check_cached_passes(made, type(model).__name__, self.config.vocab_size, device)
        if rows is not None and made.has_features:
            made.judge_by(*rows)
        return made

    def _whole_stage(self, stage: PipelineStage, dtype: torch.dtype, *, dummy: bool) -> tuple[nn.Module, PassOfStage]:
        """The layers of `stage`, of all ranks, in main memory. Raises ModelError for a broken checkpoint."""
        if dummy:
            model = _dummy_model(self._own, dtype, trust_remote_code=self._trusts)
            return model, PassOfStage() if stage.count == 1 else strip_to_stage(model, stage)
        codes_of_text = self._method is not None and self._own.model_type == "mllama"
        rename = text_model_name if codes_of_text else None
        with open_checkpoint(self._folder, dtype, rename=rename) as files:  # cut files are found before memory is taken
            kind = self._class if stage.count == 1 else class_of_stage(self._class, stage)
            if self._method is not None:
                model = self._read_codes(kind, QuantizedCheckpoint(files, self._method, dtype))
            else:
                _check_blocks(self._folder, set(files.names))
                if not has_mxfp4(self._own):
                    check_matrices(files)
                model = _read_model(kind, self._folder, self._own, dtype)
        return model, _stage_of(model)

    def _kind_of_decoder(
        self, model: nn.Module, experts: _SplitExperts, *, images_beside: bool
    ) -> Callable[..., LibraryDecoder]:
        """Prepares the model where it has an encoder."""
        beside_encoder = hears(self._own) or reads_text(self._own)
        if beside_encoder or images_beside:
            prepare_decoder(model)
        if images_beside:
            return LibraryImageDecoder
        if experts.group is not None:
            return partial(GroupLibraryDecoder, *experts.group, experts.mixtures)
        return LibraryEncoderDecoder if beside_encoder else LibraryDecoder

    def _read_codes(self, kind: type[PreTrainedModel], checkpoint: QuantizedCheckpoint) -> nn.Module:
        """As `_read_model`, of linear layers the codes that the checkpoint has."""
        kind = class_of_codes(kind, checkpoint)
        with BUILDING, torch.device("meta"):
            made = kind(self._own)
        modules, dropped = set(unread(made)), _stage_of(made).dropped
        for name in checkpoint.codes_of_others(modules):
            if not is_beside(name, self.config.num_layers) and not name.startswith(dropped):
                raise ModelError(
                    f"{self._folder}: tensor {name} is of codes, and of no linear layer of {kind.__name__}: "
                    "experts that it keeps in one tensor are read from weights that are not quantised"
                )
        model = _read_model(kind, self._folder, self._own, checkpoint.dtype, codes_of=modules)
        read_codes(model, checkpoint)
        return model


def _head_rows(model: nn.Module, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of the whole head, before it is packed or split: weights [ids, hidden] and biases [ids], in float32. Raises
    ModelError where there is none."""
    own: Any = model
    head = own.get_output_embeddings()
    weight = head.numbers() if isinstance(head, RoundedShare) else getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise ModelError(f"{type(model).__name__} does not show its head, so its tokens judge nothing")
    rows = weight[list(ids)].float()
    bias = getattr(head, "bias", None)
    return rows, rows.new_zeros(len(ids)) if bias is None else bias[list(ids)].float()


def _check_blocks(folder: Path, names: set[str]) -> None:
    """Raises ModelError where weights in blocks of four bits have no scales, which the library would not name."""
    for name in sorted(names):
        scales = f"{name.removesuffix('_blocks')}_scales"
        if name.endswith("_blocks") and scales not in names:
            raise ModelError(f"{folder}: the checkpoint has no tensor {scales}")


def _read_model(
    kind: type[PreTrainedModel],
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    codes_of: Container[str] = (),
) -> nn.Module:
    """A model of this `kind` with the weights of `folder`, on the CPU. `codes_of`: modules whose weights it does not
    read. Raises ModelError where a weight is missing or of another shape, before memory is taken: the library would
    make one up."""
    if not has_mxfp4(config):  # whose numbers are made as they are read
        # Where embedding and head are one, the library pads the head's bias, which it cannot do nowhere.
        own = {"__module__": kind.__module__, "_adjust_bias": staticmethod(lambda *_: None)}
        unpadded = type(kind.__name__, (kind,), own)
        _from_pretrained(unpadded, folder, config, dtype, device_map=NOWHERE)
    model, info = _from_pretrained(kind, folder, config, dtype)
    others = _stage_of(model).dropped
    if hears(config) or reads_text(config):
        others = (*others, "encoder.")  # it is another service's
    unexpected = [key for key in info["unexpected_keys"] if module_of(key) not in codes_of]
    if unused := sorted(key for key in unexpected if not any(each in key for each in others)):
        _log.warning("%d tensors of the checkpoint are not used, such as %s", len(unused), unused[0])
    ready: nn.Module = model.eval().requires_grad_(False)
    return ready


def _from_pretrained(
    kind: type[PreTrainedModel],
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device_map: torch.device | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and what the library says of its tensors. `device_map`: where it is to lie; None: in main memory.
    Raises ModelError."""
    own: Any = transformers  # its stubs know less of these than is there
    build: Any = kind
    own.logging.set_verbosity_error()  # what it warns of is looked at here
    own.logging.disable_progress_bar()
    try:
        with BUILDING:
            model, info = build.from_pretrained(
                folder,
                config=config if isinstance(config, build.config_class) else config.get_text_config(decoder=True),
                # Of blocks of four bits, numbers are made as they are read: the library's products of them need a GPU.
                quantization_config=own.Mxfp4Config(dequantize=True) if has_mxfp4(config) else None,
                dtype=dtype,
                attn_implementation=implementation(config),
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are named below
                output_loading_info=True,
                device_map=device_map,
            )
    except Exception as error:  # of the library, of safetensors, or of the model's own code
        raise ModelError(f"{folder}: transformers cannot read the checkpoint: {first_line(error)}") from None
    for name in sorted(info["missing_keys"]):
        raise ModelError(f"{folder}: the checkpoint has no tensor {name}")
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(f"{folder}: tensor {name} has shape {list(found)}, the config asks for {list(wanted)}")
    return model, info


def _stage_of(model: nn.Module) -> PassOfStage:
    """What `class_of_stage` has left of it; else one that has all layers."""
    passing: PassOfStage | None = getattr(model, "baton_stage", None)
    return passing or PassOfStage()


def _dummy_model(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> nn.Module:
    """The model with random weights, the same each time."""
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=implementation(config), trust_remote_code=trust_remote_code
        )
    return model.eval().requires_grad_(False)
