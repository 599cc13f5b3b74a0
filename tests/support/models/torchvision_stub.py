"""Modules of `transformers` that ask for torchvision as they are imported, though what is compared of them does not."""

from __future__ import annotations

import builtins
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def import_without_torchvision(name: str) -> Any:
    """The module `name`, which finds no function of torchvision."""
    before = {each: sys.modules.get(each) for each in _NAMES}
    for each in _NAMES:
        module = ModuleType(each)
        module.functional = SimpleNamespace(InterpolationMode=None)  # type: ignore[attr-defined]
        sys.modules[each] = module
    vars(builtins)["tvF"] = SimpleNamespace(InterpolationMode=None)  # of annotations, where nothing was imported so
    try:
        return import_module(name)
    finally:
        del vars(builtins)["tvF"]
        for each, module in before.items():
            if module is None:
                del sys.modules[each]
            else:
                sys.modules[each] = module
