"""Grammars in processes of their own: what is beyond a limit ends by itself, and nothing else notices."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from services.worker.guided.guided_sequences import GuidedSequences
from services.worker.guided.library import QUICK_AT_ONCE, CompileResult, GrammarLibrary
from services.worker.guided.limits import GrammarLimits
from services.worker.sampling.masks import TokenMask
from shared.ids import SequenceId
from shared.messages.generation import Grammar, SamplingOptions
from shared.messages.scheduler import SequenceFailed
from shared.messages.worker import NewSequence
from shared.packing import pack
from tests.support.paths import REPOSITORY
from tests.support.worker.compiled_grammars import DEADLINE, compile_now, grammar_library, outcomes
from tests.support.worker.guided_documents import RandomWriter

LIMITS = GrammarLimits(compile_seconds=1.0, step_seconds=0.01)
DIGITS = Grammar("regex", "[0-9]{3,}")
ENDLESS_JUMP = Grammar("regex", "((a{1000}){1000}){1000}")
AMBIGUOUS = Grammar("grammar", 'root ::= root root | root root root | "a"')
NESTED = Grammar("regex", "(" * 11 + "a" + "+)" * 11)


def slow_schema(salt: int = 0, properties: int = 7200) -> Grammar:
    """270 kB, of which xgrammar makes ten seconds: the time grows with the square of the properties."""
    names = {f"property{salt}x{number}": {"type": "string"} for number in range(properties)}
    return Grammar("json", json.dumps({"type": "object", "properties": names}))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> RandomWriter:
    return RandomWriter(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def library(writer: RandomWriter) -> Iterator[GrammarLibrary]:
    with grammar_library(writer.folder, writer.vocab_size, (writer.eos,), LIMITS) as library:
        yield library


@pytest.fixture(scope="module")
def byte(writer: RandomWriter) -> dict[bytes, int]:
    pieces = writer.compiler.spelling().pieces
    return {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}


class Guided:
    """Sequences as a rank has them, one token a step."""

    def __init__(self, library: GrammarLibrary, writer: RandomWriter) -> None:
        self.sequences = GuidedSequences(library)
        self._library = library
        self._eos = writer.eos

    def add(self, slot: int, grammar: Grammar | None) -> None:
        ref = None if grammar is None else compile_now(self._library, grammar)
        new = NewSequence(
            sequence=SequenceId(slot),
            tokens=pack([1]),
            prompt_length=1,
            computed=0,
            blocks=b"",
            sampling=SamplingOptions(seed=0),
            stop_token_ids=(self._eos,),
            grammar=ref,
        )
        if ref is not None:
            self.sequences.add(slot, new, ref)

    def mask(self, *slots: int) -> TokenMask | None:
        none = np.zeros(len(slots), dtype=np.int32)
        self.sequences.request_masks(np.array(slots), none, np.zeros((len(slots), 0), dtype=np.int32))
        return self.sequences.masks()

    def draw(self, drawn: dict[int, int]) -> None:
        tokens = np.array([[token] for token in drawn.values()], dtype=np.int32)
        self.sequences.accept(np.array(list(drawn)), np.ones(len(drawn), dtype=np.int32), tokens)


@pytest.fixture
def guided(library: GrammarLibrary, writer: RandomWriter) -> Iterator[Guided]:
    guided = Guided(library, writer)
    yield guided
    guided.sequences.clear()


def test_whoever_asks_hears_whether_a_grammar_compiles(library: GrammarLibrary) -> None:
    bad, behind = Grammar("regex", "a(b"), Grammar("regex", "[0-9]{3,}", after="</think>")
    found = outcomes(library, DIGITS, bad, behind)
    assert {outcome.grammar for outcome in found if outcome.error is None} == {DIGITS.key}
    (refused,) = (outcome for outcome in found if outcome.error is not None)
    assert refused.grammar == bad.key
    assert "(llguidance: " in (refused.error or ""), "what each of the two libraries says"
    assert behind.key == DIGITS.key
    assert outcomes(library, DIGITS) == [CompileResult(DIGITS.key, None)]


def test_a_grammar_fills_no_log(writer: RandomWriter, capfd: pytest.CaptureFixture[str]) -> None:
    with grammar_library(writer.folder, writer.vocab_size, (writer.eos,), LIMITS) as library:
        assert [each.error for each in outcomes(library, Grammar("regex", "a" + "^" * 1000))] == [None]
    assert capfd.readouterr().err == ""


def test_slots_without_a_grammar_have_no_mask(guided: Guided) -> None:
    guided.add(0, None)
    assert guided.mask(0, 1) is None
    guided.add(1, DIGITS)
    mask = guided.mask(0, 1)
    assert mask is not None
    assert mask.rows.tolist() == [1]
    guided.sequences.release(1)
    assert guided.mask(0, 1) is None


def test_a_grammar_that_takes_too_long_to_compile_is_refused_by_the_name_of_the_limit(library: GrammarLibrary) -> None:
    (outcome,) = outcomes(library, slow_schema())
    assert outcome.fault == "refused"
    assert "1 s of processor time (limit grammar_compile_s)" in (outcome.error or "")


def test_a_jump_ahead_without_an_end_is_refused_before_anything_follows_the_grammar(library: GrammarLibrary) -> None:
    (outcome,) = outcomes(library, ENDLESS_JUMP)
    assert outcome.fault == "refused"
    assert "limit grammar_step_ms" in (outcome.error or "") or "limit grammar_memory" in (outcome.error or "")


def test_slow_schemas_keep_nobody_else_waiting(writer: RandomWriter) -> None:
    quick = Grammar("regex", "quick{2}")
    patient = GrammarLimits(compile_seconds=60.0)
    slow: list[CompileResult] = []
    with grammar_library(writer.folder, writer.vocab_size, (writer.eos,), patient) as library:
        for salt in range(QUICK_AT_ONCE):  # 50 s each, for a busy machine; more would only take more cores
            library.request(slow_schema(salt, 16_000), slow.append)
        assert outcomes(library, quick) == [CompileResult(quick.key, None)]
        assert slow == [], "all of them take longer"


@pytest.mark.parametrize("grammar", [AMBIGUOUS, NESTED], ids=["ambiguous", "nested"])
def test_a_sequence_whose_grammar_gets_slow_fails_and_the_others_go_on(
    guided: Guided, byte: dict[bytes, int], grammar: Grammar
) -> None:
    guided.add(0, DIGITS)
    guided.add(1, grammar)
    failed: tuple[SequenceFailed, ...] = ()
    for _ in range(400):
        mask = guided.mask(0, 1)
        failed = guided.sequences.take_failed()
        assert mask is not None
        guided.draw({0: byte[b"7"], 1: byte[b"a"]})
        if failed:
            break
    assert [(each.sequence, each.fault) for each in failed] == [(SequenceId(1), "refused")]
    assert "limit grammar_step_ms" in failed[0].error
    mask = guided.mask(0, 1)
    assert mask is not None
    assert mask.rows.tolist() == [0]
    assert guided.sequences.take_failed() == ()


def processes_of_this() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or is not yet waited for
            if "fork_server" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_servers_do_without_pytorch(library: GrammarLibrary) -> None:
    """Which xgrammar would import, with `transformers`: most of the time and the memory that a server took."""
    compile_now(library, DIGITS)
    files = [{Path(each.path).name for each in process.memory_maps()} for process in processes_of_this()]
    assert files
    for names in files:
        assert {name for name in names if "xgrammar" in name}
        assert not {name for name in names if "torch" in name}


@pytest.mark.parametrize("before", ["", "import transformers; "])
def test_xgrammar_finds_pytorch_where_it_uses_it_or_others_do(tmp_path: Path, before: str) -> None:
    """A release of it, and libraries, that are made up."""
    files = {"torch": "__version__ = 'real'", "transformers": "", "tvm_ffi": ""}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "xgrammar").mkdir()
    (tmp_path / "xgrammar/__init__.py").write_text("import transformers\nfrom . import part")
    (tmp_path / "xgrammar/part.py").write_text("import torch\nfound = torch.__version__")
    program = (
        f"{before}from services.worker.guided.xgrammar_backend import _load_xgrammar; _load_xgrammar(); "
        "import sys, xgrammar; print(xgrammar.part.found, xgrammar.transformers is sys.modules['transformers'])"
    )
    path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    said = subprocess.check_output([sys.executable, "-c", program], env={"PYTHONPATH": path}, text=True, timeout=60)
    assert said.split() == ["real", "True"]


def test_a_process_that_is_killed_loses_its_sequences_and_nobody_elses(guided: Guided) -> None:
    other = Grammar("regex", "[a-f]{2}")
    guided.add(0, other)
    before = {process.pid for process in processes_of_this()}
    victim = Grammar("regex", "[g-k]{2}")
    guided.add(1, victim)
    (pid,) = {process.pid for process in processes_of_this()} - before
    os.kill(pid, signal.SIGKILL)
    mask = guided.mask(0, 1)
    assert mask is not None
    assert mask.rows.tolist() == [0]
    assert [(each.sequence, each.fault) for each in guided.sequences.take_failed()] == [(SequenceId(1), "died")]
    guided.add(2, victim)
    again = guided.mask(0, 2)
    assert again is not None
    assert again.rows.tolist() == [0, 1], "it was compiled once more"


def test_a_forgotten_grammar_has_no_process(library: GrammarLibrary, guided: Guided) -> None:
    grammar = Grammar("regex", "forget me")
    compile_now(library, grammar)
    count = len(processes_of_this())
    library.forget([grammar.key])
    outcomes(library, Grammar("regex", "("))  # behind it
    assert library.process(grammar.key) is None
    deadline = time.monotonic() + DEADLINE
    while len(processes_of_this()) >= count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(processes_of_this()) < count
