"""Says at the end of a run which tests the `-m` expression left out, and which command runs them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

COMMANDS = {"tests/integration/deploy/test_compose.py": "make test-compose"}
"""Lanes with a target of their own; every other slow test runs with `make test-slow`."""


class LeftOutReport:
    """A pytest plugin: counts deselected tests by file, over `pytest-xdist`'s processes too.

    Every process collects the whole suite and deselects the same tests, so the controller believes the first that ends.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Counts the slow ones: what `-k` or a node id leaves out is the caller's own choice."""
        self._counts.update(item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("slow"))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hands a worker process's counts to the controller."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = dict(self._counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes the counts of a worker process that ended."""
        if not self._counts:
            self._counts.update(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line for each command that runs what was left out."""
        lanes: dict[str, Counter[str]] = {}
        for file, count in self._counts.items():
            lanes.setdefault(COMMANDS.get(file, "make test-slow"), Counter())[file] += count
        if lanes:
            terminalreporter.section("slow lanes left out")
        for command, files in sorted(lanes.items()):
            names = ", ".join(f"{file.removeprefix('tests/')} ({count})" for file, count in sorted(files.items()))
            terminalreporter.line(f"{command}: {sum(files.values())} tests: {names}")
