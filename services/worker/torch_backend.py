"""Makes a backend from a model directory: chooses dtype and operations, loads, profiles, sizes KV memory, warms up."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from services.worker.config import LoadFormat
from services.worker.guided.compiler import Compiler
from services.worker.guided.library import GrammarLibrary
from services.worker.kv_memory import KvDemand, size_kv
from services.worker.memory import free_bytes, gib, peak_bytes
from services.worker.model.checkpoint import Tensors, open_checkpoint
from services.worker.model.config import Dtype, ModelConfig, ModelError
from services.worker.model.decoder import Decoder
from services.worker.model.digest import made_up_digest, model_digest
from services.worker.model.hf_config import read_model_config
from services.worker.model.loading import load_weights
from services.worker.model.random_weights import RandomTensors
from services.worker.model_runner import ModelRunner
from services.worker.ops_choice import OpsName, create_ops
from services.worker.parallel import Communicator, Stage, share_of, stage_of
from services.worker.pipeline import Pipeline, SingleStage
from services.worker.rank import Rank
from services.worker.rehearsal import rehearse
from services.worker.speculation.choice import drafting_of, open_drafter
from services.worker.speculation.drafter import Target
from services.worker.speculation.proposer import NO_DRAFTING
from services.worker.speculation.settings import Speculation
from shared.blocks import blocks_for
from shared.ids import ModelName
from shared.messages.lifecycle import ModelCard

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SMALL_MODEL = 50_000_000
"""Parameters under which a CPU reads float32 fast enough, and gains results that hardly depend on the batch."""
_PROFILED_ROWS_ON_CPU = 512
"""A CPU takes a minute for the largest batch of a large model. Activations grow with the rows, so fewer will do."""

_WARM_UP_ROWS = 64

_log = logging.getLogger(__name__)


def create_backend(
    model_dir: Path,
    *,
    model_name: ModelName,
    device: str,
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
    threads: int | None = None,
    pipeline: Pipeline | None = None,
    layers: Sequence[int] | None = None,
    speculation: Speculation | None = None,
) -> ModelRunner:
    """One rank of the model in `model_dir`, ready to step; `device` is torch's name of it ("cpu", "cuda:1").

    `rank` and `world_size` count the ranks of its stage. `threads`: for computing on a CPU; None: this rank's share of
    the machine's cores. `layers`: of each stage of `pipeline`; None: as even as can be.

    Raises ModelError where the model cannot be served or does not fit, OpsUnavailable where `ops` cannot be had.
    """
    if (rank, world_size) != (communicator.rank, communicator.world_size):
        raise ValueError(f"rank {rank} of {world_size} is not the communicator's")
    place = torch.device(device)
    config = read_model_config(model_dir)
    pipeline = pipeline or SingleStage()
    stage = stage_of(config, pipeline.stage, pipeline.stages, layers)
    chosen = _dtype(dtype, config, place)
    length = _model_len(config, max_model_len)
    _check_weights_fit(config, stage, chosen, world_size, free_bytes(place))
    torch.set_num_threads(threads or max(1, _cores() // (world_size * pipeline.stages)))
    made_up = load_format == "dummy"
    digest = made_up_digest(config) if made_up else model_digest(model_dir, config)
    weights = _tensors(None if made_up else model_dir, config, place, _DTYPES[chosen])
    decoder = _load(weights, config, place, chosen, length, communicator, ops, pipeline, stage)
    own = f"model {digest} in {chosen} on {place.type}, layers {layers or 'even'}, {decoder.wire}"
    check_agreement(communicator, f"{own}, {length} tokens, steps of {max_num_seqs} and {max_batch_tokens}")

    samples = pipeline.stage + 1 == pipeline.stages and rank == 0
    grammars = GrammarLibrary(Compiler(model_dir, config.vocab_size, config.eos_token_ids)) if samples else None
    drafting, drafter = NO_DRAFTING, None
    if speculation is not None:
        drafting = drafting_of(speculation, pipeline)
        target = Target(model_dir, config, decoder, decoder.ops, place, _DTYPES[chosen], length, world_size)
        drafter = open_drafter(speculation, target) if rank == 0 else None

    def runner(num_blocks: int, model_len: int) -> ModelRunner:
        rank = Rank(
            card=_card(model_name, config, chosen, model_len),
            device=place,
            decoder=decoder,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            communicator=communicator,
            digest=digest,
            pipeline=pipeline,
            grammars=grammars,
            proposer=None if drafter is None else drafter.proposer(num_blocks, max_num_seqs),
            drafting=drafting,
        )
        return ModelRunner(rank)

    activations = _profiled(runner, place, length, max_num_seqs, max_batch_tokens)
    demand = KvDemand(
        block_bytes=decoder.kv_block_bytes + (0 if drafter is None else drafter.kv_block_bytes),
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        explicit_model_len=max_model_len is not None,
        given=kv_memory_bytes,
    )
    size = size_kv(demand, free=free_bytes(place), activations=activations, device=place)
    ready = runner(communicator.least(size.num_blocks), communicator.least(size.max_model_len))
    rehearse(ready, rows=_WARM_UP_ROWS, sequences=max_num_seqs)
    _log.info(
        "%s: %d parameters in %s, layers %d to %d, %d blocks of KV memory of %d bytes, %d bytes of activations, "
        "%s operations",
        *(model_name, config.parameters, chosen, stage.first_layer, stage.end_layer - 1),
        *(ready.num_blocks, decoder.kv_block_bytes, activations, decoder.ops_name),
    )
    return ready


def _profiled(
    runner: Callable[[int, int], ModelRunner], device: torch.device, length: int, max_seqs: int, max_tokens: int
) -> int:
    """Bytes that a step of `max_tokens` rows takes beside weights and KV memory."""
    rows = max_tokens if device.type == "cuda" else min(max_tokens, _PROFILED_ROWS_ON_CPU)
    probe = runner(blocks_for(min(rows, length)) + 1, length)
    return peak_bytes(device, lambda: rehearse(probe, rows=rows, sequences=max_seqs)) * -(-max_tokens // rows)


def _dtype(choice: DtypeChoice, config: ModelConfig, device: torch.device) -> Dtype:
    if choice != "auto":
        return choice
    return "float32" if device.type == "cpu" and config.parameters < _SMALL_MODEL else config.dtype


def check_agreement(communicator: Communicator, own: str) -> None:
    """Ranks of several hosts may have been given different models. Raises ModelError."""
    said = communicator.all_say(own)
    other = next((rank for rank, word in enumerate(said) if word != own), None)
    if other is not None:
        raise ModelError(f"the engine's ranks differ: here {own}; rank {other} has {said[other]}")


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


def _model_len(config: ModelConfig, asked: int | None) -> int:
    if asked is not None and not 2 <= asked <= config.max_positions:
        raise ModelError(
            f"a maximum model length of {asked} is asked for; the model has {config.max_positions} positions"
        )
    return asked or config.max_positions


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tensors(
    model_dir: Path | None, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AbstractContextManager[Tensors]:
    """Those of the checkpoint there; None: made up."""
    if model_dir is None:
        return nullcontext(RandomTensors(dtype, device, norm_offset=config.norm_offset))
    return open_checkpoint(model_dir, dtype)


def _load(
    opening: AbstractContextManager[Tensors],
    config: ModelConfig,
    device: torch.device,
    dtype: Dtype,
    max_model_len: int,
    communicator: Communicator,
    ops_name: OpsName,
    pipeline: Pipeline,
    stage: Stage,
) -> Decoder:
    share = share_of(config, communicator.rank, communicator.world_size)
    ops = create_ops(ops_name, device, _DTYPES[dtype])
    with torch.inference_mode(), opening as tensors:
        weights = load_weights(tensors, config, share, ops, device, max_model_len, stage)
    return Decoder(config, weights, share, ops, communicator, pipeline)


def _card(name: ModelName, config: ModelConfig, dtype: Dtype, max_model_len: int) -> ModelCard:
    return ModelCard(
        name=name,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        dtype=dtype,
        created=int(time.time()),
    )
