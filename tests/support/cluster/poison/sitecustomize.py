"""On the PYTHONPATH of a stack under test: a rank that computes the tokens $POISON_TOKENS dies, and so does a tokenizer
that is given the text $POISON_TEXT. Each death adds a line to the file $POISON_DEATHS.

Python imports this at its start, long before the classes exist; a finder wraps them when they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.support.imported_modules import change_when_imported


def die(service: str) -> None:
    with open(os.environ["POISON_DEATHS"], "a") as deaths:
        deaths.write(f"{service}\n")
    os._exit(139)


def poison_rank(module: Any) -> None:
    forward, poison = module.NativeDecoder.forward, [int(token) for token in os.environ["POISON_TOKENS"].split()]

    def poisoned(self: Any, ids: Any, *arguments: Any, **keywords: Any) -> Any:
        tokens = ids.tolist()
        if any(tokens[i : i + len(poison)] == poison for i in range(len(tokens))):
            die("rank")
        return forward(self, ids, *arguments, **keywords)

    module.NativeDecoder.forward = poisoned


def poison_tokenizer(module: Any) -> None:
    route = module.PromptEncoder.route

    def poisoned(self: Any, message: Any, prompt: Any) -> Any:
        if os.environ["POISON_TEXT"] in getattr(prompt, "text", ""):
            die("tokenizer")
        return route(self, message, prompt)

    module.PromptEncoder.route = poisoned


POISONED: dict[str, Callable[[Any], None]] = {
    "services.worker.models.native_decoder": poison_rank,
    "services.tokenizer.core.encoder": poison_tokenizer,
}


if "POISON_DEATHS" in os.environ:
    change_when_imported(POISONED)
