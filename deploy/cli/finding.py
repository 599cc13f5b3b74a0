"""What a check of `baton doctor` found."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""
    """What to do; empty where all is well."""


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name, "warn", detail, remedy)


def fail(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name, "fail", detail, remedy)
