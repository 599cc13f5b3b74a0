"""One rank of engines of several, as a process of its own.

Hears `Serve`, and then plans, from standard input; says `Serving` and, where it draws, `Drew` on standard output. Both
are MessagePack, each message behind its length. `tests/support/worker/rank_processes.py` starts it, and is the other
end.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import pytest
import torch
from msgspec import Struct

from services.worker.backend import MAX_LAUNCHED_STEPS, Step, StepOutput, run_step
from services.worker.distributed.communicator import SingleRank, SingleStage
from services.worker.distributed.lockstep import GroupTopology
from services.worker.distributed.torch_ranks import RankTopology, join, join_group
from services.worker.executor.device_runner import DeviceRunner
from services.worker.executor.host_runner import HostRunner
from services.worker.kv.layer_groups import HybridKvCache
from services.worker.models.decoder import Decoder
from services.worker.models.expert_parallel.settings import NO_EXPERT_PARALLEL, ExpertSettings
from services.worker.models.loaded_model import DtypeChoice, ModelImpl, QuantizationChoice
from services.worker.models.lora.slots import LoraSettings
from services.worker.ops.interface import OpsName
from services.worker.ops.native.native_exchange import shared_exchange
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import Incarnation, ModelName
from shared.kv_groups import KvCacheGroup
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import SampledTokens
from shared.messages.worker import StepPlan
from tests.support.worker.launched_rank import Runner, begin_step, launching
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

LENGTH_BYTES = 4
JOIN_DEADLINE = timedelta(seconds=60)


class Serve(Struct, frozen=True, tag=True):
    """Join the ranks of an engine, and load a model. Ranks that the engine has no place for only say so."""

    model: str
    ops: OpsName
    rendezvous: str
    tp: int
    stages: int
    layers: tuple[int, ...] = ()
    kv_memory: int = 4 << 20
    drafts: int = 0
    """Tokens that n-gram look-up may draft."""
    speculation: SpeculationSettings | None = None
    """Another method."""
    block_size: int = 16
    loras: tuple[tuple[str, str], ...] = ()
    """Names and folders of adapters."""
    max_loras: int = 2
    quantization: QuantizationChoice = "auto"
    launched: bool = False
    """Step after step is begun before the tokens of the one before are known."""
    hybrid: HybridKvCache = "off"
    prompt_embeds: bool = False
    experts: ExpertSettings = NO_EXPERT_PARALLEL
    model_impl: ModelImpl = "auto"
    engines: int = 1
    """Of a data-parallel group: the first ranks are those of the first of them."""
    shared_rows: int | None = None
    context_rows: int | None = None
    dtype: DtypeChoice = "float32"
    language_model_only: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.stages

    @property
    def exchanges_rows(self) -> bool:
        return self.shared_rows is not None or self.context_rows is not None

    @property
    def draws(self) -> int:
        """The rank of each engine that draws."""
        return self.tp * (self.stages - 1)


class Serving(Struct, frozen=True):
    num_blocks: int
    card: ModelCard
    words: int
    """Of the vocabulary in this rank's embedding; 0 on stages without one, and where transformers computes."""
    layers: int
    """0 where transformers computes."""
    block_bytes: int
    max_speculate: int
    max_loras: int
    kv_groups: tuple[KvCacheGroup, ...] = ()
    state_checkpoints: int | None = None
    state_bytes: int = 0


class Drew(Struct, frozen=True):
    step: int
    sampled: tuple[SampledTokens, ...]
    drafted: int
    accepted: tuple[int, ...]
    logits: list[list[float]]
    """Of each row that was drawn from."""
    moves: tuple[int, int] = (0, 0)
    """Rearrangements of experts that are over, and experts that were moved."""


