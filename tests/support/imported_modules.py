"""What a `sitecustomize` needs, which Python imports at its start: to change other modules when they are imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ChangingFinder(importlib.abc.MetaPathFinder):
    """Calls each of `changes`, by the name of a module, once with that module, behind its execution."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        change = self._changes.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def change_when_imported(changes: dict[str, Callable[[Any], None]]) -> None:
    """Has modules changed, by their names, when this process imports them; at once where it has."""
    there = {name: sys.modules[name] for name in changes if name in sys.modules}
    for name, module in there.items():
        changes[name](module)
    sys.meta_path.insert(0, ChangingFinder({name: each for name, each in changes.items() if name not in there}))
