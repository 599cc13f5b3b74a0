"""On the PYTHONPATH of a stack under test: a rank's device hangs once when the file $HANG_WHEN_THERE is there.

Python imports this at its start, long before the model's classes exist; a finder wraps them when they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DECODER = "services.worker.models.native_decoder"


def hang_when_there(forward: Any) -> Any:
    def hanging(*arguments: Any, **keywords: Any) -> Any:
        try:
            os.unlink(os.environ["HANG_WHEN_THERE"])
        except FileNotFoundError:
            return forward(*arguments, **keywords)
        while True:
            time.sleep(3600)

    return hanging


class HangingDecoder(importlib.abc.MetaPathFinder):
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
            decoder.forward = hang_when_there(decoder.forward)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "HANG_WHEN_THERE" in os.environ:
    sys.meta_path.insert(0, HangingDecoder())
