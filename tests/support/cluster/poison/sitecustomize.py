"""On the PYTHONPATH of a stack under test: a rank that computes the tokens $POISON_TOKENS dies, and so does a tokenizer
that is given the text $POISON_TEXT. Each death adds a line to the file $POISON_DEATHS.

Python imports this at its start, long before the classes exist; a finder wraps them when they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


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


class PoisonFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in POISONED:
            return None
        poison = POISONED.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            poison(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "POISON_DEATHS" in os.environ:
    sys.meta_path.insert(0, PoisonFinder())
