"""Modules of `transformers` that ask for torchvision as they are imported, though what is compared of them does not."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def import_without_torchvision(name: str) -> Any:
    """The module `name`, whose functions of torchvision's are None."""
    before = {each: sys.modules.get(each) for each in _NAMES}
    for each in _NAMES:
        module = ModuleType(each)
        module.functional = None  # type: ignore[attr-defined]
        sys.modules[each] = module
    try:
        return import_module(name)
    finally:
        for each, module in before.items():
            if module is None:
                del sys.modules[each]
            else:
                sys.modules[each] = module
