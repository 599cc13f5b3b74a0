"""Logits processors of installed packages on a backend that computes: the example in docs/examples, and some more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.backend import run_step
from services.worker.executor.host_runner import HostRunner
from services.worker.graphs.host_decodes import HostDecode
from services.worker.ops.interface import OpsName
from services.worker.sampling.plugins.interface import BatchUpdate, LogitsProcessor, ProcessorConfig, ProcessorParams
from services.worker.sampling.plugins.request_processors import load_processors
from services.worker.speculation.settings import read_speculation
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from shared.plugins.entry_points import PluginError
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.plugin_packages import EXAMPLES, pip_installed, written_package
from tests.support.worker.launched_rank import begin_step
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend


class NeverAgain(LogitsProcessor):
    """Bans what the output holds already; raises, for a request that says so, at its third token."""

    extra_args = ("never_again",)

    def __init__(self, config: ProcessorConfig) -> None:
        self.requests: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def validate_params(cls, params: ProcessorParams) -> None:
        if params.extra_args.get("never_again") == "confuse":
            raise RuntimeError("a bug")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for index in batch_update.removed if batch_update else ():
            del self.requests[index]
        for index, params, _, output in batch_update.added if batch_update else ():
            self.requests[index] = params.extra_args["never_again"], output
        for source, target, _ in batch_update.moved if batch_update else ():
            self.requests[target] = self.requests.pop(source)

    def apply(self, logits: Tensor) -> Tensor:
        for index, (wanted, output) in self.requests.items():
            if wanted == "fail" and len(output) == 2:
                raise RuntimeError("a bug")
            logits[index, torch.tensor(output, dtype=torch.int64)] = -torch.inf
        return logits


class Sharper(NeverAgain):
    """Changes no argmax, so greedy requests do not come to it."""

    extra_args = ("sharper",)

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        raise AssertionError("a greedy request came")

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        raise AssertionError("a greedy request came")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("processed"))


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pip_installed("sequence-processors", tmp_path_factory)


def asking(seed: int = 0, temperature: float = 0.0, allowed: tuple[int, ...] | None = None, **args: Any) -> Any:
    packed = json.dumps(args).encode() if args else b""
    return SamplingOptions(seed=seed, temperature=temperature, allowed_token_ids=allowed, extra_args=packed)


def prompt(length: int, seed: int) -> list[int]:
    return [Random(seed).randrange(3, VOCABULARY) for _ in range(length)]


def run(backend: HostRunner, *wanted: SamplingOptions, speculate: int = 0, epoch: int = 1) -> list[list[int]]:
    """The outputs of prompts in one batch, which repeat themselves and come one step after another."""
    backend.reset()
    driver = Driver(backend, epoch=epoch, speculate=speculate, budget=24)
    sequences: list[Sequence] = []
    for number, sampling in enumerate(wanted):
        sequences.append(driver.add(prompt(4, number) * 4, 16, sampling=sampling))
    driver.run()
    return [sequence.output for sequence in sequences]


def test_the_example_is_short() -> None:
    lines = (EXAMPLES / "sequence-processors" / "sequence_processors.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60


def test_only_requests_that_ask_are_processed(tiny: TinyModel, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(example))
    backend = tiny_backend(tiny.path, processors={**load_processors(["begin_with"]), "sharper": Sharper})
    assert backend.card.extra_args == ("begin_with", "sharper")
    warm = asking(5, temperature=1.0)
    plain = run(tiny_backend(tiny.path), asking(), asking(), warm)
    begun = [7, 9, 11]
    some = run(backend, asking(), asking(begin_with=begun, sharper=True), warm)
    assert (some[0], some[2]) == (plain[0], plain[2])
    assert some[1][:3] == begun
    driver = Driver(tiny_backend(tiny.path))
    goes_on = driver.add(prompt(4, 1) * 4 + begun, 16, prompt_length=16)
    driver.run()
    assert some[1] == goes_on.output, "behind them the model says what it would"
    few = tuple(range(20, 60))
    forbidden = run(backend, asking(allowed=few, begin_with=begun), asking(allowed=few, begin_with=[30, 7]))
    assert set(forbidden[0]) <= set(few), "what is forbidden stays so"
    assert forbidden[0] == run(backend, asking(allowed=few))[0]
    assert (forbidden[1][0], set(forbidden[1]) <= set(few)) == (30, True)


@pytest.mark.features("logits processors", "speculative")
@pytest.mark.parametrize("ops", ["torch", "native"])
def test_drafts_change_nothing(ops: OpsName, tiny: TinyModel) -> None:
    processors = {"never_again": NeverAgain}
    wanted = [asking(never_again=True), asking(), asking(3, 0.7, never_again=True), asking(never_again=True)]
    alone = run(tiny_backend(tiny.path, ops=ops, processors=processors), *wanted)
    assert all(len(set(output)) == len(output) for output in (alone[0], alone[2], alone[3]))
    drafting = read_speculation('{"method": "ngram", "num_speculative_tokens": 4}')
    backend = tiny_backend(tiny.path, ops=ops, processors=processors, speculation=drafting)
    assert run(backend, *wanted, speculate=4) == alone


@pytest.mark.features("logits processors", "preemption", "prefix cache", "chunked prefill")
def test_what_comes_back_goes_on_as_it_would_have(tiny: TinyModel) -> None:
    processors = {"never_again": NeverAgain}
    whole = run(tiny_backend(tiny.path, processors=processors), asking(never_again=True), asking(2, 0.9, never_again=1))
    backend = tiny_backend(tiny.path, processors=processors)
    driver = Driver(backend, budget=24)
    first = driver.add(prompt(4, 0) * 4, 16, sampling=asking(never_again=True))
    for _ in range(6):
        driver.step()
    second = driver.add(prompt(4, 1) * 4, 16, sampling=asking(2, 0.9, never_again=1))
    for _ in range(3):
        driver.step()
    driver.preempt(first)
    driver.run()
    assert [first.output, second.output] == whole


def failures(backend: HostRunner, *wanted: SamplingOptions, steps: int) -> Mapping[int, tuple[str, str]]:
    """The sequences that fail within so many steps, and how."""
    tokens, failed = [5, 6, 7, 8], dict[int, tuple[str, str]]()
    for step in range(steps):
        new = tuple(
            NewSequence(
                sequence=SequenceId(i), tokens=pack(tokens), prompt_length=4, computed=0, blocks=b"", sampling=sampling
            )
            for i, sampling in enumerate(wanted)
        )
        work = tuple(
            SequenceWork(SequenceId(i), len(tokens) if step == 0 else 1, pack([i]) if step == 0 else b"", True)
            for i in range(len(wanted))
        )
        plan = StepPlan(epoch=Incarnation(1), step=step, new=new if step == 0 else (), work=work)
        output = run_step(backend, plan)
        assert len(output.sampled) == len(wanted)
        failed |= {int(each.sequence): (each.fault, each.error) for each in output.failed}
    return failed


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_one_that_fails_ends_its_sequence_and_no_other(ops: OpsName, tiny: TinyModel) -> None:
    backend = tiny_backend(tiny.path, ops=ops, processors={"never_again": NeverAgain})
    wanted = [asking(never_again=True), asking(never_again="fail"), asking(), asking(never_again="confuse")]
    bug = "the logits processor never_again failed: RuntimeError('a bug')"
    assert failures(backend, *wanted, steps=2) == {3: ("processor", bug)}
    backend.reset()
    assert failures(backend, *wanted, steps=4) == {1: ("processor", bug), 3: ("processor", bug)}


def test_one_that_fails_before_its_first_decode_ends_its_sequence(tiny: TinyModel) -> None:
    """It comes with its prompt computed, as behind a hand-over, so that no step of many calls says so."""
    backend, tokens = tiny_backend(tiny.path, ops="native", processors={"never_again": NeverAgain}), [5, 6, 7, 8]

    def computed(step: int, new: NewSequence, count: int, **others: Any) -> Any:
        work = (SequenceWork(new.sequence, count, b"" if step else pack([0]), True),)
        return begin_step(backend, StepPlan(epoch=Incarnation(1), step=step, new=(new,), work=work, **others))

    first = NewSequence(
        sequence=SequenceId(0), tokens=pack(tokens), prompt_length=4, computed=0, blocks=b"", sampling=asking()
    )
    tokens += computed(0, first, 4).result().sampled[0].tokens
    second = NewSequence(
        sequence=SequenceId(1),
        tokens=pack(tokens),
        prompt_length=4,
        computed=4,
        blocks=pack([0]),
        sampling=asking(never_again="confuse"),
    )
    step = computed(1, second, 1, released=(first.sequence,))
    assert isinstance(step.inputs, HostDecode)
    assert [(each.sequence, each.fault) for each in step.result().failed] == [(second.sequence, "processor")]


def test_arguments_that_no_processor_has_are_refused(tiny: TinyModel) -> None:
    spoilt = SamplingOptions(seed=0, extra_args=b"[1")
    failed = failures(tiny_backend(tiny.path), asking(), asking(begin_with=[1]), spoilt, steps=1)
    assert (sorted(failed), failed[2][0]) == ([1, 2], "invalid_args")
    fault, error = failed[1]
    assert fault == "invalid_args"
    assert error == "vllm_xargs: 'begin_with' is not allowed; there are: none, as this engine has no logits processors"


WRONG = """
from services.worker.sampling.plugins.interface import LogitsProcessor

