"""On the PYTHONPATH of a stack under test: while the file $CHANGEOVER_STRIKE is there, the next rank that changes a
layer's experts takes it away, and is killed when it has its new experts and has not said which they are.

Python imports this at its start, long before the class exists; a finder wraps it when it is imported.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "services.worker.models.expert_parallel.local_experts"


def strike(module: Any) -> None:
    """Experts are replaced by an assignment to `packed` and one to `local`: in between them whoever strikes dies."""
    experts = module.RankExperts
    packed = experts.packed

    def replaced(self: Any, value: Any) -> None:
        changed = hasattr(self, "local")  # not while it is made
        packed.__set__(self, value)
        if changed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.environ["CHANGEOVER_STRIKE"])
                os.kill(os.getpid(), signal.SIGKILL)

    experts.packed = property(packed.__get__, replaced)


class ChangeoverFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            strike(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "CHANGEOVER_STRIKE" in os.environ:
    sys.meta_path.insert(0, ChangeoverFinder())
