"""A plug-in of pytest (`make test-tiles`): kernels are of the level "amx", and tests that go through the levels have
it, emulated where the processor has no tiles. Processes that tests start are not concerned.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from services.worker.ops.native import build
from tests.support.tiles.emulated_tiles import tile_instructions

_HELD = pytest.StashKey[contextlib.ExitStack]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before anything is collected, as modules ask for the levels when they are imported; behind pytest's own handlers
    of signals, which would take the emulator's."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        held = session.config.stash[_HELD] = contextlib.ExitStack()
        held.enter_context(tile_instructions(Path(held.enter_context(TemporaryDirectory()))))
        flags = build._cpu_flags() | dict(build._NEEDED)["amx"]
        held.enter_context(pytest.MonkeyPatch.context()).setattr(build, "_cpu_flags", lambda: flags)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Takes it back."""
    if (held := session.config.stash.get(_HELD, None)) is not None:
        held.close()
