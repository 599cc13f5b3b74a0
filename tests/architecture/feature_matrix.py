"""Which features are tested together: read from the tests' own marks, written as docs/features.md.

    @pytest.mark.features("guided", "speculative")                   covers every pair of what it names
    @pytest.mark.features("beam search", "guided", refused=True)     the combination is a clear error

`python -m tests.architecture.feature_matrix` prints the page; a test compares it with the one in docs/.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
)
UNTESTED = tuple(
    tuple(sorted((one, other), key=FEATURES.index))
    for one, others in {
        "images": ("KV connector", "federation", "data parallel"),
        "encoder-decoder": ("federation", "states"),
    }.items()
    for other in others
)
"""Pairs that no test runs yet, each a debt. What is new is tested, or stands here."""
HEADING = """\
# Features together

What a test runs together (✓, its name below), what is refused with a clear error (✗), what no test runs together (·).
Written by `python -m tests.architecture.feature_matrix > docs/features.md` from the tests' marks; a test keeps it true.

"""


class Marked(NamedTuple):
    """A test and the features that it runs together."""

    test: str
    features: frozenset[str]
    refused: bool


def marked_tests() -> list[Marked]:
    """Every test with the mark, by name. Raises ValueError for a feature that is not in the list."""
    files = sorted(TESTS.rglob("test_*.py"))
    return sorted(marked for file in files for marked in _marked_in(file))


def _marked_in(file: Path) -> Iterator[Marked]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.features":
                named = frozenset(ast.literal_eval(each) for each in decorator.args)
                if unknown := named - set(FEATURES):
                    raise ValueError(f"{file.name}::{node.name}: {sorted(unknown)} are no features")
                refused = any(k.arg == "refused" and ast.literal_eval(k.value) for k in decorator.keywords)
                yield Marked(f"{file.relative_to(TESTS.parent)}::{node.name}", named, refused)


def cell(one: str, other: str, tests: list[Marked]) -> str:
    """How the two stand to each other."""
    both = [marked for marked in tests if {one, other} <= marked.features]
    if any(marked.refused for marked in both):
        return "✗"
    return "✓" if both else "·"


def page() -> str:
    """The whole document."""
    tests = marked_tests()
    lines = ["| |" + "|".join(FEATURES[:-1]) + "|", "|---|" + ":-:|" * (len(FEATURES) - 1)]
    for row, one in enumerate(FEATURES[1:], start=1):
        cells = [cell(one, other, tests) if column < row else "" for column, other in enumerate(FEATURES[:-1])]
        lines.append(f"|**{one}**|" + "|".join(cells) + "|")
    listed = [
        f"- `{marked.test}`: {', '.join(name for name in FEATURES if name in marked.features)}"
        + (" (refused)" if marked.refused else "")
        for marked in tests
    ]
    return HEADING + "\n".join(lines) + "\n\n## Tests\n\n" + "\n".join(listed) + "\n"


def untested() -> list[tuple[str, str]]:
    """Pairs with neither a test nor a refusal."""
    tests = marked_tests()
    return [pair for pair in combinations(FEATURES, 2) if cell(*pair, tests) == "·"]


if __name__ == "__main__":
    print(page(), end="")
