"""A rank as it serves, made for measuring: of any shape, KV memory full of noise, without grammars and drafts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from services.worker.distributed.communicator import Communicator, SingleRank, SingleStage
from services.worker.distributed.torch_ranks import RankTopology, join
from services.worker.executor.runner_parts import Runner, RunnerParts
from services.worker.graphs.choice import DecodeGraphs, why_eager
from services.worker.graphs.decode_inputs import padded_size
from services.worker.measure.roofline.traffic import ModelTraffic
from services.worker.measure.roofline.wire import (
    KernelsRequest,
    MeasureStarted,
    ModelReady,
    StepsRequest,
    measured_shape_names,
    shape_file,
)
from services.worker.models.checkpoint import checkpoint_files
from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.loaded_model import LoadedModel, LoadSettings, dtype_of
from services.worker.models.model_loader import load_model
from services.worker.models.sharding import LayerShard, shard_of
from services.worker.ops.interface import Ops, OpsUnavailable
from services.worker.platforms.installed import PlatformUnavailable, open_platform
from services.worker.platforms.interface import Platform
from services.worker.speculation.proposer import NO_DRAFTS
from shared.ids import ModelName

_PATIENCE = timedelta(minutes=10)
_KEPT_FREE = 0.1
"""Share of the free memory beside the weights that is kept for activations."""
_NOISE_ELEMENTS = 1 << 20


def communicator_of(request: StepsRequest, platform: Platform) -> Communicator:
    """The way to the other ranks. Waits for them."""
    if request.tp == 1 or request.rendezvous is None:
        return SingleRank()
    place = RankTopology(request.rank, request.tp)
    return join(
        place,
        rendezvous=request.rendezvous,
        timeout=_PATIENCE,
        backend=platform.process_group,
        shared=platform.shared_exchange(place.stage_size),
    ).communicator


class MeasuredRank(NamedTuple):
    """A loaded model with what one of its steps must move and compute."""

    name: str
    model: LoadedModel
    traffic: ModelTraffic
    seconds: float
    """That loading took."""
    eager: str | None
    """Why decodes are not captured."""

    @property
    def communicator(self) -> Communicator:
        """How it exchanges tensors with the other ranks."""
        return self.model.settings.communicator

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block over all layers of this rank."""
        return self.model.decoder.kv_block_bytes

    @property
    def blocks_that_fit(self) -> int:
        """KV blocks that fit on every rank."""
        room = int(self.model.settings.platform.memory().free * (1 - _KEPT_FREE))
        return self.communicator.minimum(room // self.block_bytes)

    def ready(self, blocks: int) -> ModelReady:
        """The report before the first step, for a runner of so many blocks."""
        return ModelReady(
            ops=self.model.decoder.ops_name,
            weight_bytes=int(self.traffic.weight_bytes),
            seconds=self.seconds,
            kv_blocks=blocks,
            kv_block_bytes=self.block_bytes,
            eager=self.eager,
        )

    def runner(self, blocks: int, batches: set[int]) -> Runner:
        """A runner for at most as many sequences as one of `batches` has. Decodes of those are captured, if any are."""
        settings = self.model.settings
        parts = RunnerParts(
            card=self.model.card(ModelName(self.name)),
            platform=settings.platform,
            decoder=self.model.decoder,
            digest=self.model.digest,
            max_num_seqs=max(batches, default=1),
            communicator=settings.communicator,
            pipeline=settings.pipeline,
            grammars=None,
            drafter=None,
            drafting=NO_DRAFTS,
        )
        replaying = None if self.eager is not None else _needed_graphs(DecodeGraphs.of(parts), batches).replaying()
        runner = parts.runner(blocks, self.model.max_model_len, replaying)
        for halves in runner.rank.caches:
            for cache in halves:
                fill_with_noise(cache)
        return runner


def load(request: StepsRequest, measured: MeasuredModel, communicator: Communicator) -> MeasuredRank:
    """Loads this rank's share. Raises CannotMeasure where the model does not fit or does not divide."""
    begun = time.perf_counter()
    try:
        model = load_model(
            LoadSettings(
                folder=measured.folder,
                platform=measured.platform,
                dtype=request.dtype,
                load_format="auto" if _has_weights(measured) else "dummy",
                ops=request.ops,
                kv_cache_dtype=request.kv_cache_dtype,
                attention=request.attention,
                block_size=request.block_size,
                communicator=communicator,
            )
        )
        if measured.config.latent is not None:
            raise ModelError(f"{measured.config.architecture}: what latent attention moves is not known here")
        share = shard_of(measured.config, communicator.rank, communicator.world_size)
    except (ModelError, OpsUnavailable) as error:
        raise CannotMeasure(str(error)) from None
    traffic = traffic_of(measured.config, share, model.decoder.ops, measured.dtype)
    eager = why_eager(model.decoder, measured.platform, communicator, SingleStage(), enforced=request.enforce_eager)
    return MeasuredRank(measured.name, model, traffic, time.perf_counter() - begun, eager)


def traffic_of(config: ModelConfig, share: LayerShard, ops: Ops, dtype: torch.dtype) -> ModelTraffic:
    """What steps of this rank must move, its weights and keys and values as `ops` keep them."""
    kept = getattr(ops, "dtype", dtype)  # the native operations keep float16 models in float32
    block = ops.kv_block_bytes(share.num_kv_heads, config.head_dim)
    return ModelTraffic(config, share, kept.itemsize, block / ops.block_size)


def fill_with_noise(tensor: torch.Tensor) -> None:
    """Fills memory with the same numbers over and over.

    What they are does not matter, but they must be there: memory of a CPU that was never written to is one page of
    zeros, read again and again."""
    flat = tensor.view(-1)
    noise = torch.randn(min(len(flat), _NOISE_ELEMENTS), device=tensor.device).to(tensor.dtype)
    for at in range(0, len(flat), len(noise)):
        part = flat[at : at + len(noise)]
        part.copy_(noise[: len(part)])


def _needed_graphs(graphs: DecodeGraphs, batches: set[int]) -> DecodeGraphs:
    """The graphs of those sizes that these batches are padded to."""
    sizes = {padded_size(batch, graphs.sizes) for batch in batches}
    return replace(graphs, sizes=tuple(sorted(size for size in sizes if size is not None)))


def _has_weights(measured: MeasuredModel) -> bool:
    try:
        return bool(checkpoint_files(measured.folder))
    except ModelError:
        return False


# The model that is measured, and the device that it is measured on.


_DEFAULT_SHAPES = {"cpu": "qwen3-0.6b", "cuda": "llama-3.1-8b"}


class CannotMeasure(Exception):
    """The requested measurement is not possible; the text says what to change."""


class MeasuredModel(NamedTuple):
    """The model that is measured, on its device."""

    name: str
    folder: Path
    config: ModelConfig
    platform: Platform
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """What PyTorch calls it."""
        return self.platform.device


@contextmanager
def open_measured_model(request: StepsRequest | KernelsRequest) -> Iterator[MeasuredModel]:
    """The model and the device that `request` means. Raises CannotMeasure."""
    rank, ranks = (request.rank, request.tp) if isinstance(request, StepsRequest) else (0, 1)
    platform = _platform(request.device, rank, ranks)
    torch.set_num_threads(request.threads or max(1, torch.get_num_threads() // ranks))
    shape = _DEFAULT_SHAPES[platform.name] if request.shape is request.model is None else request.shape
    with _folder(shape, request.model) as folder:
        try:
            config = read_model_config(folder)
        except ModelError as error:
            raise CannotMeasure(str(error)) from None
        if config.states is not None:
            raise CannotMeasure(f"{folder}: {config.states.kind} ({config.architecture}) are not measured")
        if config.connections is not None:
            raise CannotMeasure(f"{folder}: several streams ({config.architecture}) are not measured")
        dtype = getattr(torch, dtype_of(request.dtype, config))
        yield MeasuredModel(request.name or shape or folder.name, folder, config, platform, dtype)


def _platform(name: str, rank: int, ranks: int) -> Platform:
    """Current on this thread. Raises CannotMeasure."""
    try:
        platform = open_platform(name, index=rank, rank=rank, world_size=1)
    except PlatformUnavailable as error:
        raise CannotMeasure(f"--{error}") from None
    count = platform.device_count()
    if count is not None and ranks > count:
        raise CannotMeasure(f"--tp {ranks}: each rank needs a GPU of its own, {count} are there")
    platform.activate()
    return platform


@contextmanager
def _folder(shape: str | None, model: str | None) -> Iterator[Path]:
    """A shape's is made, and gone afterwards."""
    if shape is None:
        assert model is not None, "there is one of the two"
        yield Path(model)
        return
    path = shape_file(shape)
    if path is None:
        raise CannotMeasure(f"--shape {shape}: none of {', '.join(measured_shape_names())}")
    with tempfile.TemporaryDirectory(prefix="baton-shape-") as folder:
        (Path(folder) / "config.json").write_bytes(path.read_bytes())
        yield Path(folder)


def describe_start(measured: MeasuredModel) -> MeasureStarted:
    """The first report: the device, the model, and how busy the machine is."""
    on_cpu = measured.platform.in_main_memory
    return MeasureStarted(
        device="CPU" if on_cpu else measured.platform.device_name,
        model=measured.name,
        dtype=str(measured.dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if on_cpu else None,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )
