"""`$ref` within one document: JSON pointers (RFC 6901) to the schemas they mean. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

from services.worker.guided.schema.keywords import refuse


class Pending(NamedTuple):
    """A schema that was referred to and has not been read."""

    name: str
    schema: Any
    path: str


class Definitions:
    """Owns the names of the schemas that are referred to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._pending: list[Pending] = []

    def refer(self, pointer: Any, path: str) -> str:
        """The reference that the compiler is given. Raises GrammarRefused."""
        schema = self.target(pointer, path)
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
            self._pending.append(Pending(self._names[pointer], schema, pointer))
        return f"#/$defs/{self._names[pointer]}"

    def next(self) -> Pending | None:
        """The next schema to read."""
        return self._pending.pop() if self._pending else None

    def target(self, pointer: Any, path: str) -> Any:
        """The schema that `pointer` means, behind all references that are nothing else. Raises GrammarRefused."""
        seen: list[str] = []
        schema = self._at(pointer, path)
        while isinstance(schema, dict) and set(schema) == {"$ref"}:
            if pointer in seen:
                raise refuse(f"{path}.$ref", f"{pointer!r} refers to nothing but itself")
            seen.append(pointer)
            pointer = schema["$ref"]
            schema = self._at(pointer, path)
        return schema

    def _at(self, pointer: Any, path: str) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise refuse(f"{path}.$ref", f"{pointer!r:.80} is not supported; a pointer into this schema is (#/$defs/…)")
        value = self._root
        for step in unquote(pointer[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise refuse(f"{path}.$ref", f"{pointer!r:.80} leads nowhere")
        return value
