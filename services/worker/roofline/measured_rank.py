"""A rank as it serves, made for measuring: of any shape, KV memory full of noise, without grammars and drafts."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

import torch
from msgspec.structs import replace

from services.worker.graphs.choice import DecodeGraphs, why_eager
from services.worker.graphs.sizes import padded_size
from services.worker.loaded_model import LoadedModel, Wanted, load_model
from services.worker.memory import free_bytes
from services.worker.model.checkpoint import checkpoint_files
from services.worker.model.config import ModelConfig, ModelError
from services.worker.ops import Ops, OpsUnavailable
from services.worker.parallel import Communicator, Share, SingleRank, share_of
from services.worker.pipeline import SingleStage
from services.worker.roofline.chosen import CannotMeasure, Chosen
from services.worker.roofline.findings import ModelReady, StepsAsked
from services.worker.roofline.traffic import ModelTraffic
from services.worker.runner_parts import Runner, RunnerParts
from services.worker.speculation.proposer import NO_DRAFTING
from services.worker.torch_ranks import RankPlace, join
from shared.blocks import BLOCK_SIZE
from shared.ids import ModelName

_PATIENCE = timedelta(minutes=10)
_KEPT_FREE = 0.1
"""Of the memory that is free beside the weights: activations."""
_NOISE_ELEMENTS = 1 << 20


def communicator_of(asked: StepsAsked, device: torch.device) -> Communicator:
    """The way to the other ranks. Waits for them."""
    if asked.tp == 1 or asked.rendezvous is None:
        return SingleRank()
    place = RankPlace(asked.rank, asked.tp)
    return join(place, init_method=asked.rendezvous, device=device, timeout=_PATIENCE).communicator


class MeasuredRank(NamedTuple):
    name: str
    model: LoadedModel
    traffic: ModelTraffic
    seconds: float
    """That loading took."""
    eager: str | None
    """Why decodes are not captured."""

    @property
    def communicator(self) -> Communicator:
        return self.model.wanted.communicator

    @property
    def block_bytes(self) -> int:
        return self.model.decoder.kv_block_bytes

    @property
    def blocks_that_fit(self) -> int:
        """On every rank."""
        room = int(free_bytes(self.model.wanted.device) * (1 - _KEPT_FREE))
        return self.communicator.least(room // self.block_bytes)

    def ready(self, blocks: int) -> ModelReady:
        return ModelReady(
            ops=self.model.decoder.ops_name,
            weight_bytes=int(self.traffic.weight_bytes),
            seconds=self.seconds,
            kv_blocks=blocks,
            kv_block_bytes=self.block_bytes,
            eager=self.eager,
        )

    def runner(self, blocks: int, batches: set[int]) -> Runner:
        """For at most so many sequences as one of `batches` has; decodes of those are captured, where any are."""
        wanted = self.model.wanted
        parts = RunnerParts(
            card=self.model.card(ModelName(self.name)),
            device=wanted.device,
            decoder=self.model.decoder,
            digest=self.model.digest,
            max_num_seqs=max(batches, default=1),
            communicator=wanted.communicator,
            pipeline=wanted.pipeline,
            grammars=None,
            drafter=None,
            drafting=NO_DRAFTING,
        )
        replaying = None if self.eager is not None else _needed(DecodeGraphs.of(parts), batches).replaying()
        runner = parts.runner(blocks, self.model.max_model_len, replaying)
        for halves in runner.rank.caches:
            for cache in halves:
                fill_with_noise(cache)
        return runner


def load(asked: StepsAsked, made: Chosen, communicator: Communicator) -> MeasuredRank:
    """Raises CannotMeasure where the model does not fit or does not divide."""
    begun = time.perf_counter()
    try:
        model = load_model(
            Wanted(
                folder=made.folder,
                device=made.device,
                dtype=asked.dtype,
                max_model_len=None,
                load_format="auto" if _has_weights(made) else "dummy",
                ops=asked.ops,
                cache=asked.kv_cache_dtype,
                attention=asked.attention,
                communicator=communicator,
                pipeline=SingleStage(),
                layers=None,
            )
        )
        share = share_of(made.config, communicator.rank, communicator.world_size)
    except (ModelError, OpsUnavailable) as error:
        raise CannotMeasure(str(error)) from None
    traffic = traffic_of(made.config, share, model.decoder.ops, made.dtype)
    eager = why_eager(model.decoder, made.device, communicator, SingleStage(), enforced=asked.enforce_eager)
    return MeasuredRank(made.name, model, traffic, time.perf_counter() - begun, eager)


def traffic_of(config: ModelConfig, share: Share, ops: Ops, dtype: torch.dtype) -> ModelTraffic:
    kept = getattr(ops, "dtype", dtype)  # the native operations keep float16 models in float32
    block = ops.kv_block_bytes(share.num_kv_heads, config.head_dim)
    return ModelTraffic(config, share, kept.itemsize, block / BLOCK_SIZE)


def fill_with_noise(tensor: torch.Tensor) -> None:
    """The same numbers over and over: what they are does not matter, that they are there does. Memory of a CPU that was
    never written to is one page of zeros, read again and again."""
    flat = tensor.view(-1)
    noise = torch.randn(min(len(flat), _NOISE_ELEMENTS), device=tensor.device).to(tensor.dtype)
    for at in range(0, len(flat), len(noise)):
        part = flat[at : at + len(noise)]
        part.copy_(noise[: len(part)])


def _needed(graphs: DecodeGraphs, batches: set[int]) -> DecodeGraphs:
    """Of an engine's sizes those that these batches are padded to."""
    sizes = {padded_size(batch, graphs.sizes) for batch in batches}
    return replace(graphs, sizes=tuple(sorted(size for size in sizes if size is not None)))


def _has_weights(made: Chosen) -> bool:
    try:
        return bool(checkpoint_files(made.folder))
    except ModelError:
        return False
