"""From a grammar to what a matcher runs on. Slow and without bounds: belongs in a process of its own."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from services.worker.guided.automaton import CompiledGrammar, GrammarBackend
from services.worker.guided.limits import GrammarBackendName
from services.worker.guided.llguidance_backend import LLGuidanceBackend
from services.worker.guided.matcher import TokenPieces
from services.worker.guided.schema.keywords import GrammarRefused
from services.worker.guided.vocabulary import TokenBytes, never_second, token_bytes
from services.worker.guided.xgrammar_backend import XGrammarBackend
from services.worker.sampling.token_bits import mask_bits
from shared.messages.generation import Grammar

_BACKENDS: dict[GrammarBackendName, tuple[type[XGrammarBackend | LLGuidanceBackend], ...]] = {
    "xgrammar": (XGrammarBackend,),
    "llguidance": (LLGuidanceBackend,),
    "auto": (XGrammarBackend, LLGuidanceBackend),
}


class GrammarCompiler:
    """Owns the vocabulary as grammars see it, read when it is first needed. Any thread may use it."""

    def __init__(
        self, folder: Path | str, vocab_size: int, stops: tuple[int, ...], backend: GrammarBackendName = "auto"
    ) -> None:
        """`stops` end a sequence; ids of `vocab_size` and above never do."""
        self._folder = Path(folder)
        self.vocab_size = vocab_size
        self.stops = tuple(token for token in stops if token < vocab_size)
        self._backend = backend
        self._loading = Lock()
        self._spelling: TokenPieces | None = None
        self._backends: tuple[GrammarBackend, ...] = ()
        """Those that are asked, one behind the other."""

    def load(self) -> None:
        """Reads the vocabulary, as `compile` would when it is first called. Raises GrammarRefused."""
        for backend in self._read():
            backend.load()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """What matchers of `grammar` run on. Takes milliseconds to seconds. Raises GrammarRefused."""
        first, *others = self._read()
        try:
            return first.compile(grammar)
        except GrammarRefused as refused:
            if "bad_alloc" in str(refused):  # there is no memory for another
                raise
            for backend in others:
                try:
                    return backend.compile(grammar)
                except GrammarRefused as also:
                    raise GrammarRefused(f"{refused} (llguidance: {also})") from None
            raise

    def spelling(self) -> TokenPieces:
        """The bytes of each token, special ones as they are written. Raises GrammarRefused."""
        self._read()
        assert self._spelling is not None, "read with the back ends"
        return self._spelling

    def _read(self) -> tuple[GrammarBackend, ...]:
        with self._loading:
            if not self._backends:
                tokens = token_bytes(self._folder, self.vocab_size)
                self._spelling = _spelling(tokens, self.vocab_size)
                makers = _BACKENDS[self._backend]
                self._backends = tuple(make(tokens, self.vocab_size, self.stops) for make in makers)
            return self._backends


def _spelling(tokens: TokenBytes, vocab_size: int) -> TokenPieces:
    barred = {lead: ~mask_bits(second, vocab_size) for lead, second in never_second(tokens.spelled).items()}

    def encode(text: str) -> list[int]:
        return list(tokens.tokenizer.encode(text, add_special_tokens=False).ids)

    return TokenPieces(tokens.spelled, barred, encode)
