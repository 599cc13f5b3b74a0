"""Everything here runs Triton's interpreter or compiler: a lane of its own, `make test-kernels`, so that `make test`
stays short."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.kernels)
