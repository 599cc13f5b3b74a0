"""A JSON schema as the compiler takes it."""

from __future__ import annotations

from typing import Any


def normal_form(schema: Any) -> Any:
    return schema
