"""Engines of several ranks without a bus: real rank processes, and the real scheduler's core on top of them.

with rank_processes(4, folder) as ranks:
    engine = ranks.serve(model.path, tp=2, stages=2, limits=Limits(run_ahead=1))
    request = engine.ask(prompt, 8)
    engine.run()
    request.tokens
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import Output, SendPlan, SendTokens, WorkersReady
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from services.worker.kv.layer_groups import HybridKvCache
from services.worker.models.expert_parallel.settings import NO_EXPERT_PARALLEL, ExpertSettings
from services.worker.models.loaded_model import DtypeChoice, ModelImpl, QuantizationChoice
from services.worker.ops.interface import OpsName
from services.worker.speculation.settings import SpeculationSettings
from shared.blocks import hash_chain
from shared.ids import Attempt, EngineId, Incarnation, ModelName, RequestId
from shared.messages.generation import Generation, PromptEmbeds, SamplingOptions, StopConditions
from shared.messages.scheduler import GenerateRequest, StepFinished
from shared.packing import pack
from tests.support.engines.checking_worker import DETOKENIZER, GATEWAY, TIMING
from tests.support.lanes.forked_server import PRELOADED
from tests.support.worker.plan_driver import GREEDY
from tests.support.worker.rank_process import Drew, Serve, Serving, main, read, write

_rendezvous = count()
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(list(PRELOADED))
WHOLE_EXPERTS = ExpertSettings(parallel=True)
MOVED_WITHIN = 120.0
"""Seconds. Experts are moved by threads beside steps: how many steps that takes is the machine's."""


@dataclass
class Request:
    tokens: list[int] = field(default_factory=list)
    """Its output so far."""
    cached: int = 0
    """Prompt tokens that were found computed."""
    over: bool = False


class _Process(NamedTuple):
    process: multiprocessing.process.BaseProcess
    stdin: BinaryIO
    stdout: BinaryIO


def _run(rank: int, program: Callable[[str], None], stdin: Connection, stdout: Connection) -> None:
    """Becomes a rank."""
    for source, target in ((stdin, 0), (stdout, 1)):
        os.dup2(source.fileno(), target)
        source.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    program(str(rank))


def _started(rank: int, program: Callable[[str], None]) -> _Process:
    its_stdin, stdin = FORKING.Pipe(duplex=False)
    stdout, its_stdout = FORKING.Pipe(duplex=False)
    process = FORKING.Process(target=_run, args=(rank, program, its_stdin, its_stdout))
    process.start()
    its_stdin.close()
    its_stdout.close()
    return _Process(process, os.fdopen(os.dup(stdin.fileno()), "wb"), os.fdopen(os.dup(stdout.fileno()), "rb"))


