"""A JSON schema as the compiler takes it: every document that the result describes is one that the schema describes.

xgrammar reads many keywords only where they stand alone or beside a type, and passes over the others in silence. So
everything is brought into few shapes that it does enforce, and what does not fit any of them is refused with its place.
The result may describe less: a schema that names properties gets no others unless it asks for them, keywords without a
type imply theirs, and patterns match strings as a whole. Pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

from services.worker.guided.schema.combining import Contradiction, merge_schemas, mutually_exclusive
from services.worker.guided.schema.keywords import (
    BY_TYPE,
    TYPES,
    Schema,
    admitted_values,
    assertions,
    refuse,
    types_of,
    value_key,
)
from services.worker.guided.schema.typed_forms import array_form, number_form, object_form, string_form

MAX_SCHEMAS = 20_000
"""Schemas read, those repeated by references counted each time: an end to what would grow without one."""


def normal_form(schema: Any) -> Schema:
    """`schema` in normal form.

    Raises GrammarRefused where no document satisfies it, or it says what cannot be enforced."""
    try:
        return _normal_form(schema)
    except RecursionError:
        raise refuse("$", "nested too deeply, or keywords beside a reference that leads to itself") from None


def _normal_form(schema: Any) -> Schema:
    reader = _Reader(schema)
    form = reader.read(schema, "$")
    if form is None:
        raise refuse("$", "no value satisfies this schema")
    definitions = {}
    while (pending := reader.definitions.next()) is not None:
        target = reader.read(pending.schema, pending.path)
        if target is None:
            raise refuse(pending.path, "no value satisfies this schema")
        definitions[pending.name] = target
    return {**form, "$defs": definitions} if definitions else form


class _Branch(NamedTuple):
    flat: Schema
    schema: Any
    """The branch for reading; unchanged if nothing stands beside it, so that references are kept."""
    path: str


class _Reader:
    """Reads one schema document."""

    def __init__(self, root: Any) -> None:
        self.definitions = Definitions(root)
        self._read = 0

    def read(self, schema: Any, path: str) -> Schema | None:
        """The form of `schema`; None where nothing satisfies it."""
        self._count(path)
        if isinstance(schema, bool):
            return {} if schema else None
        if isinstance(schema, dict) and set(assertions(schema, path)) == {"$ref"}:
            return {"$ref": self.definitions.refer(schema["$ref"], path)}
        flat = self._flat(schema, path)
        if flat is None:
            return None
        for keyword in ("anyOf", "oneOf"):
            if keyword in flat:
                return self._branches(flat, keyword, path)
        return self._single(flat, path)

    def _flat(self, schema: Any, path: str, within: tuple[str, ...] = ()) -> Schema | None:
        """`schema` with what `$ref` and `allOf` add to it; None where nothing satisfies that."""
        self._count(path)
        if isinstance(schema, bool):
            return {} if schema else None
        if not isinstance(schema, dict):
            raise refuse(path, f"{schema!r:.80} is not a schema; an object or a boolean is")
        flat = assertions(schema, path)
        parts = [(part, f"{path}.allOf[{i}]", within) for i, part in enumerate(flat.get("allOf", []))]
        flat.pop("allOf", None)
        if "$ref" in flat:
            pointer = flat.pop("$ref")
            if pointer in within:
                raise refuse(f"{path}.$ref", f"{pointer!r} refers to nothing but itself")
            parts.append((self.definitions.target(pointer, path), f"{path}.$ref", (*within, pointer)))
        try:
            for part, place, beyond in parts:
                other = self._flat(part, place, beyond)
                if other is None:
                    return None
                flat = merge_schemas(flat, other, path)
        except Contradiction:
            return None
        return flat

    def _branches(self, flat: Schema, keyword: str, path: str) -> Schema | None:
        """The branches, each with all that stands beside them."""
        rest = {word: value for word, value in flat.items() if word != keyword}
        parts: list[_Branch] = []
        for number, branch in enumerate(flat[keyword]):
            place = f"{path}.{keyword}[{number}]"
            try:
                part = self._flat(branch, place)
                if part is not None:
                    part = merge_schemas(rest, part, place)
                    parts.append(_Branch(part, part if rest else branch, place))
            except Contradiction:
                continue
        flats = [part.flat for part in parts]
        if keyword == "oneOf" and not mutually_exclusive(flats, path, lambda schema: self._flat(schema, path)):
            raise refuse(f"{path}.oneOf", "its branches must exclude each other by type, or by a required constant")
        forms = [form for part in parts if (form := self.read(part.schema, part.path)) is not None]
        return _any_of(forms)

    def _single(self, schema: Schema, path: str) -> Schema | None:
        """A schema that combines no others."""
        if "enum" in schema or "const" in schema:
            values = {value_key(value): value for value in admitted_values(schema, path)}
            return {"enum": list(values.values())} if values else None
        types = types_of(schema, path) if "type" in schema else _implied(schema)
        if types == TYPES:
            return {}
        forms = [form for name in types if (form := self._typed(name, schema, path)) is not None]
        return _any_of(forms)

    def _typed(self, name: str, schema: Schema, path: str) -> Schema | None:
        match name:
            case "object":
                closed = schema.get("unevaluatedProperties") is False
                return object_form(schema, path, self.read, closed=closed)
            case "array":
                return array_form(schema, path, self.read, closed=schema.get("unevaluatedItems") is False)
            case "string":
                return string_form(schema, path)
            case "number" | "integer":
                return number_form(schema, path, whole=name == "integer")
            case _:
                return {"type": name}

    def _count(self, path: str) -> None:
        self._read += 1
        if self._read > MAX_SCHEMAS:
            raise refuse(path, f"more than {MAX_SCHEMAS} schemas, or keywords beside a reference that leads to itself")


def _implied(schema: Schema) -> tuple[str, ...]:
    """The types that keywords speak of; all where none does."""
    implied = tuple(name for name in TYPES if name != "integer" and BY_TYPE[name] & schema.keys())
    return implied or TYPES


def _any_of(forms: list[Schema]) -> Schema | None:
    if not forms or {} in forms:
        return {} if forms else None
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


# `$ref` within one document: JSON pointers (RFC 6901) to the schemas they mean.


class PendingDefinition(NamedTuple):
    """A schema that was referred to and has not been read."""

    name: str
    schema: Any
    path: str


class Definitions:
    """Owns the names of the schemas that are referred to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._pending: list[PendingDefinition] = []

    def refer(self, pointer: Any, path: str) -> str:
        """The reference that the compiler is given. Raises GrammarRefused."""
        schema = self.target(pointer, path)
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
            self._pending.append(PendingDefinition(self._names[pointer], schema, pointer))
        return f"#/$defs/{self._names[pointer]}"

    def next(self) -> PendingDefinition | None:
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
