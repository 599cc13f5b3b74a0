"""Says at the end of a run which tests the `-m` expression left out, and which command runs them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

COMMANDS = {
    "tests/integration/deploy/test_compose.py": "make test-compose",
    "tests/fuzz/test_gguf_files.py": "make fuzz",
    "tests/fuzz/test_hostile_bus.py": "make fuzz",
    "tests/fuzz/test_http_api.py": "make fuzz",
    "tests/fuzz/test_message_decoders.py": "make fuzz",
}
"""Files with a target of their own; every other slow test runs with `make test-slow`."""
EXTRAS = (
    "tests/actors/deploy/",
    "tests/browser/",
    "tests/integration/bench/",
    "tests/integration/clients/",
    "tests/integration/deploy/test_baton_batch.py",
    "tests/integration/deploy/test_kubernetes.py",
    "tests/integration/deploy/test_kubernetes_groups.py",
    "tests/integration/deploy/test_kubernetes_launcher.py",
    "tests/integration/deploy/test_kubernetes_pools.py",
    "tests/integration/deploy/test_readme.py",
    "tests/integration/deploy/test_simulated_pools.py",
    "tests/integration/deploy/test_tune.py",
    "tests/integration/observability/",
    "tests/integration/offline/",
    "tests/integration/worker/test_library_architectures.py",
    "tests/integration/worker/test_library_ranks.py",
    "tests/integration/worker/test_library_stages.py",
    "tests/integration/worker/test_model_features.py",
    "tests/integration/worker/test_sentence_transformers.py",
    "tests/integration/test_docs_site.py",
    "tests/integration/test_wheel.py",
    "tests/unit/deploy/cli/sizing/",
    "tests/unit/deploy/kubernetes/",
    "tests/unit/deploy/simulation/",
    "tests/unit/deploy/test_set_up.py",
    "tests/unit/deploy/test_without_network.py",
    "tests/unit/deploy/tuning/",
)
"""What is beside serving: offline use, benchmarks, simulation, tuning, Kubernetes, the wheel, Prometheus,
the console in a browser. Marked `extras`."""
FOLDERS: dict[str, str | tuple[str, ...]] = {
    "faults": "tests/faults/",
    "kernels": "tests/unit/worker/ops/triton/",
    "hosts": "tests/hosts/",
    "ray": "tests/ray/",
    "extras": EXTRAS,
}
"""What bears a marker by where it is. Files elsewhere may bear it, too."""
LANES = {
    "slow": "make test-slow",
    "extras": "make test-extras",
    "faults": "make test-faults",
    "kernels": "make test-kernels",
    "hosts": "make test-hosts",
    "ray": "make test-ray",
}
"""By marker; the first one that a test has counts."""


class LeftOutReport:
    """A pytest plugin: counts deselected tests by file, over `pytest-xdist`'s processes too.

    Every process collects the whole suite and deselects the same tests, so the controller believes the first that ends.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        """By command and file."""

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Counts those of a lane: what `-k` or a node id leaves out is the caller's own choice."""
        for item in items:
            lane = next((command for marker, command in LANES.items() if item.get_closest_marker(marker)), None)
            if lane is not None:
                file = item.nodeid.partition("::")[0]
                self._counts[COMMANDS.get(file, lane), file] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hands a worker process's counts to the controller."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = [(*key, count) for key, count in self._counts.items()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes the counts of a worker process that ended."""
        if not self._counts:
            for command, file, count in getattr(node, "workeroutput", {}).get("left_out", []):
                self._counts[command, file] += count

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line for each command that runs what was left out."""
        lanes: dict[str, Counter[str]] = {}
        for (command, file), count in self._counts.items():
            lanes.setdefault(command, Counter())[file] += count
        if lanes:
            terminalreporter.section("slow lanes left out")
        for command, files in sorted(lanes.items()):
            names = ", ".join(f"{file.removeprefix('tests/')} ({count})" for file, count in sorted(files.items()))
            terminalreporter.line(f"{command}: {sum(files.values())} tests: {names}")
