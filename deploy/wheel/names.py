"""What `baton` is in a wheel: a small module on top, and our packages below it. The standard library only."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

TOP = "baton"
PACKAGES = ("deploy", "kvstore", "services", "shared")
LIBRARY = "services.offline"
"""What `from baton import …` gives, by its `__all__`."""
REPOSITORY = Path(__file__).parents[2]

INIT = '''"""Large language models as small actors. `from baton import LLM, SamplingParams`: a model in this process."""

from importlib import import_module

__all__ = {names}


def __getattr__(name: str) -> object:
    """Imports the engine when one of its names is first used: `baton` is above every service, too."""
    if name not in __all__:
        raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
    return getattr(import_module("{library}"), name)


def __dir__() -> list[str]:
    """The names of the engine, and the module's own."""
    return sorted([*globals(), *__all__])
'''
"""Template of `baton/__init__.py` in the wheel."""
_BEGINNING = re.compile(r"(services|deploy)\.[\w.]*")


def library_package(library: str) -> dict[str, bytes]:
    """The files of `baton` itself, which hands on the names of `library`. There are none where the repository has no
    such package, as in the images that install requirements only."""
    init = REPOSITORY / LIBRARY.replace(".", "/") / "__init__.py"
    if not init.is_file():
        return {}
    names = next(
        ast.literal_eval(node.value)
        for node in ast.parse(init.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {f"{TOP}/__init__.py": INIT.format(names=names, library=library).encode()}


def renamed(source: str, modules: Collection[str]) -> str:
    """`source` with the prefix before each of our modules that it imports, or names in a string: alone, as in
    `"services.worker"`, or as the beginning of an f-string, as in `f"services.{name}"`.

    Raises ValueError for `import services.worker`, which would bind another name then; `from` and `as` do not.
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    encoded = source.encode()
    for line_number, column in sorted(set(_places(ast.parse(source), encoded, starts, modules)), reverse=True):
        at = starts[line_number - 1] + column
        encoded = encoded[:at] + f"{TOP}.".encode() + encoded[at:]
    return encoded.decode()


def _places(tree: ast.Module, source: bytes, starts: list[int], modules: Collection[str]) -> Iterator[tuple[int, int]]:
    """Line and column, in bytes, where the prefix belongs."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), level=0) if _is_ours(module):
                yield node.lineno, node.col_offset + len("from ")
            case ast.Import(names=aliases):
                for alias in aliases:
                    if _is_ours(alias.name):
                        if alias.asname is None:
                            raise ValueError(f"line {node.lineno}: import {alias.name}: write it with from or as")
                        yield alias.lineno, alias.col_offset
            case ast.Constant(value=str(text)) if "." in text and text in modules:
                yield from _literal(node, text, source, starts)
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if _BEGINNING.fullmatch(text):
                yield from _literal(node, text, source, starts)


def _literal(node: ast.expr, text: str, source: bytes, starts: list[int]) -> Iterator[tuple[int, int]]:
    """Where the text of a string begins, behind its quotes."""
    start = starts[node.lineno - 1]
    found = source.find(text.encode(), start + node.col_offset)
    if 0 <= found <= start + node.col_offset + len('f"""'):
        yield node.lineno, found - start


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES
