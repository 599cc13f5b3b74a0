"""Packages that bring plug-ins, installed apart: examples by pip, broken ones as pip would leave them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

EXAMPLES = REPOSITORY / "docs" / "examples"
INSTALLED_WITHIN = 120.0
"""Seconds; it takes two, on a machine that has nothing else to do."""


def pip_installed(example: str, factory: pytest.TempPathFactory) -> Path:
    """The folder of packages into which pip has installed an example of the documentation, without a network. Once for
    all processes of a run of tests."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "installed" / example
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "packages").exists():
            _install(EXAMPLES / example, folder)
    return folder / "packages"


def _install(example: Path, folder: Path) -> None:
    source, target = folder / "source", folder / "unfinished"
    shutil.copytree(example, source)  # what building leaves behind stays there
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(target), str(source)],
        check=True,
        timeout=INSTALLED_WITHIN,
    )
    target.rename(folder / "packages")


def written_package(folder: Path, name: str, source: str, entry_points: Mapping[str, Mapping[str, str]]) -> Path:
    """The folder of packages with a distribution of one module, whose text is `source`. `entry_points`: group → name →
    `module:object`."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{entry} = {where}" for entry, where in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
