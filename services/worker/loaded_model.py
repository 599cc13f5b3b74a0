"""One rank's share of a model from a directory: which dtype, which layers, on what operations, and the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from services.worker.config import LoadFormat
from services.worker.memory import free_bytes, gib
from services.worker.model.checkpoint import Tensors, open_checkpoint
from services.worker.model.config import Dtype, ModelConfig, ModelError
from services.worker.model.decoder import Decoder
from services.worker.model.digest import made_up_digest, model_digest
from services.worker.model.hf_config import read_model_config
from services.worker.model.loading import load_weights
from services.worker.model.random_weights import RandomTensors
from services.worker.ops_choice import AttentionName, CacheDtype, OpsName, create_ops
from services.worker.parallel import Communicator, Stage, share_of, stage_of
from services.worker.pipeline import Pipeline
from shared.ids import ModelName
from shared.messages.lifecycle import ModelCard

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SMALL_MODEL = 50_000_000
"""Parameters under which a CPU reads float32 fast enough, and gains results that hardly depend on the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be loaded, and how."""

    folder: Path
    device: torch.device
    dtype: DtypeChoice
    max_model_len: int | None
    load_format: LoadFormat
    ops: OpsName
    cache: CacheDtype
    attention: AttentionName = "auto"
    communicator: Communicator
    pipeline: Pipeline
    layers: Sequence[int] | None
    """Of each stage; None: as even as can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    wanted: Wanted
    config: ModelConfig
    dtype: Dtype
    max_model_len: int
    """What was asked for, or what the model can."""
    stage: Stage
    digest: str
    decoder: Decoder

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def told(self) -> str:
        """What all ranks must have alike."""
        wanted = self.wanted
        return (
            f"model {self.digest} in {self.dtype} on {wanted.device.type}, layers {wanted.layers or 'even'}, "
            f"{self.decoder.wire}, keys and values {wanted.cache}, {self.max_model_len} tokens"
        )

    def card(self, name: ModelName) -> ModelCard:
        return ModelCard(
            name=name,
            max_model_len=self.max_model_len,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            dtype=self.dtype,
            created=int(time.time()),
        )


def load_model(wanted: Wanted) -> LoadedModel:
    """Raises ModelError where the model cannot be served or does not fit, OpsUnavailable where its operations cannot
    be had."""
    config = read_model_config(wanted.folder)
    stage = stage_of(config, wanted.pipeline.stage, wanted.pipeline.stages, wanted.layers)
    dtype = dtype_of(wanted.dtype, config, wanted.device)
    length = _model_len(config, wanted.max_model_len)
    _check_weights_fit(config, stage, dtype, wanted.communicator.world_size, free_bytes(wanted.device))
    made_up = wanted.load_format == "dummy"
    return LoadedModel(
        wanted=wanted,
        config=config,
        dtype=dtype,
        max_model_len=length,
        stage=stage,
        digest=made_up_digest(config) if made_up else model_digest(wanted.folder, config),
        decoder=_decoder(wanted, config, stage, _DTYPES[dtype], length),
    )


def _decoder(wanted: Wanted, config: ModelConfig, stage: Stage, dtype: torch.dtype, max_model_len: int) -> Decoder:
    communicator = wanted.communicator
    share = share_of(config, communicator.rank, communicator.world_size)
    ops = create_ops(wanted.ops, wanted.device, dtype, wanted.cache, wanted.attention)
    with torch.inference_mode(), _tensors(wanted, config, dtype) as tensors:
        weights = load_weights(tensors, config, share, ops, wanted.device, max_model_len, stage)
    return Decoder(config, weights, share, ops, communicator, wanted.pipeline)


def _tensors(wanted: Wanted, config: ModelConfig, dtype: torch.dtype) -> AbstractContextManager[Tensors]:
    """Those of the checkpoint, or made up."""
    if wanted.load_format == "dummy":
        return nullcontext(RandomTensors(dtype, wanted.device, norm_offset=config.norm_offset))
    return open_checkpoint(wanted.folder, dtype, device=wanted.device)


def dtype_of(choice: DtypeChoice, config: ModelConfig, device: torch.device) -> Dtype:
    """What the model runs in."""
    if choice != "auto":
        return choice
    return "float32" if device.type == "cpu" and config.parameters < _SMALL_MODEL else config.dtype


def _model_len(config: ModelConfig, asked: int | None) -> int:
    if asked is not None and not 2 <= asked <= config.max_positions:
        raise ModelError(
            f"a maximum model length of {asked} is asked for; the model has {config.max_positions} positions"
        )
    return asked or config.max_positions


def _check_weights_fit(config: ModelConfig, stage: Stage, dtype: Dtype, world_size: int, free: int) -> None:
    needed = _parameters_of(config, stage) * _DTYPES[dtype].itemsize // world_size
    if needed > free:
        raise ModelError(
            f"the weights take {gib(needed)} in {dtype} and {gib(free)} are free: "
            "choose a smaller dtype, more ranks or a smaller model"
        )


def _parameters_of(config: ModelConfig, stage: Stage) -> int:
    """Of all ranks of a stage together."""
    table = config.vocab_size * config.hidden_size
    own_head = stage.is_last and not (config.tied_embeddings and stage.is_first)
    layers = config.layers[stage.first_layer : stage.end_layer]
    return config.layer_parameters(layers) + table * (stage.is_first + own_head)
