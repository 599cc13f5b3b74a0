"""Makes a backend from a model directory: chooses dtype and operations, loads, profiles, sizes KV memory, warms up."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from services.worker.config import LoadFormat
from services.worker.graphs.choice import DecodeGraphs, why_eager
from services.worker.guided.compiler import Compiler
from services.worker.guided.library import GrammarLibrary
from services.worker.kv_memory import KvDemand, size_kv
from services.worker.kv_profile import profile
from services.worker.memory import free_bytes, gib
from services.worker.model.checkpoint import Tensors, open_checkpoint
from services.worker.model.config import Dtype, ModelConfig, ModelError
from services.worker.model.decoder import Decoder
from services.worker.model.digest import made_up_digest, model_digest
from services.worker.model.hf_config import read_model_config
from services.worker.model.loading import load_weights
from services.worker.model.random_weights import RandomTensors
from services.worker.model_runner import ModelRunner
from services.worker.ops_choice import CacheDtype, OpsName, create_ops
from services.worker.parallel import Communicator, Stage, share_of, stage_of
from services.worker.pipeline import Pipeline, SingleStage
from services.worker.rehearsal import rehearse
from services.worker.runner_parts import RunnerParts
from services.worker.speculation.choice import drafting_of, open_drafter
from services.worker.speculation.drafter import Target
from services.worker.speculation.proposer import NO_DRAFTING
from services.worker.speculation.settings import Speculation
from shared.ids import ModelName
from shared.messages.lifecycle import ModelCard

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SMALL_MODEL = 50_000_000
"""Parameters under which a CPU reads float32 fast enough, and gains results that hardly depend on the batch."""
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
    gpu_memory_utilization: float = 0.9,
    enforce_eager: bool = False,
    kv_cache_dtype: CacheDtype = "auto",
) -> ModelRunner:
    """One rank of the model in `model_dir`, ready to step; `device` is torch's name of it ("cpu", "cuda:1").

    `rank` and `world_size` count the ranks of its stage. `threads`: for computing on a CPU; None: this rank's share of
    the machine's cores. `layers`: of each stage of `pipeline`; None: as even as can be. `gpu_memory_utilization`: the
    share of all of a GPU's memory that may be taken. `enforce_eager`: no graphs of decodes.

    Raises ModelError where the model cannot be served or does not fit, OpsUnavailable where `ops` cannot be had.
    """
    if (rank, world_size) != (communicator.rank, communicator.world_size):
        raise ValueError(f"rank {rank} of {world_size} is not the communicator's")
    place = _chosen_device(device)
    free = free_bytes(place)
    config = read_model_config(model_dir)
    pipeline = pipeline or SingleStage()
    stage = stage_of(config, pipeline.stage, pipeline.stages, layers)
    chosen = _dtype(dtype, config, place)
    length = _model_len(config, max_model_len)
    _check_weights_fit(config, stage, chosen, world_size, free)
    torch.set_num_threads(threads or max(1, _cores() // (world_size * pipeline.stages)))
    made_up = load_format == "dummy"
    digest = made_up_digest(config) if made_up else model_digest(model_dir, config)
    weights = _tensors(None if made_up else model_dir, config, place, _DTYPES[chosen])
    decoder = _load(weights, config, place, chosen, length, communicator, (ops, kv_cache_dtype), pipeline, stage)
    eager = why_eager(decoder, place, communicator, pipeline, enforced=enforce_eager)
    own = f"model {digest} in {chosen} on {place.type}, layers {layers or 'even'}, {decoder.wire}, KV {kv_cache_dtype}"
    limits = f"{length} tokens, steps of {max_num_seqs} and {max_batch_tokens}"
    check_agreement(communicator, f"{own}, {limits}, decodes {'captured' if eager is None else 'run eagerly'}")

    samples = pipeline.stage + 1 == pipeline.stages and rank == 0
    grammars = GrammarLibrary(Compiler(model_dir, config.vocab_size, config.eos_token_ids)) if samples else None
    drafting, drafter = NO_DRAFTING, None
    if speculation is not None:
        drafting = drafting_of(speculation, pipeline)
        target = Target(model_dir, config, decoder, decoder.ops, place, _DTYPES[chosen], length, world_size)
        drafter = open_drafter(speculation, target) if rank == 0 else None

    parts = RunnerParts(
        card=_card(model_name, config, chosen, length),
        device=place,
        decoder=decoder,
        digest=digest,
        max_num_seqs=max_num_seqs,
        communicator=communicator,
        pipeline=pipeline,
        grammars=grammars,
        drafter=drafter,
        drafting=drafting,
    )
    graphs = DecodeGraphs.of(parts) if eager is None else None
    memory = profile(parts, max_batch_tokens=max_batch_tokens, graphs=graphs, free_before=free)
    demand = KvDemand(
        block_bytes=parts.kv_block_bytes,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        explicit_model_len=max_model_len is not None,
        given=kv_memory_bytes,
        gpu_share=gpu_memory_utilization,
    )
    size = size_kv(demand, memory)
    blocks, length = communicator.least(size.num_blocks), communicator.least(size.max_model_len)
    ready = _ready(parts, blocks, length, graphs, max_batch_tokens)
    _log.info(
        "%s: %d parameters in %s, layers %d to %d, %d blocks of KV memory of %d bytes, %d bytes of activations, "
        "%s operations, decodes %s",
        *(model_name, config.parameters, chosen, stage.first_layer, stage.end_layer - 1),
        *(ready.num_blocks, decoder.kv_block_bytes, memory.activations, decoder.ops_name),
        "captured" if eager is None else f"run eagerly: {eager}",
    )
    return ready


def _ready(
    parts: RunnerParts, num_blocks: int, max_model_len: int, graphs: DecodeGraphs | None, rows: int
) -> ModelRunner:
    """Everything captured, and every first-time cost paid. Raises ModelError."""
    replaying = None if graphs is None else replace(graphs, max_model_len=max_model_len).replaying()
    try:
        runner = parts.runner(num_blocks, max_model_len, replaying)
        rehearse(runner, rows=min(rows, _WARM_UP_ROWS), sequences=parts.max_num_seqs)
    except torch.OutOfMemoryError:
        raise ModelError(
            "the GPU's memory ran out while decodes were captured: lower gpu_memory_utilization or kv_memory, or give "
            "enforce_eager"
        ) from None
    return runner


def _chosen_device(name: str) -> torch.device:
    """Current on this thread from here on: libraries launch on whatever that is."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


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
    return open_checkpoint(model_dir, dtype, device=device)


def _load(
    opening: AbstractContextManager[Tensors],
    config: ModelConfig,
    device: torch.device,
    dtype: Dtype,
    max_model_len: int,
    communicator: Communicator,
    ops_choice: tuple[OpsName, CacheDtype],
    pipeline: Pipeline,
    stage: Stage,
) -> Decoder:
    share = share_of(config, communicator.rank, communicator.world_size)
    name, cache = ops_choice
    ops = create_ops(name, device, _DTYPES[dtype], cache)
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
