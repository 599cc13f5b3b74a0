"""Whisper's decoder on one rank: what `transformers` generates of the same sounds, in each situation of a batch."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import Event, SendPlan, SendToGateway, SendTokens, WorkersReady
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from services.worker.backend import run_step
from services.worker.executor.host_runner import HostRunner
from services.worker.models.config import ModelError
from services.worker.models.lora.slots import LoraSettings
from services.worker.ops.interface import OpsName, OpsUnavailable
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import EngineId, Incarnation, SequenceId
from shared.messages.gateway import RequestRejected
from shared.messages.generation import PromptEmbeds, SamplingOptions
from shared.messages.scheduler import StepFinished
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import TIMING, generate
from tests.support.models.sounds import sweep
from tests.support.models.tiny_whisper import make_whisper
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 20
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=64, max_running=4)


def asking(how: str) -> SamplingOptions:
    """Greedy, by the rules of a transcription."""
    return SamplingOptions(seed=0, temperature=0.0, extra_args=msgspec.json.encode({"transcription": how}))


@pytest.mark.features("encoder-decoder", "chunked prefill", "preemption", "prefix cache", "logits processors")
@pytest.mark.parametrize("ops", ["torch", "native"])
def test_a_sound_is_written_down_as_by_the_library(tmp_path: Path, ops: OpsName) -> None:
    """Alone and side by side, prompts cut into steps, with times and behind what was said before, preempted and behind
    rows that another sequence has brought; one that is drawn for without rows is left in peace."""
    model = make_whisper(tmp_path)
    try:
        backend = tiny_backend(model.path, ops=ops)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    assert backend.card.audio is not None
    assert backend.card.max_model_len == 80
    driver = Driver(backend, budget=7)
    said = model.said("The quick brown fox jumps over")
    sounds = [sweep(0), sweep(1), sweep(2, 0.7), sweep(0)]
    prompts = [model.prompt(), model.prompt("de", times=True), said + model.prompt("fr", "translate"), model.prompt()]
    hows = ["text", "timestamps", "text", "text"]
    sequences = [
        driver.add(prompt, OUTPUT, sampling=asking(how), prompt_embeds=model.rows(sound))
        for prompt, how, sound in zip(prompts[:3], hows[:3], sounds[:3], strict=True)
    ]
    silent = driver.add(model.prompt(), 3)
    for _ in range(9):
        driver.step()
    driver.preempt(sequences[1])
    again = driver.add(prompts[3], OUTPUT, sampling=asking("text"), prompt_embeds=model.rows(sounds[3]))
    driver.share_encoded(again, sequences[0])
    driver.run()
    expected = [
        model.generated(sounds[0], OUTPUT),
        model.generated(sounds[1], OUTPUT, "de", times=True),
        model.generated(sounds[2], OUTPUT, "fr", "translate", before="The quick brown fox jumps over"),
    ]
    for sequence, wanted in zip([*sequences, again], [*expected, expected[0]], strict=True):
        assert sequence.output[: len(wanted)] == wanted
    assert len({tuple(each) for each in expected}) == 3
    assert len(silent.output) == 3


@pytest.mark.features("preemption", "prefix cache")
def test_a_scheduler_gives_rows_blocks_of_their_own(tmp_path: Path) -> None:
    """Memory for little more than two sounds: sequences wait, are preempted as their text grows, and find the rows of
    an equal sound, unless its salt is another."""
    model = make_whisper(tmp_path)
    backend = tiny_backend(model.path, kv_memory_bytes=19 * 16 * 3 * 2 * 64 * 4, max_num_seqs=4, max_batch_tokens=64)
    assert backend.num_blocks == 19
    engine = Engine(backend)
    sounds = {"a": 0, "b": 1, "c": 2, "d": 0, "e": 0}
    for name, seed in sounds.items():
        engine.ask(name, model.prompt(), model.rows(sweep(seed)), salt="other" if name == "e" else None)
    engine.run()
    for name, seed in sounds.items():
        expected = model.greedy(sweep(seed))[: OUTPUT * 2]
        assert engine.tokens[name][: len(expected)] == expected
    assert engine.preempted
    # Each sound of each salt is written once more for each time that it was gone: never beside another of its name.
    assert len(engine.written) < len(engine.started)
    with pytest.raises(AssertionError, match="rows of 8 are not allowed"):
        engine.ask("f", model.prompt(), PromptEmbeds(dtype="float32", size=8, rows=bytes(64), encoded=True))
    with pytest.raises(AssertionError, match="/v1/audio/transcriptions alone"):
        engine.ask("g", model.prompt(), None)


class Engine:
    """A scheduler's core and its one real rank, step by step."""

    def __init__(self, backend: HostRunner) -> None:
        self.backend = backend
        self.core = EngineCore(EngineId("e"), Incarnation(1), LIMITS)
        self.plans: deque[StepPlan] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.started: list[SequenceId] = []
        self.written: list[SequenceId] = []
        self.preempted = False
        self.now = 0.0
        ready = WorkersReady(
            backend.card, backend.num_blocks, max_running=4, max_batch_tokens=64, kv_groups=backend.kv_groups
        )
        self.send(ready)

    def ask(self, name: str, prompt: list[int], rows: PromptEmbeds | None, salt: str | None = None) -> None:
        request = generate(name, prompt, max_tokens=OUTPUT * 2, ignore_eos=True, cache_salt=salt)
        generation = replace(request.generation, sampling=asking("text"), prompt_embeds=rows)
        self.send(replace(request, generation=generation))

    def send(self, event: Event) -> None:
        self.now += 0.1
        for output in self.core.handle(event, self.now):
            if isinstance(output, SendPlan):
                self.plans.append(output.plan)
            elif isinstance(output, SendTokens):
                for entry in output.batch.entries:
                    self.tokens.setdefault(entry.request, []).extend(entry.tokens)
            elif isinstance(output, SendToGateway):
                assert not isinstance(output.message, RequestRejected), output.message
        check(self.core)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.plans:
            plan = self.plans.popleft()
            if plan.step == 0:
                self.backend.reset()
            self.preempted |= any(new.sequence in self.started for new in plan.new)
            self.started += [new.sequence for new in plan.new]
            self.written += [new.sequence for new in plan.new if not new.encoded_computed]
            output = run_step(self.backend, plan)
            self.send(StepFinished(epoch=plan.epoch, step=plan.step, sampled=output.sampled, timing=TIMING))


@pytest.mark.refuses(
    "Whisper",
    "--speculative",
    "--load-format dummy",
    "--kv-connector",
    "--enable-prompt-embeds",
    "--lora",
    "--pooling-type",
)
@pytest.mark.parametrize(
    ("setting", "different"),
    [
        ("speculative", {"speculation": SpeculationSettings(method="ngram")}),
        ("load_format dummy", {"load_format": "dummy"}),
        ("kv_connector", {"kv_connector": True}),
        ("enable_prompt_embeds", {"prompt_embeds": True}),
        ("lora", {"loras": LoraSettings(at_run_time=True)}),
        ("pooling_type", {"pooling_type": "mean"}),
    ],
)
def test_what_it_is_not_combined_with_is_refused_at_start(
    tmp_path: Path, setting: str, different: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=setting):
        tiny_backend(make_whisper(tmp_path).path, **different)
