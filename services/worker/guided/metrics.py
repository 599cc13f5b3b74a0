"""What guided decoding counts."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

COMPILED = Counter("baton_worker_grammars_total", "Grammars by what became of them.", ["outcome"])
COMPILE_SECONDS = Histogram(
    "baton_worker_grammar_compile_seconds",
    "What compiling a grammar took.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0),
)
MASK_SECONDS = Counter("baton_worker_grammar_mask_seconds_total", "Time spent on filling grammars' masks.")
MASKS = Counter("baton_worker_grammar_masks_total", "Masks filled, one for each sequence and token.")
DEAD_ENDS = Counter(
    "baton_worker_grammar_dead_ends_total", "Sequences ended because nothing that fits their grammar could follow."
)
BROKEN = Counter(
    "baton_worker_grammar_broken_total", "Sequences that hold a token which their grammar does not allow: a bug."
)
