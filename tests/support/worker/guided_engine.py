"""A backend that follows grammars, and a driver that stops where a stop token was drawn, as a scheduler does."""

from __future__ import annotations

from pathlib import Path

from services.worker.executor.host_runner import HostRunner
from services.worker.guided.limits import GrammarBackendName
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import GrammarKey
from shared.messages.generation import Grammar, SamplingOptions
from shared.messages.worker import StepPlan
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.models.tiny_tokenizers import byte_level, write_model
from tests.support.worker.compiled_grammars import compile_now, compiler_of
from tests.support.worker.guided_documents import EOS
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

AT_ONCE = 48


def tiny_model(folder: Path) -> Path:
    """Random weights over a byte-level vocabulary."""
    return spelling_model(folder).path


def spelling_model(folder: Path) -> TinyModel:
    """See `tiny_model`."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    model = make_model("llama", folder, vocab_size=size, eos_token_id=tokenizer.token_to_id(EOS))
    config = (model.path / "config.json").read_text()
    write_model(model.path, tokenizer)
    (model.path / "config.json").write_text(config)
    return model


def guided_backend(
    path: Path, speculation: SpeculationSettings | None = None, grammar_backend: GrammarBackendName = "auto"
) -> HostRunner:
    return tiny_backend(
        path,
        dtype="float32",
        kv_memory_bytes=64 << 20,
        max_num_seqs=AT_ONCE,
        max_batch_tokens=1024,
        speculation=speculation,
        grammar_backend=grammar_backend,
    )


class StoppingDriver(Driver):
    """Ends a sequence at its first stop token, which stays."""

    def _take(self, plan: StepPlan) -> None:
        super()._take(plan)
        for sequence in self.sequences.values():
            stop = next((i for i, token in enumerate(sequence.output) if token in sequence.stop_token_ids), None)
            if stop is not None:
                sequence.wanted = stop + 1
                del sequence.tokens[sequence.prompt_length + stop + 1 :]
                sequence.computed = min(sequence.computed, len(sequence.tokens))


class GuidedEngine:
    """Writes under grammars with a backend."""

    def __init__(self, backend: HostRunner, *, speculate: int = 0) -> None:
        self.backend = backend
        self.drafted = 0
        self.stops = backend.card.eos_token_ids
        self.driver = StoppingDriver(backend, speculate=speculate, epoch=1)
        assert backend.grammars is not None
        self.library = backend.grammars
        self.compiler = compiler_of(self.library.settings)
        self._pieces = self.compiler.spelling().pieces
        self._used: set[GrammarKey] = set()

    def add(
        self,
        prompt: list[int],
        grammar: Grammar | None,
        sampling: SamplingOptions,
        most: int = 100,
        min_tokens: int = 0,
        output: list[int] | None = None,
    ) -> Sequence:
        """Raises GrammarRefused."""
        if grammar is not None:
            self._used.add(compile_now(self.library, grammar).key)
        return self.driver.add(
            [*prompt, *(output or [])],
            most,
            sampling=sampling,
            prompt_length=len(prompt),
            min_tokens=min_tokens,
            stop_token_ids=self.stops,
            grammar=grammar,
        )

    def run(self) -> None:
        self.driver.run()
        self.drafted += self.driver.drafted
        self.backend.reset()
        self.library.forget(self._used)
        self._used.clear()
        self.driver = StoppingDriver(self.backend, speculate=self.driver.speculate, epoch=1)

    def text(self, sequence: Sequence) -> str | None:
        """What it put out; None where it was cut."""
        if sequence.output[-1] not in self.stops:
            return None
        return b"".join(self._pieces[token] for token in sequence.output[:-1]).decode()