class RankProcesses:
    """Owns the processes. The ranks of an engine are the first of them."""

    def __init__(self, size: int, folder: Path, program: Callable[[str], None] = main) -> None:
        self._folder = folder
        self._processes = [_started(rank, program) for rank in range(size)]

    def serve(
        self,
        model: Path,
        *,
        tp: int = 1,
        stages: int = 1,
        layers: tuple[int, ...] = (),
        ops: OpsName = "torch",
        limits: EngineLimits | None = None,
        kv_memory: int = 4 << 20,
        drafts: int = 0,
        speculation: SpeculationSettings | None = None,
        launched: bool = False,
        block_size: int = 16,
        loras: tuple[tuple[str, str], ...] = (),
        max_loras: int = 2,
        quantization: QuantizationChoice = "auto",
        hybrid: HybridKvCache = "off",
        prompt_embeds: bool = False,
        experts: ExpertSettings = NO_EXPERT_PARALLEL,
        model_impl: ModelImpl = "auto",
        shared_rows: int | None = None,
        context_rows: int | None = None,
        dtype: DtypeChoice = "float32",
        language_model_only: bool = False,
    ) -> EngineOfRanks:
        """An engine of `tp` × `stages` ranks, which replaces those before."""
        rendezvous = str(self._folder / f"rendezvous-{next(_rendezvous)}")
        asked = Serve(
            *(str(model), ops, rendezvous, tp, stages, layers, kv_memory, drafts, speculation),
            block_size=block_size,
            quantization=quantization,
            launched=launched,
            loras=loras,
            max_loras=max_loras,
            hybrid=hybrid,
            prompt_embeds=prompt_embeds,
            experts=experts,
            model_impl=model_impl,
            shared_rows=shared_rows,
            context_rows=context_rows,
            dtype=dtype,
            language_model_only=language_model_only,
        )
        (engine,) = self._serve(asked, limits)
        return engine

    def serve_group(
        self,
        model: Path,
        *,
        engines: int,
        tp: int = 1,
        ops: OpsName = "native",
        limits: EngineLimits | None = None,
        hybrid: HybridKvCache = "off",
        drafts: int = 0,
        experts: ExpertSettings = WHOLE_EXPERTS,
        model_impl: ModelImpl = "auto",
        shared_rows: int | None = None,
    ) -> list[EngineOfRanks]:
        """A data-parallel group of engines of `tp` ranks, which replaces the engines before."""
        asked = Serve(
            *(str(model), ops, str(self._folder / f"rendezvous-{next(_rendezvous)}"), tp, 1),
            engines=engines,
            hybrid=hybrid,
            drafts=drafts,
            experts=experts,
            model_impl=model_impl,
            shared_rows=shared_rows,
        )
        return self._serve(asked, limits)

    def _serve(self, asked: Serve, limits: EngineLimits | None) -> list[EngineOfRanks]:
        for process in self._processes:
            write(process.stdin, asked)
        answers = [msgspec.msgpack.decode(self.read(rank), type=Serving | None) for rank in range(len(self))]
        serving = [answer for answer in answers if answer is not None]
        size = asked.world_size
        return [
            EngineOfRanks(self, asked, serving[first : first + size], limits or EngineLimits(), first)
            for first in range(0, size * asked.engines, size)
        ]

    def __len__(self) -> int:
        return len(self._processes)

    def read(self, rank: int) -> bytes:
        payload = read(self._processes[rank].stdout)
        assert payload is not None, f"rank {rank} has ended: {self.exit_status(rank, 60)}"
        return payload

    def tell(self, ranks: int, message: msgspec.Struct, first: int = 0) -> None:
        for rank in range(first, first + ranks):
            self.tell_one(rank, message)

    def tell_one(self, rank: int, message: msgspec.Struct) -> None:
        write(self._processes[rank].stdin, message)

    def says_something(self, rank: int, within: float) -> bool:
        """Whether it answers in so many seconds, or ends."""
        return bool(select.select([self._processes[rank].stdout], [], [], within)[0])

    def kill(self, rank: int) -> None:
        """It ends, as where its watchdog has found that a step does not."""
        process = self._processes[rank].process
        process.kill()
        process.join()

    def exit_status(self, rank: int, within: float) -> int:
        """Of a rank that ends by itself, in so many seconds."""
        process = self._processes[rank].process
        process.join(within)
        assert process.exitcode is not None
        return process.exitcode

    def close(self) -> None:
        for each in self._processes:
            each.process.kill()
            each.process.join()
            each.process.close()
            for stream in (each.stdin, each.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class EngineOfRanks:
    """A scheduler's core and its ranks. Plans in flight are in the ranks' pipes."""

    def __init__(
        self, ranks: RankProcesses, asked: Serve, serving: list[Serving], limits: EngineLimits, first: int = 0
    ) -> None:
        """`first`: the first of its ranks."""
        assert len(serving) == asked.world_size
        self.serving = serving
        self.core = EngineCore(EngineId("e"), Incarnation(1), limits)
        self.logits: list[list[float]] = []
        """Of every row drawn from, in order."""
        self.most_in_flight = 0
        self.steps = 0
        self.moves = (0, 0)
        """Rearrangements of experts that are over, and experts that were moved."""
        self.drafted = self.accepted = 0
        """Drafts that stood."""
        self._ranks = ranks
        self._asked = asked
        self._first = first
        self._requests: dict[str, Request] = {}
        self._in_flight = 0
        self._tell(
            WorkersReady(
                serving[0].card,
                min(one.num_blocks for one in serving),
                max_running=8,
                max_batch_tokens=64,
                world_size=asked.world_size,
                stages=asked.stages,
                max_speculate=min(one.max_speculate for one in serving),
                max_loras=min(one.max_loras for one in serving),
                kv_groups=serving[0].kv_groups,
                state_checkpoints=min(
                    (one.state_checkpoints for one in serving if one.state_checkpoints is not None), default=None
                ),
            )
        )

    def ask(
        self,
        prompt: list[int],
        output: int,
        sampling: SamplingOptions = GREEDY,
        lora: str = "",
        embeds: PromptEmbeds | None = None,
    ) -> Request:
        """`lora`: name of its adapter; empty: the model alone. `embeds`: in place of the prompt's tokens."""
        card = self.serving[0].card.lora(ModelName(lora))
        adapter = None if card is None else card.id
        name = f"r{len(self._requests)}"
        tokens = pack(prompt)
        generation = Generation(
            request=RequestId(name),
            attempt=Attempt(1),
            gateway=GATEWAY,
            model=ModelName("tiny"),
            tokens=tokens,
            prompt_length=len(prompt),
            block_hashes=b"".join(hash_chain(tokens, None, self.serving[0].card.block_size, adapter, embeds)),
            sampling=sampling,
            stopping=StopConditions(max_tokens=output, ignore_eos=True),
            lora=adapter,
            prompt_embeds=embeds,
        )
        self._requests[name] = Request()
        self._tell(GenerateRequest(generation, DETOKENIZER))
        return self._requests[name]

    def step(self) -> None:
        """Takes the next result in."""
        drew = msgspec.msgpack.decode(self._ranks.read(self._first + self._asked.draws), type=Drew)
        self._in_flight -= 1
        self.steps += 1
        self.logits += drew.logits
        self.moves = drew.moves
        self.drafted += drew.drafted
        self.accepted += sum(drew.accepted)
        self._tell(
            StepFinished(
                epoch=self._epoch,
                step=drew.step,
                sampled=drew.sampled,
                timing=TIMING,
                drafted=drew.drafted,
                accepted=drew.accepted,
            )
        )
        check(self.core)

    def run(self) -> None:
        """Until all requests are over and nothing is in flight."""
        while self._in_flight:
            self.step()
        assert all(request.over for request in self._requests.values())

    def run_until_experts_move(
        self, prompts: Sequence[list[int]], output: int, *, rearrangements: int = 1
    ) -> list[tuple[list[int], Request]]:
        """Until so many more are over than before, and at least one expert has moved: asks for what follows the next of
        `prompts`, in turn. Returns what was asked, and the answers. Others of its group may be idle."""
        over, moved = self.moves[0] + rearrangements, self.moves[1]
        until = time.monotonic() + MOVED_WITHIN
        asked = []
        for tokens in cycle(prompts):
            asked.append((tokens, self.ask(tokens, output)))
            self.run()
            if self.moves[0] >= over and self.moves[1] > moved:
                break
            assert time.monotonic() < until, f"{self.moves} in {self.steps} steps, of {over} and more than {moved}"
        return asked

    @property
    def in_flight(self) -> int:
        """Plans whose results have not been taken in."""
        return self._in_flight

    @property
    def preemptions(self) -> int:
        assert self.core.epoch_state is not None
        return self.core.epoch_state.planner.preemption.count

    @property
    def _epoch(self) -> Incarnation:
        assert self.core.epoch_state is not None
        return self.core.epoch_state.steps.epoch

    def _tell(self, event: WorkersReady | GenerateRequest | StepFinished) -> None:
        for output in self.core.handle(event, 0.0):
            self._hear(output)

    def _hear(self, output: Output) -> None:
        match output:
            case SendPlan(plan):
                self._in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self._in_flight)
                self._ranks.tell(self._asked.world_size, plan, self._first)
            case SendTokens(_, batch):
                for opened in batch.opened:
                    self._requests[opened.request].cached = opened.cached_tokens
                for entry in batch.entries:
                    request = self._requests[entry.request]
                    assert entry.position == len(request.tokens)
                    request.tokens += entry.tokens
                    request.over = entry.finish is not None
            case _:
                raise AssertionError(output)


@contextlib.contextmanager
def rank_processes(size: int, folder: Path) -> Iterator[RankProcesses]:
    ranks = RankProcesses(size, folder)
    try:
        yield ranks
    finally:
        ranks.close()
