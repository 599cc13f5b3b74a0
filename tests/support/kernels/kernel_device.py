"""Where tests run Triton's kernels: on the GPU where there is one, else in the interpreter, on tensors of the CPU.

The interpreter spends half its time on what changes nothing; importing this module leaves that out."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _quicken_interpreter() -> None:
    """Patches Triton's language once a launch instead of once more at each call of a function in it, and computes no
    overflows, which nothing looks at unless it debugs. These are Triton's own names: without them tests take longer."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("GridExecutor", "_patch_lang", "interpreter_builder")):
        return

    patched: set[str] = set()

    class Launch(interpreter.GridExecutor):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            patched.clear()
            try:
                super().__call__(*args, **kwargs)
            finally:
                patched.clear()

    patch = interpreter._patch_lang

    def patch_once(function: FunctionType) -> Any:
        names = {each.__name__ for each in function.__globals__.values() if each is tl or each is tl.core}
        if names and names <= patched:
            return None  # nobody restores the scope of a function that a kernel calls
        scope = patch(function)
        patched.update(names)
        return scope

    builder = interpreter.interpreter_builder
    interpreter.GridExecutor, interpreter._patch_lang = Launch, patch_once
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


if DEVICE.type == "cpu" and sys.platform == "linux":
    _quicken_interpreter()
