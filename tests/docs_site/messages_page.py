"""Every subject with its message types, and every message with its fields."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import msgspec

from shared.permissions import TABLE, TopicRights
from tests.docs_site.markdown import cell, one_line
from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "shared" / "messages"
_HEADING = """\
# Messages

What is on the bus. Messages are msgspec structs, packed as MessagePack arrays: the tag first where there is one, then
the fields in this order. New fields come last and have defaults, so that releases understand each other. This page is
made from `shared/topics.py`, `shared/permissions.py` and `shared/messages/`.

## Subjects

Behind the namespace, `baton.` unless configured; `*` stands for an id or a model's name. Only those named may publish
or hear a subject.

| subject | published by | heard by | queue | messages |
|---|---|---|---|---|
"""


class MessageField(NamedTuple):
    """A field as the source has it."""

    name: str
    type: str
    default: str | None
    meaning: str


def page() -> str:
    """The page's text."""
    modules = [import_module(f"shared.messages.{path.stem}") for path in sorted(FOLDER.glob("[!_]*.py"))]
    parts = [_HEADING + "\n".join(map(_subject, TABLE)) + "\n"]
    for module in modules:
        described = list(_structs(module))
        if described:
            title = module.__name__.rpartition(".")[2]
            parts += [
                f"## {title.replace('_', ' ').capitalize()}\n",
                f"{one_line(inspect.getdoc(module))}\n",
                *described,
            ]
    return "\n".join(parts)


def _subject(rights: TopicRights) -> str:
    topic = rights.topic(*("*" for _ in inspect.signature(rights.topic).parameters))
    names = ", ".join(f"[{each.__name__}](#{each.__name__.lower()})" for each in structs_of(topic.type))
    publishers, subscribers = (", ".join(each) for each in (rights.publishers, rights.subscribers))
    return f"| `{rights.subject}` | {publishers} | {subscribers} | {topic.queue or ''} | {names} |"


def structs_of(type_: Any) -> Iterator[type[msgspec.Struct]]:
    """A struct, or those of a union."""
    if inspect.isclass(type_) and issubclass(type_, msgspec.Struct):
        yield type_
    for each in get_args(getattr(type_, "__value__", type_)):
        yield from structs_of(each)


def _structs(module: ModuleType) -> Iterator[str]:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in tree.body:
        struct = getattr(module, node.name) if isinstance(node, ast.ClassDef) else None
        if isinstance(node, ast.ClassDef) and inspect.isclass(struct) and issubclass(struct, msgspec.Struct):
            yield f"### {node.name}\n"
            yield f"{cell(ast.get_docstring(node) or '')}\n"
            fields = [_row(each) for each in fields_of(node)]
            if fields:
                yield "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *fields]) + "\n"


def fields_of(struct: ast.ClassDef) -> Iterator[MessageField]:
    """In the order in which they are sent."""
    for node, after in zip(struct.body, [*struct.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            default = ast.unparse(node.value) if node.value is not None else None
            yield MessageField(node.target.id, ast.unparse(node.annotation), default, str(said))


def _row(field: MessageField) -> str:
    default = "must be set" if field.default is None else f"`{cell(field.default)}`"
    return f"| `{field.name}` | `{cell(field.type)}` | {default} | {cell(field.meaning)} |"
