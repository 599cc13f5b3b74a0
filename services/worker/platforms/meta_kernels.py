"""PyTorch without what it knows of tensors on no device ("meta"), until somebody asks for that. Imports no torch.

The last thing that `import torch` does is `torch._meta_registrations`: the shapes of results, in Python, for compilers.
They take a fifth of the import's processor time and 18 MiB. Ranks compile nothing, and what they do with tensors that
have no elements (`checkpoint.NOWHERE`) PyTorch's C++ knows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torch._meta_registrations"
_COMPILER = "torch._dynamo"


class _Deferred(ModuleType):
    """Has the module's place, and imports it once anything of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any module
            raise AttributeError(name)
        import_meta_kernels()
        return getattr(sys.modules[_MODULE], name)


class _Deferring(Loader):
    """Makes the module that has the place, once the rest of PyTorch is there."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does what of the import is not for compilers: until this is said no `torch.Generator` can be made."""
        import torch
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)


class _BeforeCompiling(MetaPathFinder):
    """Finds what is deferred, and notices that PyTorch's compiler is about to be imported."""

    defers = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _MODULE and self.defers:
            return ModuleSpec(_MODULE, _Deferring())
        if fullname == _COMPILER:
            import_meta_kernels()
        return None


_finder = _BeforeCompiling()


def defer_meta_kernels() -> None:
    """From now on `import torch` leaves them out; does nothing where it was imported already. For processes of ours."""
    if "torch" not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def import_meta_kernels() -> None:
    """Makes PyTorch whole, for code that is not ours. Does nothing where it is."""
    _finder.defers = False
    if isinstance(sys.modules.get(_MODULE), _Deferred):
        del sys.modules[_MODULE]
        import_module(_MODULE)