def write(stream: IO[bytes], message: Struct | None) -> None:
    payload = msgspec.msgpack.encode(message, enc_hook=str)
    stream.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end."""
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length, "little")) if len(length) == LENGTH_BYTES else None


def served(rank: int, asked: Serve) -> HostRunner:
    communicator, pipeline, group = SingleRank(), SingleStage(), None
    if asked.engines > 1:
        place = GroupTopology(rank // asked.tp, asked.engines, asked.tp, rank % asked.tp)
        shared = shared_exchange(place.group_size)
        joined = join_group(place, rendezvous=f"file://{asked.rendezvous}", timeout=JOIN_DEADLINE, shared=shared)
        communicator, group = joined.communicator, joined.group  # type: ignore[assignment]
    elif asked.world_size > 1:
        communicator, pipeline = join(  # type: ignore[assignment]
            RankTopology(rank, asked.world_size, asked.stages),
            rendezvous=f"file://{asked.rendezvous}",
            timeout=JOIN_DEADLINE,
            shared=shared_exchange(asked.tp) if asked.ops == "native" or asked.exchanges_rows else None,
        )
    return tiny_backend(
        Path(asked.model),
        dtype=asked.dtype,
        kv_memory_bytes=asked.kv_memory,
        max_num_seqs=8,
        max_batch_tokens=64,
        communicator=communicator,
        ops=asked.ops,
        pipeline=pipeline,
        layers=asked.layers or None,
        block_size=asked.block_size,
        loras=LoraSettings(tuple((ModelName(n), Path(f)) for n, f in asked.loras), asked.max_loras, 32),
        quantization=asked.quantization,
        prompt_embeds=asked.prompt_embeds,
        hybrid_kv_cache=asked.hybrid,
        experts=asked.experts,
        model_impl=asked.model_impl,
        language_model_only=asked.language_model_only,
        group=group,
        shared_rows=asked.shared_rows,
        context_rows=asked.context_rows,
        speculation=asked.speculation
        or (SpeculationSettings(method="ngram", num_speculative_tokens=asked.drafts) if asked.drafts else None),
    )


def serving(backend: HostRunner) -> Serving:
    decoder = backend.rank.decoder
    words = layers = 0
    if isinstance(decoder, Decoder):
        layers = len(decoder.weights.layers)
        words = 0 if decoder.weights.embedding is None else decoder.share.padded_vocab
    return Serving(
        num_blocks=backend.num_blocks,
        card=backend.card,
        words=words,
        layers=layers,
        block_bytes=decoder.kv_block_bytes,
        max_speculate=backend.max_speculate,
        max_loras=backend.max_loras,
        kv_groups=backend.kv_groups,
        state_checkpoints=backend.state_checkpoints,
        state_bytes=decoder.state_bytes,
    )


class Launched(NamedTuple):
    plan: StepPlan
    step: Step
    logits: list[list[float]]


class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asked: Serve | None = None
        self.backend: Runner | None = None
        self.launched: queue.Queue[Launched] = queue.Queue(MAX_LAUNCHED_STEPS - 1)
        """Beside the one that is awaited."""
        threading.Thread(target=self._answer_all, daemon=True).start()
        self.epoch: Incarnation | None = None
        self.logits = record_logits(pytest.MonkeyPatch())

    def serve(self, asked: Serve) -> Serving | None:
        self.launched.join()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.asked, self.backend, self.epoch = asked, None, None
        if self.rank >= asked.world_size * asked.engines:
            return None
        backend = served(self.rank, asked)
        self.backend = launching(backend) if asked.launched else backend
        return serving(backend)

    def step(self, plan: StepPlan) -> None:
        assert self.backend is not None
        if plan.epoch != self.epoch:
            self.epoch = plan.epoch
            self.launched.join()
            self.backend.reset()
        self.logits.clear()
        if isinstance(self.backend, DeviceRunner):
            self.launched.put(Launched(plan, begin_step(self.backend, plan), self._rows()))
        else:
            self._tell(plan, run_step(self.backend, plan), self._rows())

    def _moves(self) -> tuple[int, int]:
        decoder = self.backend.rank.decoder if self.backend is not None else None
        if not isinstance(decoder, Decoder) or decoder.rearranger is None:
            return 0, 0
        return decoder.rearranger.moves.rearrangements, decoder.rearranger.moves.experts

    def _rows(self) -> list[list[float]]:
        return [row for logits in self.logits for row in logits.tolist()]

    def _answer_all(self) -> None:
        while True:
            plan, step, rows = self.launched.get()
            try:
                self._tell(plan, step.result(), rows)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            self.launched.task_done()

    def _tell(self, plan: StepPlan, output: StepOutput, rows: list[list[float]]) -> None:
        assert self.asked is not None
        if self.rank % self.asked.world_size == self.asked.draws:
            drew = Drew(plan.step, output.sampled, output.drafted, output.accepted, rows, self._moves())
            write(sys.stdout.buffer, drew)


class Heard(NamedTuple):
    payload: bytes | None
    """None: there is no more."""


def hear(heard: queue.SimpleQueue[Heard], this: Rank) -> None:
    while True:
        heard.put(message := Heard(read(sys.stdin.buffer)))
        if this.backend is not None and this.backend.group is not None:
            this.backend.group.notify_plan()
        if message.payload is None:
            return


def next_message(heard: queue.SimpleQueue[Heard], this: Rank) -> bytes | None:
    """Until it comes, steps of other engines are computed."""
    if this.backend is not None and this.backend.group is not None:
        with this.backend.compute_context():
            this.backend.group.wait_for_plan(lambda: not heard.empty())
    return heard.get().payload


def main(rank: str) -> None:
    this = Rank(int(rank))
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    threading.Thread(target=hear, args=(heard, this), daemon=True).start()
    decoder = msgspec.msgpack.Decoder(Serve, dec_hook=lambda type_, value: type_(value))
    plans = msgspec.msgpack.Decoder(StepPlan)
    while (payload := next_message(heard, this)) is not None:
        if payload[0] >> 4 == 0x8 or payload[0] == 0xDE:  # a map: `Serve`; plans are arrays
            write(sys.stdout.buffer, this.serve(decoder.decode(payload)))
        else:
            this.step(plans.decode(payload))
