"""On the PYTHONPATH of a stack under test: while the file $GARBAGE_WHEN_THERE is there, one rank computes garbage.

The file names the process to do so by its pid, and what its logits become: "PID zero" has token 0 win for ever, "PID
nan" makes them NaN, "PID prompts" only in steps with prompts and without a canary's. Python imports this at its start,
long before the model's classes exist; a finder wraps them when they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

DECODER = "services.worker.models.native_decoder"


def wanted() -> str | None:
    try:
        pid, what = Path(os.environ["GARBAGE_WHEN_THERE"]).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return what if int(pid) == os.getpid() else None


def has_canary(tokens: list[int], vocabulary: int) -> bool:
    from services.scheduler.core.health.canary import PROMPT_STRIDE

    begin = [PROMPT_STRIDE % vocabulary, 2 * PROMPT_STRIDE % vocabulary]
    return any(tokens[at : at + 2] == begin for at in range(len(tokens)))


def spoilt(forward: Any) -> Any:
    def spoiling(*arguments: Any, **keywords: Any) -> Any:
        logits = forward(*arguments, **keywords)
        what = wanted()
        if what is None or logits is None:
            return logits
        if what == "prompts" and (len(arguments[1]) == 1 or has_canary(arguments[1].tolist(), logits.shape[1])):
            return logits
        if what in ("nan", "prompts"):
            return logits * float("nan")
        logits = logits.clone()
        logits[:, 0] = 1e4
        return logits

    return spoiling


class SpoilingDecoder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != DECODER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            decoder: Any = module.NativeDecoder  # type: ignore[attr-defined]
            decoder.forward = spoilt(decoder.forward)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "GARBAGE_WHEN_THERE" in os.environ:
    sys.meta_path.insert(0, SpoilingDecoder())