class Nameless(LogitsProcessor):
    def __init__(self, config): ...
    def is_argmax_invariant(self): return False
    def update_state(self, batch_update): ...
    def apply(self, logits): return logits

class One(Nameless):
    extra_args = ("one",)

class Other(Nameless):
    extra_args = ("two", "one")
    def __init__(self, config): raise OSError("no file")
"""


def test_what_cannot_be_used_is_refused_at_the_start(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {each: f"wrong_processors:{each.title()}" for each in ("nameless", "one", "other")}
    groups = {"baton.logits_processors": {**named, "json": "json:loads"}}
    monkeypatch.syspath_prepend(str(written_package(tmp_path, "wrong_processors", WRONG, groups)))
    where = "wrong-processors 1.0 (other = wrong_processors:Other)"
    for names, why in [
        (["nosuch"], "no installed package brings it; there are: json, nameless, one, other"),
        (["json"], "wrong-processors 1.0 (json = json:loads): a subclass of LogitsProcessor is expected"),
        (["nameless"], "extra_args: the names that it reads of vllm_xargs are expected"),
        (["one", "other"], f"{where}: extra_args: two, one: one reads one of these, too"),
    ]:
        with pytest.raises(PluginError) as refused:
            load_processors(names)
        assert why in str(refused.value)
    with pytest.raises(PluginError) as unmade:
        tiny_backend(tiny.path, processors=load_processors(["other"]))
    assert str(unmade.value) == f"{where}: OSError('no file')"
