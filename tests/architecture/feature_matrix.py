"""Which features are tested together: read from the tests' own marks, written as docs/features.md.

    @pytest.mark.features("guided", "speculative")                   covers every pair of what it names
    @pytest.mark.features("beam search", "guided", refused=True)     the combination is a clear error
    @pytest.mark.refuses("latent attention", "--kv-cache-dtype fp8") settings that are an error with a kind of model

`python -m tests.architecture.feature_matrix` prints the page; a test compares it with the one in docs/.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import TESTS

PAGE = TESTS.parent / "docs" / "features.md"
FEATURES = (
    "guided",
    "speculative",
    "prefix cache",
    "chunked prefill",
    "tensor parallel",
    "pipeline parallel",
    "prefill/decode",
    "re-dispatch",
    "preemption",
    "n > 1",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "tool calls",
    "KV connector",
    "pooling",
    "federation",
    "LoRA",
    "quantization",
    "hybrid KV cache",
    "logits processors",
    "states",
    "prompt embeds",
    "images",
    "encoder-decoder",
    "expert parallel",
    "data parallel",
    "sequence parallel",
    "context parallel",
)
UNTESTED: tuple[tuple[str, str], ...] = ()
"""Pairs that no test runs yet, each a debt. What is new is tested, or stands here."""
IMPOSSIBLE = {("states", "encoder-decoder"): "no model with an encoder of prompts has a decoder with states"}
"""Pairs that no model can have, and why."""
HEADING = """\
# Features together

What a test runs together (✓, its name below), what is refused with a clear error (✗), what no test runs together (·),
what there cannot be (–).
Written by `python -m tests.architecture.feature_matrix > docs/features.md` from the tests' marks; a test keeps it true.

"""
REFUSALS = """\
## Settings that a kind of model refuses

An error at start that names the setting and says why.

| model | settings | test |
|---|---|---|
"""


class Marked(NamedTuple):
    """A test and the features that it runs together."""

    test: str
    features: frozenset[str]
    refused: bool


class Refusal(NamedTuple):
    """A kind of model, and settings that are an error at start with it."""

    model: str
    settings: tuple[str, ...]
    test: str


class Marks(NamedTuple):
    """What all tests are marked with, by name."""

    features: list[Marked]
    refusals: list[Refusal]


@cache
def marks() -> Marks:
    """Raises ValueError for a feature that is not in the list."""
    found = Marks([], [])
    for file in sorted(TESTS.rglob("test_*.py")):
        for test, mark, names, keywords in _marks_in(file):
            if mark == "refuses":
                found.refusals.append(Refusal(names[0], names[1:], test))
            elif unknown := set(names) - set(FEATURES):
                raise ValueError(f"{test}: {sorted(unknown)} are no features")
            else:
                found.features.append(Marked(test, frozenset(names), bool(keywords.get("refused"))))
    return Marks(sorted(found.features), sorted(found.refusals))


def _marks_in(file: Path) -> Iterator[tuple[str, str, tuple[str, ...], dict[str, object]]]:
    """A test, one of its marks of the two kinds, and that mark's arguments."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            mark = ast.unparse(decorator.func) if isinstance(decorator, ast.Call) else ""
            if isinstance(decorator, ast.Call) and mark in ("pytest.mark.features", "pytest.mark.refuses"):
                names = tuple(ast.literal_eval(each) for each in decorator.args)
                keywords = {str(each.arg): ast.literal_eval(each.value) for each in decorator.keywords}
                yield f"{file.relative_to(TESTS.parent)}::{node.name}", mark.rpartition(".")[2], names, keywords


def cell(one: str, other: str, tests: list[Marked]) -> str:
    """How the two stand to each other."""
    if (one, other) in IMPOSSIBLE or (other, one) in IMPOSSIBLE:
        return "–"
    both = [marked for marked in tests if {one, other} <= marked.features]
    if any(marked.refused for marked in both):
        return "✗"
    return "✓" if both else "·"


def page() -> str:
    """The whole document."""
    tests, refusals = marks()
    lines = ["| |" + "|".join(FEATURES[:-1]) + "|", "|---|" + ":-:|" * (len(FEATURES) - 1)]
    for row, one in enumerate(FEATURES[1:], start=1):
        cells = [cell(one, other, tests) if column < row else "" for column, other in enumerate(FEATURES[:-1])]
        lines.append(f"|**{one}**|" + "|".join(cells) + "|")
    listed = [
        f"- `{marked.test}`: {', '.join(name for name in FEATURES if name in marked.features)}"
        + (" (refused)" if marked.refused else "")
        for marked in tests
    ]
    impossible = [f"- {' and '.join(pair)}: {why}" for pair, why in IMPOSSIBLE.items()]
    refused = [f"| {each.model} | `{'`, `'.join(each.settings)}` | `{each.test}` |" for each in refusals]
    sections = (
        HEADING + "\n".join(lines),
        "## What there cannot be\n\n" + "\n".join(impossible),
        REFUSALS + "\n".join(refused),
        "## Tests\n\n" + "\n".join(listed),
    )
    return "\n\n".join(sections) + "\n"


def untested() -> list[tuple[str, str]]:
    """Pairs with neither a test nor a refusal."""
    tests = marks().features
    return [pair for pair in combinations(FEATURES, 2) if cell(*pair, tests) == "·"]


if __name__ == "__main__":
    print(page(), end="")
